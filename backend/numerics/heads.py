"""`OwnedHeads`: which part of the sums over heads and tokens a tensor-parallel rank has (norms of
query and key heads)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ...core.base.reduction import Node
from ...core.layout.leaves import LeafSizes
from ...core.plan.plan import Plan
from ...core.program.holdings import PART_LAYERS
from ..transport.base import Group


class OwnedPart(Protocol):
    """What the members of a group know of a sum over `num_leaves` leaves: `nodes(member)` of its tree, in order."""

    @property
    def num_leaves(self) -> int:
        """Leaves over all members."""

    @property
    def layer(self) -> str:
        """What recorders call the exchange."""

    @property
    def member(self) -> int:
        """This rank's place among the members."""

    def nodes(self, member: int, /) -> tuple[Node, ...]:
        """The nodes that a member computes."""


@dataclass(frozen=True)
class OwnedHeads:
    """Leaves are (key/value head, block of tokens), head by head; a rank has its own heads and all tokens of its
    context-parallel rank."""

    leaf_sizes: LeafSizes
    sequence: int
    tp: int
    tp_rank: int
    cp: int = 1
    cp_rank: int = 0

    @property
    def layer(self) -> str:
        """That of `core.program`."""
        return PART_LAYERS["heads"]

    @property
    def num_leaves(self) -> int:
        """Heads times blocks of tokens."""
        return self.leaf_sizes.head_sums(self.sequence)

    @property
    def member(self) -> int:
        """This rank's place among all that have parts of one sequence: context-parallel ranks one after the other."""
        return self.cp_rank * self.tp + self.tp_rank

    def nodes(self, member: int) -> tuple[Node, ...]:
        """The nodes of the tree over all leaves that a member computes."""
        cp_rank, tp_rank = divmod(member, self.tp)
        return self.leaf_sizes.nodes_of("heads", self.sequence, self.tp, tp_rank, cp=self.cp, cp_rank=cp_rank)


def owned_heads(plan: Plan, tp: Group, cp: Group) -> OwnedHeads | None:
    """The cut of the heads over a tensor-parallel group; None where each rank has all of them."""
    return OwnedHeads(plan.leaf_sizes, plan.batch.sequence, tp.size, tp.rank, cp.size, cp.rank) if tp.size > 1 else None
