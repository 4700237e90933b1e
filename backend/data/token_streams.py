"""A token file as two streams, for training and for validation: views of the mapped file, of which nothing is read
before it is needed."""

from __future__ import annotations

import numpy as np

from ...core.plan.data_names import split_of
from .splits import FEW_DOCUMENTS, VALIDATION_FRACTION, bounds
from .stream import Stream
from .token_files import TokenFile


def token_streams(
    name: str, file: TokenFile, split: str | None, what: str, num_ids: int | None
) -> tuple[Stream, Stream]:
    """The tokens of a file for `what`, and those for validation."""
    first, last = _cuts(file, split)
    return _stream(name, what, file, 0, first, num_ids), _stream(name, "validation", file, first, last, num_ids)


def _stream(name: str, what: str, file: TokenFile, lo: int, hi: int, num_ids: int | None) -> Stream:
    def starts() -> np.ndarray | None:
        return None if file.index is None else file.starts(lo, hi)

    return Stream(name, what, file.ids[lo:hi], starts, lambda: file.digest(lo, hi), in_memory=False, num_ids=num_ids)


def _cuts(file: TokenFile, split: str | None) -> tuple[int, int]:
    """The first token for validation, and the one after its last: where documents begin, if there are several to
    count."""
    num_tokens, num_documents = len(file.ids), file.num_documents
    if split is None and num_documents < FEW_DOCUMENTS:
        return num_tokens - int(num_tokens * VALIDATION_FRACTION), num_tokens
    shares = split_of("90,10" if split is None else split)
    if file.index is None or num_documents == 1:
        return bounds(shares, num_tokens)
    first, last = bounds(shares, num_documents)
    return file.index.first_token(first), file.index.first_token(last)
