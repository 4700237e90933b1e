"""A text as two streams of bytes in memory, for training and for validation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from ...core.plan.data_names import split_of
from ..base.url_cache import USUAL_CACHE, UrlCache
from .splits import VALIDATION_FRACTION, bounds
from .stream import Stream
from .text import documents_of


def text_streams(name: str, split: str | None, what: str, cache: UrlCache = USUAL_CACHE) -> tuple[Stream, Stream]:
    """The bytes of a text for `what`, and those for validation. Raises `PlanError` when there is no text."""
    documents = documents_of(name, cache)
    train, validation = _every_tenth(documents) if split is None else _split(documents, split)
    return _stream(name, what, train), _stream(name, "validation", validation)


def _stream(name: str, what: str, documents: Sequence[bytes]) -> Stream:
    text, starts = b"".join(documents), _starts(documents)
    ids = np.frombuffer(text, dtype=np.uint8)  # of an immutable buffer, so not writable
    return Stream(name, what, ids, lambda: starts, lambda: hashlib.sha256(text).hexdigest())


def _every_tenth(documents: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Training and validation documents, each but a part's last with a line end: every tenth to
    validation, or the tail of few."""
    if len(documents) >= 10:
        return _ended([text for i, text in enumerate(documents) if i % 10 != 9]), _ended(documents[9::10])
    ended = _ended(documents)
    length = sum(map(len, ended))
    return _cut(ended, length - int(length * VALIDATION_FRACTION), length)


def _split(documents: Sequence[bytes], split: str) -> tuple[list[bytes], list[bytes]]:
    """Training and validation documents by their order, or bytes of a single one."""
    shares = split_of(split)
    if len(documents) == 1:
        return _cut(documents, *bounds(shares, len(documents[0])))
    first, last = bounds(shares, len(documents))
    return _ended(documents[:first]), _ended(documents[first:last])


def _cut(documents: Sequence[bytes], cut: int, end: int) -> tuple[list[bytes], list[bytes]]:
    """The first `cut` bytes, and those up to `end`."""
    parts: tuple[list[bytes], list[bytes]] = [], []
    for text in documents:
        for part, piece in zip(parts, (text[:cut], text[cut:end]), strict=True):
            part += [piece] if piece else []
        cut, end = max(0, cut - len(text)), max(0, end - len(text))
    return parts


def _ended(documents: Sequence[bytes]) -> list[bytes]:
    return [*(text + b"\n" for text in documents[:-1]), *documents[-1:]]


def _starts(documents: Sequence[bytes]) -> np.ndarray:
    """Where each document that holds something begins."""
    return np.cumsum(
        [0, *(len(text) for text in documents if text)][: max(1, sum(map(bool, documents)))], dtype=np.int64
    )
