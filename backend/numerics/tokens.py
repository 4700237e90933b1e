"""`OwnedTokens`: which tokens of each sequence a rank holds between the cut layers (sequence parallelism).

Context parallelism has cut the sequences before: the tokens that the ranks of a tensor-parallel group cut are those of
its context-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...core.base.reduction import Node
from ...core.layout.chunks import Chunks
from ...core.layout.leaves import Leaves
from ...core.plan.plan import Plan
from ...core.program.holdings import PART_LAYERS
from ..transport.base import Group


@dataclass(frozen=True)
class OwnedTokens:
    """`bounds[rank]` are the tokens `[lo, hi)` of a rank, counted among those of its context-parallel rank; `leaves`
    the blocks of tokens of the whole sequence that exact sums over them are made of."""

    bounds: tuple[tuple[int, int], ...]
    leaves: Leaves
    tp_rank: int
    cp: int = 1
    cp_rank: int = 0

    @property
    def own(self) -> tuple[int, int]:
        """This rank's tokens."""
        return self.bounds[self.tp_rank]

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many tokens each rank holds."""
        return tuple(hi - lo for lo, hi in self.bounds)

    @property
    def layer(self) -> str:
        """What recorders call the exchange of parts of gradients."""
        return PART_LAYERS["tokens"]

    @property
    def num_leaves(self) -> int:
        """Blocks of a sequence."""
        return self.leaves.num_leaves

    @property
    def member(self) -> int:
        """This rank's place among all that hold parts of one sequence: context-parallel ranks one after the other."""
        return self.cp_rank * len(self.bounds) + self.tp_rank

    def nodes(self, member: int) -> tuple[Node, ...]:
        """The nodes of the tree over a sequence's blocks that a member computes (exact numerics, whose
        cuts lie between blocks)."""
        cp_rank, tp_rank = divmod(member, len(self.bounds))
        lo, hi = self.bounds[tp_rank]
        return Chunks(self.num_leaves, self.cp, cp_rank).nodes(lo // self.leaves.block, -(-hi // self.leaves.block))


def owned_tokens(plan: Plan, tp: Group, cp: Group | None = None) -> OwnedTokens | None:
    """The cut of every sequence over a tensor-parallel group, of a context-parallel rank's part of it; None where each
    rank of the group holds all tokens."""
    if not plan.layout.sequence_parallel or tp.size == 1:
        return None
    bounds = tuple(plan.tokens_of(tp_rank) for tp_rank in range(tp.size))
    size, rank = (1, 0) if cp is None else (cp.size, cp.rank)
    return OwnedTokens(bounds, plan.leaf_sizes.tokens(plan.batch.sequence), tp.rank, size, rank)
