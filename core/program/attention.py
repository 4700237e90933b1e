"""The core of attention on one rank, and its exchange of keys and values under context parallelism."""

from __future__ import annotations

from ..model.operators import Operator, Width
from .tensors import Tensors, returned_rows, sequences_are_cut
from .work import PARTIAL_BYTES, Collective, CollectiveOp, Op, Operations, Product


def attention_core(tensors: Tensors, operator: Operator, layer: str) -> Op:
    """Scores and their product with the values, per query head, over the full square (a causal
    kernel may skip half of it).

    Backward: the gradient of the scores, then those of values, queries and keys. The second computation of the scores
    inside a flash kernel is not counted.

    With context parallelism a rank's queries meet the keys and values of the whole sequence, which are gathered for the
    forward and again for the backward, whose gradients of keys and values are summed back to their owners. Passing them
    around a ring instead (Liu et al. 2023, Ring Attention) sends the same bytes in cp - 1 steps. Exact numerics send
    gradients back as the nodes of a tree over blocks of queries, of each the rows that have a value.
    """
    plan, model = tensors.plan, tensors.plan.model
    q, s, d, v = tensors.sequence, plan.batch.sequence, model.head_dim, model.value_head_dim
    count = plan.batch.micro_size * tensors.held(Width(model.query_heads_per_group, "heads"))
    if d == v:
        gradients: Operations = (Product(layer, q, s, d, count), Product(layer, q, d, s, 3 * count))
    else:  # of the scores, of the values, of queries and keys
        gradients = (Product(layer, q, s, v, count), Product(layer, q, v, s, count), Product(layer, q, d, s, 2 * count))
    gather = _keys_and_values(tensors, layer, "all_gather")
    return Op(
        layer,
        operator.role,
        forward=(*gather, Product(layer, q, s, d, count), Product(layer, q, v, s, count)),
        input_gradient=(*gather, *gradients, *_keys_and_values(tensors, layer, "reduce_scatter")),
        weight_gradient=(),
    )


def _keys_and_values(tensors: Tensors, layer: str, op: CollectiveOp) -> Operations:
    """Brings keys and values of all tokens of the sequence to every context-parallel rank, or their gradients back."""
    plan, model, cp = tensors.plan, tensors.plan.model, tensors.plan.layout.cp
    if cp == 1:
        return ()
    own = tensors.tokens * tensors.held(Width(model.head_dim + model.value_head_dim, "heads"))
    if op == "all_gather" and plan.runtime.context_parallel == "ring":
        return (Collective(layer, "all_to_all", "cp", cp, own * tensors.element_bytes),) * (cp - 1)
    if op == "reduce_scatter" and sequences_are_cut(plan):
        rows = plan.batch.micro_size * returned_rows(plan, tensors.cp_rank)
        return (Collective(layer, "all_to_all", "cp", cp, rows * own // tensors.tokens * PARTIAL_BYTES),)
    return (Collective(layer, op, "cp", cp, own * tensors.element_bytes * (cp - 1)),)
