"""`RemoteTokens`: the tokens of an object at a URL, of which nothing is read before it is needed, in the place of the
array that a mapped file is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base.url_blocks import Blocks
from ..base.url_cache import asked_for


@dataclass(frozen=True)
class RemoteTokens:
    """Whole numbers of type `dtype`, [num_tokens], from the byte `first_byte` of an object on. A slice of them is read
    when it becomes an array."""

    blocks: Blocks
    dtype: np.dtype
    first_byte: int
    num_tokens: int

    @property
    def itemsize(self) -> int:
        """Bytes of a token."""
        return self.dtype.itemsize

    def __len__(self) -> int:
        return self.num_tokens

    def __getitem__(self, chosen: slice) -> RemoteTokens:
        lo, hi, step = chosen.indices(self.num_tokens)
        assert step == 1, "tokens are read in their order"
        return RemoteTokens(self.blocks, self.dtype, self.first_byte + lo * self.itemsize, max(0, hi - lo))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.rows([(0, self.num_tokens)])[0].astype(dtype or self.dtype, copy=False)

    def rows(self, spans: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """The tokens `lo <= i < hi` of every span, read at the same time. Raises `FileError` where they cannot be."""
        clipped = [(min(lo, self.num_tokens), min(hi, self.num_tokens)) for lo, hi in spans]
        ranges = [
            (self.first_byte + lo * self.itemsize, self.first_byte + max(lo, hi) * self.itemsize) for lo, hi in clipped
        ]
        with asked_for(self.blocks.url):
            return [np.frombuffer(content, dtype=self.dtype) for content in self.blocks.read(ranges)]


Tokens = np.ndarray | RemoteTokens
"""Ids in memory, mapped, or at a URL."""


def rows_of(tokens: Tokens, spans: Sequence[tuple[int, int]]) -> list[np.ndarray]:
    """The tokens `lo <= i < hi` of every span; of an array they are views. Raises as `RemoteTokens.rows` does."""
    return tokens.rows(spans) if isinstance(tokens, RemoteTokens) else [tokens[lo:hi] for lo, hi in spans]
