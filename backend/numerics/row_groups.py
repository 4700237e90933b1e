"""`ExpertRows`: which rows, copies of tokens, are of which expert and of which leaf of its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .contributions import Leaf


@dataclass(frozen=True)
class RowGroup:
    """Rows `[first, last)` of one local expert, at least one; in exact numerics those of one leaf,
    `leaves[leaf]` of the microbatch."""

    expert: int
    leaf: int
    first: int
    last: int


@dataclass(frozen=True)
class ExpertRows:
    """How N rows are grouped, in order. `leaves` are all that this microbatch contributes, also where an
    expert got nothing of one."""

    num_experts: int
    groups: tuple[RowGroup, ...]
    leaves: tuple[Leaf, ...]

    @cached_property
    def by_leaf(self) -> list[list[RowGroup | None]]:
        """The group of every expert in every leaf; None where the expert got nothing of it."""
        found: list[list[RowGroup | None]] = [[None] * self.num_experts for _ in self.leaves]
        for group in self.groups:
            found[group.leaf][group.expert] = group
        return found
