"""`OwnedLeaves`: which leaves of a cut dimension a tensor-parallel rank has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...core.base.reduction import Node, maximal_nodes
from ...core.layout.leaves import Leaves
from .summands import Summands


@dataclass(frozen=True)
class OwnedLeaves:
    """The feature leaves of one tensor-parallel rank; `unit` features of the tensor per item of the leaf."""

    leaves: Leaves
    unit: int
    tp: int
    tp_rank: int

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """`[lo, hi)` of each own leaf in the local tensor."""
        lo, hi = self.leaves.owned(self.tp, self.tp_rank)
        offset = self.leaves.items(lo, hi)[0]
        items = [self.leaves.items(leaf, leaf + 1) for leaf in range(lo, hi)]
        return tuple(((first - offset) * self.unit, (last - offset) * self.unit) for first, last in items)

    @property
    def width(self) -> int:
        """Features of a leaf; the last one of the whole dimension may have fewer."""
        return self.leaves.block * self.unit

    @property
    def num_leaves(self) -> int:
        """Leaves over all ranks."""
        return self.leaves.num_leaves

    @property
    def first_leaf(self) -> int:
        """Global index of the first own leaf."""
        return self.leaves.owned(self.tp, self.tp_rank)[0]

    @property
    def items(self) -> tuple[int, int]:
        """The global items `[lo, hi)` of this rank, for a vocabulary its token ids."""
        return self.leaves.owned_items(self.tp, self.tp_rank)

    def nodes(self, tp_rank: int) -> tuple[Node, ...]:
        """The nodes of the sum over all leaves that a rank computes."""
        return maximal_nodes(self.leaves.num_leaves, *self.leaves.owned(self.tp, tp_rank))

    @cached_property
    def own_nodes(self) -> tuple[Node, ...]:
        """The nodes of this rank, by its own leaves counted from 0."""
        first = self.first_leaf
        return tuple((lo - first, hi - first) for lo, hi in self.nodes(self.tp_rank))

    @cached_property
    def summands(self) -> Summands:
        """What every rank brings to the sum over all leaves."""
        return Summands(self.leaves.num_leaves, tuple(self.nodes(tp_rank) for tp_rank in range(self.tp)))
