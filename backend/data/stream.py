"""`Stream`: tokens one after another, and the samples that are cut out of them.

Samples have numbers, which count from the run's first sample: what a sample holds is a function of its number, the
sequence length, the seed and the tokens, and of nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...core.base.errors import PlanError
from .order import shuffled
from .remote_tokens import RemoteTokens, Tokens, rows_of


class Samples(Protocol):
    """Where samples come from: a stream, or a blend of several. `numbers` are int64 [samples]; with a `seed` the order
    of samples is shuffled, with None it is that of the text; after the last the first follows again. All Tensors are
    int64 [samples, sequence]."""

    @property
    def num_tokens(self) -> int:
        """Tokens that samples are made of."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal that tells whether samples are the same."""

    @property
    def is_remote(self) -> bool:
        """Whether samples are read over a network."""

    def windows(self, numbers: np.ndarray, sequence: int, seed: int | None) -> tuple[Tensor, Tensor]:
        """`(tokens, targets)`: windows of `sequence` tokens; targets are one token ahead."""

    def documents(self, numbers: np.ndarray, sequence: int, seed: int | None) -> Tensor:
        """For every token of `windows` the place in its sample at which its document begins; one that began before the
        sample begins at its first token."""

    def padded(self, numbers: np.ndarray, sequence: int, seed: int | None, fill: int) -> tuple[Tensor, Tensor]:
        """`(tokens, targets)`: documents, cut to `sequence` tokens or filled up with `fill`."""


@dataclass(frozen=True)
class Stream:
    """Tokens of one text or token file. `name` is what the plan called it and `what` it is for: training or validation.

    `ids` is a read-only array of whole numbers, [num_tokens], in memory, or mapped or at a URL (then `in_memory` is
    false, and ids are checked to be below `num_ids` as they are read). `find_starts` gives where documents begin,
    ascending from 0, None where nobody knows; `digest` the fingerprint. Both are asked when they are first needed.
    """

    name: str
    what: str
    ids: Tokens
    find_starts: Callable[[], np.ndarray | None]
    digest: Callable[[], str]
    in_memory: bool = True
    num_ids: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that samples are made of."""
        return len(self.ids)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal that tells whether samples are the same."""
        return self.digest()

    @property
    def is_remote(self) -> bool:
        """Whether samples are read over a network."""
        return isinstance(self.ids, RemoteTokens)

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """Where documents begin, int64, ascending from 0. Raises `PlanError` where nobody knows."""
        if (found := self.find_starts()) is None:
            raise PlanError(
                f"train.data={self.name!r} is a plain file, which does not say where documents begin, as train.packed "
                "and train.padded need. Use a file with an index, as `shardproof tokenize` writes."
            )
        return found

    def windows(self, numbers: np.ndarray, sequence: int, seed: int | None) -> tuple[Tensor, Tensor]:
        """As `Samples.windows`. Raises `PlanError` when there is no window, and for ids that the model has not."""
        samples = np.empty((len(numbers), sequence + 1), dtype=np.int64)
        chosen = self._chosen(numbers, sequence, seed).tolist()
        spans = [(window * sequence, (window + 1) * sequence + 1) for window in chosen]
        for row, tokens in enumerate(rows_of(self.ids, spans)):
            samples[row] = tokens
        self._check(samples)
        whole = torch.from_numpy(samples)
        return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()

    def documents(self, numbers: np.ndarray, sequence: int, seed: int | None) -> Tensor:
        """As `Samples.documents`."""
        first = self._chosen(numbers, sequence, seed)[:, None] * sequence
        index = first + np.arange(sequence)
        begins = self.starts[np.searchsorted(self.starts, index, side="right") - 1]
        return torch.from_numpy(np.maximum(begins - first, 0))

    def padded(self, numbers: np.ndarray, sequence: int, seed: int | None, fill: int) -> tuple[Tensor, Tensor]:
        """As `Samples.padded`; documents of one token, which predict nothing, are left out. Raises `PlanError` where
        all are, and for ids that the model has not."""
        documents = self._whole_documents
        tokens, targets = (np.full((len(numbers), sequence), fill, dtype=np.int64) for _ in range(2))
        chosen = documents[_in_order(numbers, len(documents), seed, self.in_memory)].tolist()
        spans = [(lo, min(hi, lo + sequence + 1)) for lo, hi in chosen]
        for row, ids in enumerate(rows_of(self.ids, spans)):
            size = len(ids) - 1
            tokens[row, :size], targets[row, :size] = ids[:-1], ids[1:]
        self._check(tokens, targets)
        return torch.from_numpy(tokens), torch.from_numpy(targets)

    def num_windows(self, sequence: int) -> int:
        """Windows of one pass. Raises `PlanError` when there is none."""
        num_windows = (len(self.ids) - 1) // sequence
        if num_windows < 1:
            unit = "tokens (bytes)" if self.in_memory else "tokens"
            most = len(self.ids) - 1
            raise PlanError(
                f"train.data={self.name!r} has {len(self.ids)} {unit} for {self.what}, fewer than the {sequence + 1} "
                f"of one sample at batch.sequence={sequence}. Use a longer text"
                + (f", or batch.sequence of at most {most}." if most > 0 else ".")
            )
        return num_windows

    def _chosen(self, numbers: np.ndarray, sequence: int, seed: int | None) -> np.ndarray:
        return _in_order(numbers, self.num_windows(sequence), seed, self.in_memory)

    @functools.cached_property
    def _whole_documents(self) -> np.ndarray:
        """First token of every document that predicts something, and of the one after it: int64 [documents, 2]."""
        bounds = np.stack([self.starts, np.append(self.starts[1:], len(self.ids))], 1)
        found = bounds[bounds[:, 1] - bounds[:, 0] > 1]
        if not len(found):
            raise PlanError(
                f"train.data={self.name!r} has no document of two tokens or more for training or validation. Use "
                "longer files."
            )
        return found

    def _check(self, *read: np.ndarray) -> None:
        if self.num_ids is None or not all(array.size for array in read):
            return
        smallest, largest = min(int(array.min()) for array in read), max(int(array.max()) for array in read)
        if smallest < 0 or largest >= self.num_ids:
            raise PlanError(
                f"train.data={self.name!r} has the id {smallest if smallest < 0 else largest}, and the model has ids 0 "
                f"to {self.num_ids - 1}: another tokenizer made the file, or it is damaged. Tokenize the text with the "
                "model's tokenizer (`shardproof tokenize`), or use a model with a larger vocabulary."
            )


def _in_order(numbers: np.ndarray, num_items: int, seed: int | None, in_memory: bool) -> np.ndarray:
    if seed is None:
        return np.asarray(numbers, dtype=np.int64) % num_items
    return shuffled(numbers, num_items, seed, in_memory=in_memory)


def gathered(rows: Sequence[tuple[np.ndarray, tuple[Tensor, ...]]], num_rows: int) -> tuple[Tensor, ...]:
    """Tensors [num_rows, ...] of the rows that several sources have read, each with the places of its rows."""
    whole = tuple(torch.empty((num_rows, *part.shape[1:]), dtype=part.dtype) for part in rows[0][1])
    for places, parts in rows:
        for into, part in zip(whole, parts, strict=True):
            into[torch.from_numpy(places)] = part
    return whole
