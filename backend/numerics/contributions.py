"""What one microbatch adds to a gradient, and what adds it up while microbatches arrive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from .open_sums import OpenSums
from .token_product import AddedInPlace

Leaf = tuple[int, int]
"""A leaf of the expert gradients: a sample of the global batch and a token block of its sequence."""

ExpertContribution = Tensor | AddedInPlace | Iterator[tuple[Leaf, Tensor]]
"""What one microbatch adds to the gradient of all local experts: one tensor or products (fast), or one tensor per leaf
(exact)."""

Contribution = Tensor | AddedInPlace | Sequence[Tensor] | OpenSums | ExpertContribution
"""What one microbatch adds to a gradient: one tensor, or what is still to be computed (fast), one tensor per sample
(exact), or one per leaf of experts (exact). Whoever receives it owns it."""


class Accumulator(Protocol):
    """One gradient while a step's microbatches arrive, in any order."""

    def add(self, first_sample: int, contribution: Contribution) -> None:
        """Takes the contribution of the samples that start at `first_sample` of the global batch."""

    @property
    def held(self) -> list[Tensor]:
        """Every tensor held now."""


def by_sample(contribution: Contribution) -> Sequence[Tensor]:
    """What exact numerics give of each sample."""
    assert isinstance(contribution, (Sequence, Tensor)), "exact numerics give one tensor per sample"
    return contribution.unbind() if isinstance(contribution, Tensor) else contribution
