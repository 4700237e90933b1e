"""`Blend`: samples of several texts or token files in given proportions.

Megatron-Core's rule (`build_blending_indices`): every sample comes from the source that is furthest behind its share of
the samples so far; of equals from the first. Before the first sample the largest share counts as furthest behind. Here
shares are whole numbers out of their sum and errors are exact, where Megatron compares products in fp64: the two differ
where rounding there breaks a tie. In exact arithmetic all sources have their exact share after every `total` samples
(an error is above -1 share at all times, so it is 0 where it is whole and all add up to 0). The choice is therefore
periodic from the second period on, and one table of two periods answers for any sample of any run.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from torch import Tensor

from .stream import Stream, gathered

MOST_SHARES = 2**18
"""Samples of one period at most. The table then takes 5 MB and about a second to make, once a process; one of 0.3 and
0.7 has 20 entries. Weights that need a longer period are rounded to shares of one in so many samples, each to one at
least: shares are off by some millionths."""


def shares_of(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """The smallest whole numbers in the proportions of positive weights, or near them where their sum would be above
    `MOST_SHARES`.

    >>> shares_of([Fraction("0.3"), Fraction("0.7")])
    (3, 7)
    """
    total = sum(weights)
    parts = [weight / total for weight in weights]
    period = math.lcm(*(part.denominator for part in parts))
    if period > MOST_SHARES:
        return tuple(max(1, round(part * MOST_SHARES)) for part in parts)
    return tuple(int(part * period) for part in parts)


@functools.lru_cache(maxsize=4)
def choices(shares: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """For each sample of the first two periods `(source, number)`: where it comes from, uint16, and how many samples of
    that source come before it, int64. Both [2 * sum(shares)]."""
    total = sum(shares)
    sources, numbers = np.empty(2 * total, dtype=np.uint16), np.empty(2 * total, dtype=np.int64)
    # `behind` is a source's share of the samples so far minus what it has, times `total`
    behind, taken = list(shares), [0] * len(shares)
    for sample in range(2 * total):
        source = behind.index(max(behind))
        sources[sample], numbers[sample] = source, taken[source]
        taken[source] += 1
        behind[source] -= total
        if sample:  # the first sample was chosen as if one had come before
            behind = [each + share for each, share in zip(behind, shares, strict=True)]
    return sources, numbers


@dataclass(frozen=True)
class Blend:
    """A source of samples made of several, `shares` of them out of the sum; each is read in its own order, as often as
    its share needs."""

    parts: tuple[Stream, ...]
    shares: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that samples are made of."""
        return sum(part.num_tokens for part in self.parts)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal that tells whether samples are the same."""
        named = " ".join(f"{share}:{part.fingerprint}" for share, part in zip(self.shares, self.parts, strict=True))
        return hashlib.sha256(f"blend {named}".encode()).hexdigest()

    @property
    def is_remote(self) -> bool:
        """Whether samples are read over a network."""
        return any(part.is_remote for part in self.parts)

    def windows(self, numbers: np.ndarray, sequence: int, seed: int | None) -> tuple[Tensor, Tensor]:
        """As `Samples.windows`."""
        rows = [(at, part.windows(own, sequence, seed)) for part, at, own in self._chosen(numbers)]
        tokens, targets = gathered(rows, len(numbers))
        return tokens, targets

    def documents(self, numbers: np.ndarray, sequence: int, seed: int | None) -> Tensor:
        """As `Samples.documents`."""
        rows = [(at, (part.documents(own, sequence, seed),)) for part, at, own in self._chosen(numbers)]
        return gathered(rows, len(numbers))[0]

    def padded(self, numbers: np.ndarray, sequence: int, seed: int | None, fill: int) -> tuple[Tensor, Tensor]:
        """As `Samples.padded`."""
        rows = [(at, part.padded(own, sequence, seed, fill)) for part, at, own in self._chosen(numbers)]
        tokens, targets = gathered(rows, len(numbers))
        return tokens, targets

    def chosen(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`(source, number)` of samples: which part each comes from, and its number among that part's samples."""
        sources, counts = choices(self.shares)
        total = sum(self.shares)
        later = np.maximum(np.asarray(numbers, dtype=np.int64) // total - 1, 0)  # periods left out of the table
        place = numbers - later * total
        return sources[place], counts[place] + later * np.array(self.shares, dtype=np.int64)[sources[place]]

    def _chosen(self, numbers: np.ndarray) -> list[tuple[Stream, np.ndarray, np.ndarray]]:
        """Each part that is read, the places of its samples among `numbers`, and their own numbers."""
        sources, own = self.chosen(numbers)
        found = [(part, np.flatnonzero(sources == source)) for source, part in enumerate(self.parts)]
        return [(part, at, own[at]) for part, at in found if len(at)]
