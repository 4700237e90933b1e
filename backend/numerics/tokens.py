"""`OwnedTokens`: which tokens of each sequence a tensor-parallel rank holds between the cut layers (sequence parallelism)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.leaves import Leaves
from ...core.plan import Plan
from ...core.reduction import Node, maximal_nodes
from ..transport.base import Group


@dataclass(frozen=True)
class OwnedTokens:
    """`bounds[rank]` are the tokens `[lo, hi)` of a rank, `leaves` the blocks of tokens that exact sums over them are made of."""

    bounds: tuple[tuple[int, int], ...]
    leaves: Leaves
    tp_rank: int

    @property
    def own(self) -> tuple[int, int]:
        """This rank's tokens."""
        return self.bounds[self.tp_rank]

    def nodes(self, tp_rank: int) -> tuple[Node, ...]:
        """The nodes of the tree over a sequence's blocks that a rank computes (exact numerics, whose cuts lie between blocks)."""
        return maximal_nodes(self.leaves.num_leaves, *self.leaves.owned(len(self.bounds), tp_rank))

    def gather(self, x_BSN: Tensor, group: Group) -> Tensor:
        """The hidden states of all tokens, from every rank's own."""
        samples, _, features = x_BSN.shape
        return torch.cat(group.all_gather(x_BSN, [(samples, hi - lo, features) for lo, hi in self.bounds]), 1)

    def parts(self, x_BSN: Tensor) -> list[Tensor]:
        """What each rank is to hold of the hidden states of all tokens, flat."""
        return [x_BSN[:, lo:hi].reshape(-1) for lo, hi in self.bounds]


def owned_tokens(plan: Plan, group: Group) -> OwnedTokens | None:
    """The cut of every sequence over a tensor-parallel group; None where each rank holds all tokens."""
    if not plan.layout.sequence_parallel or group.size == 1:
        return None
    bounds = tuple(plan.tokens_of(tp_rank) for tp_rank in range(group.size))
    return OwnedTokens(bounds, plan.leaf_sizes.tokens(plan.batch.sequence), group.rank)
