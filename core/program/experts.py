"""Tokens on their way to experts and back, on one rank, with every expert taking an equal share of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..base.reduction import maximal_nodes
from ..layout.routed_tokens import RoutedTokens
from ..model.operators import Operator
from .expert_tokens import routed_tokens
from .tensors import Tensors
from .work import PARTIAL_BYTES, Collective, Op, Operations, scattered_bytes

COUNT_BYTES = 8
"""How many copies go to an expert, as int64."""


def dispatch(tensors: Tensors, operator: Operator, layer: str) -> Op:
    """A copy of each of a rank's tokens goes to each of the token's experts.

    With expert tensor parallelism the members of `etp` bring what they were sent together, and each computes with its
    part of the experts' width (Megatron-Core's all-to-all dispatcher; Liu et al. 2025, MoE Parallel Folding, arXiv
    2504.14960, section 3.2). The backward goes the same way back. Where tensor-parallel ranks all hold the same tokens,
    each sends an even part of them, and the results and gradients of all parts are gathered.
    """
    sent = _Sent(tensors, routed_tokens(tensors.plan))
    forward = (*sent.counts(layer), *sent.to_experts(layer))
    return Op(layer, operator.role, forward, (*sent.from_experts(layer), *sent.hidden_states(layer)), ())


def combine(tensors: Tensors, operator: Operator, layer: str) -> Op:
    """What the experts make of the copies comes back; backward also the gradients of the weights with which the
    results were added up."""
    sent, weights = _Sent(tensors, routed_tokens(tensors.plan)), tensors.plan.model.experts_per_token * PARTIAL_BYTES
    forward = (*sent.from_experts(layer), *sent.hidden_states(layer))
    return Op(layer, operator.role, forward, (*sent.to_experts(layer), *sent.gathered(layer, weights)), ())


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

    def hidden_states(self, layer: str) -> Operations:
        """The same of hidden states."""
        return self.gathered(layer, self.tensors.plan.model.hidden_size * self.tensors.element_bytes)

    def _exchanged(self, layer: str) -> Operations:
        ep = self.tensors.plan.layout.ep
        return () if ep == 1 else (Collective(layer, "all_to_all", "ep", ep, scattered_bytes(self.copies_bytes, ep)),)
