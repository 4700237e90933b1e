"""Byte-level training text, and the windows of it that make up a batch.

Which window a sample is depends on the text, the sequence length, the seed and the sample's number in the run, and on
nothing else: not on the layout, the microbatch size, or the random generator's state. So every layout trains on the
same data in the same order.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...core.base.errors import PlanError
from .text import documents_of

VALIDATION_FRACTION = 0.1


@dataclass(frozen=True)
class Corpus:
    """Text as bytes, cut into training and validation parts that share nothing. `name` is what the plan called it.

    `train` and `validation` are read-only uint8 arrays of shape [num_tokens]; `train_starts` and
    `validation_starts` are the places in them at which documents (files, or the parts of the standard library's
    reference) begin, ascending from 0.
    """

    name: str
    train: np.ndarray
    validation: np.ndarray
    train_starts: np.ndarray
    validation_starts: np.ndarray

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the training text, in hexadecimal: equal where every batch is."""
        return hashlib.sha256(self.train.data).hexdigest()

    @classmethod
    def load(cls, data: str) -> Corpus:
        """The corpus that `[train] data` names: `python-stdlib`, a text file, or a folder of files
        (read recursively, by name).

        Every tenth document is for validation; the last tenth of the text when there are fewer than ten documents.
        Raises `PlanError` when there is no such file or nothing in it.
        """
        train, validation = _split(documents_of(data))
        return cls(data, _frozen(b"".join(train)), _frozen(b"".join(validation)), _starts(train), _starts(validation))

    def batch(self, first_sample: int, last_sample: int, sequence: int, seed: int) -> tuple[Tensor, Tensor]:
        """`(tokens, targets)`, each int64 [last_sample - first_sample, sequence]: samples `first_sample <=
        i < last_sample`, counted over the whole run.

        The text is cut into windows of `sequence`
        tokens (targets are one token ahead); each pass over them is a permutation of its own. Raises `PlanError`
        when the text holds no window.
        """
        return _windows(self.train, self._chosen(first_sample, last_sample, sequence, seed), sequence)

    def documents(self, first_sample: int, last_sample: int, sequence: int, seed: int) -> Tensor:
        """For every token of `batch` the place in its sample at which its document begins: int64 [last_sample -
        first_sample, sequence]. A document that began before the sample begins at its first token."""
        return _documents_of(self.train_starts, self._chosen(first_sample, last_sample, sequence, seed), sequence)

    def padded(self, first_sample: int, last_sample: int, sequence: int, seed: int, fill: int) -> tuple[Tensor, Tensor]:
        """As `batch`, but every sample is a document: its first `sequence` tokens, or all of them and then `fill`,
        which is the target of what has none, too. Each pass over the documents is a permutation of its own; those of
        one token are left out."""
        documents = _document_bounds(self.train, self.train_starts, self.name)
        passes = (divmod(number, len(documents)) for number in range(first_sample, last_sample))
        return _padded(
            self.train,
            documents[[_permutation(len(documents), seed, epoch)[place] for epoch, place in passes]],
            sequence,
            fill,
        )

    def padded_validation(self, first_sample: int, last_sample: int, sequence: int, fill: int) -> tuple[Tensor, Tensor]:
        """As `padded`, of validation documents in text order; after the last the first follows again."""
        documents = _document_bounds(self.validation, self.validation_starts, self.name)
        return _padded(
            self.validation, documents[np.arange(first_sample, last_sample) % len(documents)], sequence, fill
        )

    def _chosen(self, first_sample: int, last_sample: int, sequence: int, seed: int) -> list[int]:
        num_windows = self.num_windows(sequence)
        windows = []
        for number in range(first_sample, last_sample):
            epoch, position = divmod(number, num_windows)
            windows.append(int(_permutation(num_windows, seed, epoch)[position]))
        return windows

    def validation_batch(self, first_sample: int, last_sample: int, sequence: int) -> tuple[Tensor, Tensor]:
        """`(tokens, targets)` of validation windows in text order, int64 [last_sample - first_sample, sequence].

        After the last window the first follows again. Raises `PlanError` when the validation part holds no window.
        """
        num_windows = self.num_validation_windows(sequence)
        return _windows(
            self.validation, [number % num_windows for number in range(first_sample, last_sample)], sequence
        )

    def validation_documents(self, first_sample: int, last_sample: int, sequence: int) -> Tensor:
        """As `documents`, for `validation_batch`."""
        num_windows = self.num_validation_windows(sequence)
        return _documents_of(
            self.validation_starts, [number % num_windows for number in range(first_sample, last_sample)], sequence
        )

    def num_windows(self, sequence: int) -> int:
        """Windows of one pass over the training text. Raises `PlanError` when there is none."""
        return self._count(self.train, "training", sequence)

    def num_validation_windows(self, sequence: int) -> int:
        """Windows of the validation text. Raises `PlanError` when there is none."""
        return self._count(self.validation, "validation", sequence)

    def _count(self, part: np.ndarray, what: str, sequence: int) -> int:
        num_windows = (len(part) - 1) // sequence
        if num_windows < 1:
            raise PlanError(
                f"train.data={self.name!r} has {len(part)} tokens (bytes) for {what}, fewer than the {sequence + 1} "
                "of one sample "
                f"at batch.sequence={sequence}. Use a longer text, or batch.sequence of at most "
                f"{max(len(part) - 1, 0)}."
            )
        return num_windows


