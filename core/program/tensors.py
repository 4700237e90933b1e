"""Sizes of one microbatch's tensors on one rank, and the collectives that complete them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from ..base.reduction import cut, maximal_nodes
from ..layout.chunks import Chunks
from ..layout.leaves import Leaves
from ..model.operators import Feature, Width
from .work import PARTIAL_BYTES, Collective, CollectiveOp, Operations, activation_bytes, scattered_bytes

if TYPE_CHECKING:
    from ..plan.plan import Plan


ID_BYTES = 8
"""Ids of tokens and positions are int64."""


@dataclass(frozen=True)
class Tensors:
    """Sizes of one microbatch's tensors on one tensor-parallel rank, and the collectives that complete them.

    With context parallelism every rank holds 1/cp of each sequence, two chunks that lie symmetrically in it, so all cp
    ranks have equal work under a causal mask (Dubey et al. 2024, Llama 3, section 3.3.2; Megatron-Core's
    `get_batch_on_this_cp_rank`).
    """

    plan: Plan
    tp_rank: int
    cp_rank: int = 0

    @cached_property
    def tp(self) -> int:
        """Number of tensor-parallel ranks."""
        return self.plan.layout.tp

    @cached_property
    def sequence(self) -> int:
        """Tokens of one sequence on a context-parallel rank: s/cp."""
        return self.plan.batch.sequence // self.plan.layout.cp

    @cached_property
    def tokens(self) -> int:
        """Tokens of a microbatch: b*s/cp."""
        return self.plan.batch.micro_size * self.sequence

    @cached_property
    def own_tokens(self) -> int:
        """Tokens whose hidden states this rank holds outside the cut layers: a part of each sequence with
        sequence parallelism."""
        lo, hi = self.plan.tokens_of(self.tp_rank)
        return self.plan.batch.micro_size * (hi - lo)

    @cached_property
    def element_bytes(self) -> int:
        """Bytes per element of a hidden state."""
        return activation_bytes(self.plan.precision.dtype)

    def leaves(self, axis: Feature) -> Leaves:
        """The leaves of a feature axis."""
        return self.plan.leaf_sizes.feature(axis)

    def held(self, width: Width, degree: int | None = None) -> int:
        """Numbers of a token that this rank holds of a width, which `degree` ranks cut, by default those of tensor
        parallelism."""
        if width.axis is None:
            return width.size
        degree = self.tp if degree is None else degree
        lo, hi = self.leaves(width.axis).owned_items(degree, self.tp_rank % degree)
        return (hi - lo) * width.unit

    def num_nodes(self, leaves: Leaves) -> int:
        """Partial sums this rank ships for a sum over `leaves`."""
        return len(maximal_nodes(leaves.num_leaves, *leaves.owned(self.tp, self.tp_rank)))

    def reduce(self, layer: str, leaves: Leaves | None, width: int) -> Operations:
        """Completes a sum over tensor-parallel ranks: [tokens, width] on every rank, or its own tokens
        with sequence parallelism.

        What is summed lies on `leaves`; None means that one rank has the whole value.
        """
        if self.tp == 1:
            return ()
        if self.plan.numerics.mode == "fast":
            payload = self.tokens * width * self.element_bytes
            if self.plan.layout.sequence_parallel:
                return (self.tp_collective(layer, "reduce_scatter", scattered_bytes(payload, self.tp)),)
            return (self.tp_collective(layer, "all_reduce", 2 * (self.tp - 1) * payload, divisor=self.tp),)
        own, num_nodes = self._own_elements(width), 1 if leaves is None else self.num_nodes(leaves)
        scatter = self.tp_collective(layer, "all_to_all", num_nodes * (self.tokens * width - own) * PARTIAL_BYTES)
        return (
            (scatter,)
            if self.plan.layout.sequence_parallel
            else (scatter, self._gather(layer, own, self.element_bytes))
        )

    def gather(self, layer: str, width: int, dtype: Literal["fp32"] | None = None) -> Operations:
        """Brings all tokens to every rank before a cut layer; nothing to do without sequence parallelism. They have the
        plan's precision unless `dtype` is given."""
        if self.tp == 1 or not self.plan.layout.sequence_parallel:
            return ()
        return (self._gather(layer, self.own_tokens * width, activation_bytes(dtype) if dtype else self.element_bytes),)

    def gather_sequence(self, layer: str, width: int) -> Operations:
        """Exact numerics: hidden states of a rank's tokens, and ids and positions of the tokens, to
        all ranks of a sequence."""
        cp = self.plan.layout.cp
        if not sequences_are_cut(self.plan):
            return ()
        sizes = self.tokens * width * self.element_bytes, self.tokens * 2 * ID_BYTES
        return tuple(Collective(layer, "all_gather", "cp", cp, size * (cp - 1)) for size in sizes)

    def softmax(self, layer: str, leaves: Leaves) -> Operations:
        """The global maximum, then block sums of exponentials together with the target's logit, one number per token
        each; with label smoothing those of the logits too."""
        if self.tp == 1:
            return ()
        column, num_sums = self.tokens * PARTIAL_BYTES, 2 if self.plan.train.label_smoothing else 1
        if self.plan.numerics.mode == "fast":
            maximum = self.tp_collective(layer, "all_reduce", 2 * (self.tp - 1) * column, divisor=self.tp)
        else:
            maximum = self.tp_collective(layer, "all_gather", column * (self.tp - 1))
        return (maximum, *self.row_sums(layer, leaves, num_sums, others=1))

    def row_sums(self, layer: str, leaves: Leaves, num_sums: int, *, others: int = 0) -> Operations:
        """Completes sums over the features of every token, of which each rank has some leaves, in one exchange; with
        them go `others`, one number per token each."""
        if self.tp == 1:
            return ()
        column = self.tokens * PARTIAL_BYTES * (self.tp - 1)
        if self.plan.numerics.mode == "fast":
            return (self.tp_collective(layer, "all_reduce", 2 * (num_sums + others) * column, divisor=self.tp),)
        return (self.tp_collective(layer, "all_gather", (num_sums * self.num_nodes(leaves) + others) * column),)

    def tp_collective(self, layer: str, op: CollectiveOp, sent_bytes: int, divisor: int = 1) -> Collective:
        """A collective over tensor parallelism; `sent_bytes / divisor` rounded up leave this rank."""
        return Collective(layer, op, "tp", self.tp, -(-sent_bytes // divisor))

    def _own_elements(self, width: int) -> int:
        """Elements of the completed sum that this rank finishes: its tokens, or an even part of the flat tensor."""
        if self.plan.layout.sequence_parallel:
            return self.own_tokens * width
        lo, hi = cut(self.tokens * width, self.tp, self.tp_rank)
        return hi - lo

    def _gather(self, layer: str, own_elements: int, element_bytes: int) -> Collective:
        return self.tp_collective(layer, "all_gather", own_elements * element_bytes * (self.tp - 1))


def sequences_are_cut(plan: Plan) -> bool:
    """True where gradients are sums over parts of sequences that exact numerics finish after every microbatch."""
    return plan.layout.cp > 1 and plan.numerics.mode == "exact"


def returned_rows(plan: Plan, cp: int, cp_rank: int) -> int:
    """Rows of key and value gradients that leave one of the `cp` ranks that exchange keys and values for their owners:
    of every node of its blocks of queries those up to its end."""
    block = plan.leaf_sizes.gradient_token_block
    chunks = [Chunks(plan.batch.sequence, cp, rank) for rank in range(cp)]
    nodes = Chunks(plan.batch.sequence // block, cp, cp_rank).nodes()
    others = (owner for owner in chunks if owner.cp_rank != cp_rank)
    return sum(
        owner.rows_before(start, node[1] * block) for owner in others for start in owner.starts for node in nodes
    )
