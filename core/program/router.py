"""The router of a layer with experts: the product that scores them, and what ranks send each other
about the tokens' choices."""

from __future__ import annotations

from dataclasses import replace

from ..model.operators import Operator
from .linear import linear
from .tensors import Tensors
from .work import Collective, Op, Operations

INTEGER_BYTES = 4
"""An expert, a place in the sequence, or a sequence's count of tokens."""


def router(tensors: Tensors, operator: Operator, layer: str) -> Op:
    """Scores of every expert for a rank's own tokens, in fp32 (Fedus et al. 2022, Switch Transformers, section 2.4).

    The auxiliary loss counts the choices of whole sequences, and a capacity compares them: where sequences are cut,
    ranks exchange counts, or every token's experts with their weights and its place.
    """
    plan, model = tensors.plan, tensors.plan.model
    op = linear(tensors, operator, layer, input_dtype="fp32" if plan.train.router_jitter else None)
    exchanged: Operations = ()
    if plan.train.router_aux_loss:
        counts = plan.batch.micro_size * model.num_experts * INTEGER_BYTES
        exchanged += _over_sequence(tensors, layer, counts, counts)
    if model.expert_capacity_factor is not None:
        numbers = (2 * model.experts_per_token + 1) * INTEGER_BYTES
        exchanged += _over_sequence(tensors, layer, tensors.own_tokens * numbers, tensors.tokens * numbers)
    return replace(op, forward=(*op.forward, *exchanged))


def _over_sequence(tensors: Tensors, layer: str, own_bytes: int, part_bytes: int) -> Operations:
    """What a tensor-parallel rank, and then a context-parallel rank, sends the others that hold tokens
    of the same sequences."""
    layout = tensors.plan.layout
    over_tp = (tensors.tp_collective(layer, "all_gather", own_bytes * (layout.tp - 1)),)
    over_cp = (Collective(layer, "all_gather", "cp", layout.cp, part_bytes * (layout.cp - 1)),)
    return (*(over_tp if layout.sequence_parallel and layout.tp > 1 else ()), *(over_cp if layout.cp > 1 else ()))
