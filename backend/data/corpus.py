"""Training data and the samples of it that make up a batch.

Which tokens a sample has depends on the data, the sequence length, the seed and the sample's number in the run, and on
nothing else: not on the layout, the microbatch size, or the random generator's state. So every layout trains on the
same data in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ...core.plan.data_names import named_data
from ...core.plan.plan import Plan
from ..base.url_cache import USUAL_CACHE, UrlCache
from .blend import Blend, shares_of
from .stream import Samples, Stream
from .text_streams import text_streams
from .token_files import cache_of, open_tokens, token_file_of
from .token_streams import token_streams


@dataclass(frozen=True)
class Corpus:
    """Samples for training and for validation, which share nothing. `name` is what the plan called the data."""

    name: str
    train: Samples
    validation: Samples

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the training data, in hexadecimal: equal where every batch is. Of a text it is that of its bytes;
        of token files, that of pieces and of the index (`TokenFile.digest`)."""
        return self.train.fingerprint

    @property
    def record(self) -> Mapping[str, Any]:
        """What a checkpoint keeps of the data, to be compared when a run goes on from it."""
        in_bytes = isinstance(self.train, Stream) and self.train.in_memory
        return {"bytes" if in_bytes else "tokens": self.train.num_tokens, "sha256": self.fingerprint}

    @property
    def is_remote(self) -> bool:
        """Whether training samples are read over a network."""
        return self.train.is_remote

    @classmethod
    def of(cls, plan: Plan) -> Corpus:
        """The data of a plan, whose ids are checked to be ids of its model as they are read. Raises as `load` does."""
        train = plan.train
        num_ids = plan.model.vocab_size - plan.model.padding_rows
        return cls.load(
            train.data,
            split=train.split,
            validation_data=train.validation_data,
            num_ids=num_ids,
            cache=cache_of(plan.train),
        )

    @classmethod
    def load(
        cls,
        data: str,
        *,
        split: str | None = None,
        validation_data: str | None = None,
        num_ids: int | None = None,
        cache: UrlCache = USUAL_CACHE,
    ) -> Corpus:
        """The corpus that `[train] data` names: `python-stdlib`, a text file, a folder of files (read recursively, by
        name), a token file, or several with weights. What lies at a URL is read through `cache`.

        What is for validation is `validation_data`; else the share of the documents that `split` says; else every tenth
        document of a text and the last tenth of a token file's, or the last tenth of the tokens when there are fewer
        than ten documents. Raises `PlanError` when there is no such file, it is damaged, or nothing is in it.
        """
        if validation_data is not None:
            split = "1"  # all of it
        train, validation = _samples(data, lambda name: _streams(name, split, num_ids, cache))
        if validation_data is not None:
            validation, _ = _samples(validation_data, lambda name: _streams(name, split, num_ids, cache, "validation"))
        return cls(data, train, validation)

    def batch(self, first_sample: int, last_sample: int, sequence: int, seed: int) -> tuple[Tensor, Tensor]:
        """`(tokens, targets)`, each int64 [last_sample - first_sample, sequence]: samples `first_sample <=
        i < last_sample`, counted over the whole run.

        The data are cut into windows of `sequence` tokens (targets are one token ahead); each pass over them is a
        permutation of its own. Raises `PlanError` when the data hold no window.
        """
        return self.train.windows(np.arange(first_sample, last_sample), sequence, seed)

    def documents(self, first_sample: int, last_sample: int, sequence: int, seed: int) -> Tensor:
        """For every token of `batch` the place in its sample at which its document begins: int64 [last_sample -
        first_sample, sequence]. A document that began before the sample begins at its first token."""
        return self.train.documents(np.arange(first_sample, last_sample), sequence, seed)

    def padded(self, first_sample: int, last_sample: int, sequence: int, seed: int, fill: int) -> tuple[Tensor, Tensor]:
        """As `batch`, but every sample is a document: its first `sequence` tokens, or all of them and then `fill`,
        which is the target of what has none, too. Each pass over the documents is a permutation of its own; those of
        one token are left out."""
        return self.train.padded(np.arange(first_sample, last_sample), sequence, seed, fill)

    def validation_batch(self, first_sample: int, last_sample: int, sequence: int) -> tuple[Tensor, Tensor]:
        """`(tokens, targets)` of validation windows in text order, int64 [last_sample - first_sample, sequence].

        After the last window the first follows again. Raises `PlanError` when the validation part holds no window.
        """
        return self.validation.windows(np.arange(first_sample, last_sample), sequence, None)

    def validation_documents(self, first_sample: int, last_sample: int, sequence: int) -> Tensor:
        """As `documents`, for `validation_batch`."""
        return self.validation.documents(np.arange(first_sample, last_sample), sequence, None)

    def padded_validation(self, first_sample: int, last_sample: int, sequence: int, fill: int) -> tuple[Tensor, Tensor]:
        """As `padded`, of validation documents in text order; after the last the first follows again."""
        return self.validation.padded(np.arange(first_sample, last_sample), sequence, None, fill)


def _streams(
    name: str, split: str | None, num_ids: int | None, cache: UrlCache, what: str = "training"
) -> tuple[Stream, Stream]:
    """One source's tokens for training and for validation."""
    path = token_file_of(name)
    if path is None:
        return text_streams(name, split, what, cache)
    return token_streams(name, open_tokens(path, cache), split, what, num_ids)


def _samples(data: str, streams: Callable[[str], tuple[Stream, Stream]]) -> tuple[Samples, Samples]:
    """What all sources that `data` names have for training and for validation, blended where there are several."""
    sources = named_data(data)
    pairs = [streams(source.name) for source in sources]
    if len(pairs) == 1:
        return pairs[0]
    shares = shares_of([source.weight for source in sources])
    train, validation = zip(*pairs, strict=True)
    return Blend(train, shares), Blend(validation, shares)
