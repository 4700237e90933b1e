"""The MLP of a layer: dense, or a router with experts and shared experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ..base.reduction import maximal_nodes
from ..layout.routed_tokens import RoutedTokens
from ..model.roles import Role
from .expert_tokens import routed_tokens
from .linear import column, row
from .router import router_work
from .tensors import Tensors
from .work import PARTIAL_BYTES, Collective, LayerWork, Operations, Product, scattered_bytes

COUNT_BYTES = 8
"""How many copies go to an expert, as int64."""


def mlp_work(tensors: Tensors, prefix: str, *, moe: bool) -> tuple[LayerWork, ...]:
    """The MLP of one layer, from the normed hidden state to the sum over its parts."""
    if not moe:
        return _dense(tensors, prefix, Role.UP, Role.DOWN, "ffn")
    works = (router_work(tensors, prefix), *_experts(tensors, prefix))
    if not tensors.plan.model.num_shared_experts:
        return works
    return (*works, *_dense(tensors, prefix, Role.SHARED_UP, Role.SHARED_DOWN, "shared_ffn"))


def _dense(
    tensors: Tensors, prefix: str, up: Role, down: Role, feature: Literal["ffn", "shared_ffn"]
) -> tuple[LayerWork, ...]:
    leaves = tensors.plan.leaf_sizes.feature(feature)
    return (
        column(tensors, prefix, up, leaves, 2 if tensors.plan.model.gated else 1),
        row(tensors, prefix, down, leaves, 1),
    )


def _experts(tensors: Tensors, prefix: str) -> tuple[LayerWork, ...]:
    """Dispatch, the two products of the local experts, and combine, with every expert taking an
    equal share of the tokens.

    A rank sends a copy of each of its tokens to each of the token's experts; with expert tensor parallelism the members
    of `etp` bring what they were sent together, and each computes with its part of the experts' width (Megatron-Core's
    all-to-all dispatcher; Liu et al. 2025, MoE Parallel Folding, arXiv 2504.14960, section 3.2). The backward goes the
    same way back. Where tensor-parallel ranks all hold the same tokens, each sends an even part of them, and the
    results and gradients of all parts are gathered.
    """
    plan, model, layout = tensors.plan, tensors.plan.model, tensors.plan.layout
    up, down, dispatch, combine = (
        role.named(prefix) for role in (Role.EXPERTS_UP, Role.EXPERTS_DOWN, Role.DISPATCH, Role.COMBINE)
    )
    count = model.num_experts // layout.ep
    m, h = -(-tensors.tokens * model.experts_per_token * layout.expert_tp // (tensors.tp * count)), model.hidden_size
    leaves = plan.leaf_sizes.feature("expert_ffn")
    lo, hi = leaves.owned_items(layout.expert_tp, tensors.tp_rank % layout.expert_tp)
    f = hi - lo
    g = f * (2 if model.gated else 1)
    sent = _Sent(tensors, routed_tokens(plan))
    hidden, weights = h * tensors.element_bytes, model.experts_per_token * PARTIAL_BYTES

    def product(layer: str, m: int, n: int, k: int) -> Operations:
        return (Product(layer, m, n, k, count, grouped=True),)

    return (
        LayerWork(
            dispatch,
            Role.DISPATCH,
            (*sent.counts(dispatch), *sent.to_experts(dispatch)),
            (*sent.from_experts(dispatch), *sent.gathered(dispatch, hidden)),
            (),
        ),
        LayerWork(up, Role.EXPERTS_UP, product(up, m, g, h), product(up, m, h, g), product(up, g, h, m)),
        LayerWork(down, Role.EXPERTS_DOWN, product(down, m, h, f), product(down, m, f, h), product(down, f, h, m)),
        LayerWork(
            combine,
            Role.COMBINE,
            (*sent.from_experts(combine), *sent.gathered(combine, hidden)),
            (*sent.to_experts(combine), *sent.gathered(combine, weights)),
            (),
        ),
    )


@dataclass(frozen=True)
class _Sent:
    """What a rank sends of the tokens that it routes."""

    tensors: Tensors
    routed: RoutedTokens

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of a microbatch."""
        lo, hi = self.routed.own(self.tensors.tp_rank)
        return self.tensors.plan.batch.micro_size * (hi - lo)

    @property
    def num_copies(self) -> int:
        """A copy for each expert of each token."""
        return self.num_tokens * self.tensors.plan.model.experts_per_token

    @property
    def copies_bytes(self) -> int:
        """Bytes of all copies."""
        return self.num_copies * self.tensors.plan.model.hidden_size * self.tensors.element_bytes

    def counts(self, layer: str) -> Operations:
        """How many copies of each piece of the tokens (`core.program.expert_tokens`) go to each
        expert, before the copies."""
        plan, layout = self.tensors.plan, self.tensors.plan.layout
        num_pieces = plan.batch.micro_size * len(self.routed.pieces(self.tensors.tp_rank, self.tensors.cp_rank))
        counts = plan.model.num_experts * num_pieces * COUNT_BYTES
        over_ep = (Collective(layer, "all_to_all", "ep", layout.ep, scattered_bytes(counts, layout.ep)),)
        over_etp = (Collective(layer, "all_gather", "etp", layout.expert_tp, counts * (layout.expert_tp - 1)),)
        return (*(over_ep if layout.ep > 1 else ()), *(over_etp if layout.expert_tp > 1 else ()))

    def to_experts(self, layer: str) -> Operations:
        """Copies of tokens, or gradients of their results, on the way to experts: an all-to-all,
        then a gather over `etp`."""
        etp = self.tensors.plan.layout.expert_tp
        gather = (Collective(layer, "all_gather", "etp", etp, self.copies_bytes * (etp - 1)),) if etp > 1 else ()
        return (*self._exchanged(layer), *gather)

    def from_experts(self, layer: str) -> Operations:
        """The way back: partial sums are added over `etp`, in exact numerics as nodes of the tree
        over the expert's width."""
        plan, etp = self.tensors.plan, self.tensors.plan.layout.expert_tp
        if etp == 1:
            return self._exchanged(layer)
        if plan.numerics.mode == "fast":
            return (
                Collective(layer, "reduce_scatter", "etp", etp, self.copies_bytes * (etp - 1)),
                *self._exchanged(layer),
            )
        leaves = plan.leaf_sizes.feature("expert_ffn")
        num_nodes = len(maximal_nodes(leaves.num_leaves, *leaves.owned(etp, self.tensors.tp_rank % etp)))
        partial_bytes = self.num_copies * plan.model.hidden_size * PARTIAL_BYTES
        return (
            Collective(layer, "all_to_all", "etp", etp, num_nodes * partial_bytes * (etp - 1)),
            *self._exchanged(layer),
        )

    def gathered(self, layer: str, token_bytes: int) -> Operations:
        """What every tensor-parallel rank has of its part of the tokens, where all hold the same."""
        if self.tensors.tp == 1 or self.tensors.plan.layout.sequence_parallel:
            return ()
        return (self.tensors.tp_collective(layer, "all_gather", self.num_tokens * token_bytes * (self.tensors.tp - 1)),)

    def _exchanged(self, layer: str) -> Operations:
        ep = self.tensors.plan.layout.ep
        return () if ep == 1 else (Collective(layer, "all_to_all", "ep", ep, scattered_bytes(self.copies_bytes, ep)),)