@functools.lru_cache(maxsize=4)
def _permutation(num_windows: int, seed: int, epoch: int) -> np.ndarray:
    """The order of windows in one pass: window numbers sorted by the raw Philox words of key (seed, epoch).

    Raw words are the same in every version of numpy, which `Generator.permutation` does not promise.
    """
    words = np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64)).random_raw(num_windows)
    return np.argsort(words, kind="stable")


def _windows(part: np.ndarray, windows: Sequence[int], sequence: int) -> tuple[Tensor, Tensor]:
    index = np.asarray(windows, dtype=np.int64)[:, None] * sequence + np.arange(sequence + 1)
    samples = torch.from_numpy(part[index].astype(np.int64))
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


def _document_bounds(part: np.ndarray, starts: np.ndarray, name: str) -> np.ndarray:
    """First and last token of every document that predicts something, int64 [documents, 2]. Raises
    `PlanError` when there is none."""
    bounds = np.stack([starts, np.append(starts[1:], len(part))], 1)
    found = bounds[bounds[:, 1] - bounds[:, 0] > 1]
    if not len(found):
        raise PlanError(
            f"train.data={name!r} has no document of two tokens or more for training or validation. Use longer files."
        )
    return found


def _padded(part: np.ndarray, documents: np.ndarray, sequence: int, fill: int) -> tuple[Tensor, Tensor]:
    tokens, targets = (np.full((len(documents), sequence), fill, dtype=np.int64) for _ in range(2))
    for row, (lo, hi) in enumerate(documents.tolist()):
        size = min(hi - 1 - lo, sequence)
        tokens[row, :size], targets[row, :size] = part[lo : lo + size], part[lo + 1 : lo + 1 + size]
    return torch.from_numpy(tokens), torch.from_numpy(targets)


def _documents_of(starts: np.ndarray, windows: Sequence[int], sequence: int) -> Tensor:
    first = np.asarray(windows, dtype=np.int64)[:, None] * sequence
    index = first + np.arange(sequence)
    return torch.from_numpy(np.maximum(starts[np.searchsorted(starts, index, side="right") - 1] - first, 0))


def _split(documents: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Training and validation documents, each but a part's last with a line end: every tenth to
    validation, or the tail of few."""
    if len(documents) >= 10:
        return _ended([text for i, text in enumerate(documents) if i % 10 != 9]), _ended(documents[9::10])
    ended = _ended(documents)
    length = sum(map(len, ended))
    cut = length - int(length * VALIDATION_FRACTION)
    parts: tuple[list[bytes], list[bytes]] = [], []
    for text in ended:
        for part, piece in zip(parts, (text[:cut], text[cut:]), strict=True):
            part += [piece] if piece else []
        cut = max(0, cut - len(text))
    return parts


def _ended(documents: Sequence[bytes]) -> list[bytes]:
    return [*(text + b"\n" for text in documents[:-1]), documents[-1]]


def _starts(documents: Sequence[bytes]) -> np.ndarray:
    """Where each document that holds something begins."""
    return np.cumsum(
        [0, *(len(text) for text in documents if text)][: max(1, sum(map(bool, documents)))], dtype=np.int64
    )


def _frozen(text: bytes) -> np.ndarray:
    return np.frombuffer(text, dtype=np.uint8)  # of an immutable buffer, so not writable
