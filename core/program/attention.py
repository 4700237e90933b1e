"""The core of attention on one rank, and its exchanges under context parallelism: heads for tokens between neighbours,
keys and values between the others."""

from __future__ import annotations

from ..model.attention_kinds import shorter_window
from ..model.operators import Operator, Width
from .tensors import ID_BYTES, Tensors, returned_rows, sequences_are_cut
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

    `layout.cp_inner` neighbours exchange heads for tokens first (Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv
    2309.14509): each gets the tokens of all of them for an even part of the heads, so that keys and values are gathered
    over cp_outer ranks only. An all-to-all brings queries, keys and values there, another the result back.
    """
    plan, model, layout = tensors.plan, tensors.plan.model, tensors.plan.layout
    q, s, d, v = tensors.sequence * layout.cp_inner, plan.batch.sequence, model.head_dim, model.value_head_dim
    queries, per_group = tensors.held(Width(model.query_heads_per_group, "heads")), model.query_heads_per_group
    count = plan.batch.micro_size * queries // layout.cp_inner
    if d == v:
        gradients: Operations = (Product(layer, q, s, d, count), Product(layer, q, d, s, 3 * count))
    else:  # of the scores, of the values, of queries and keys
        gradients = (Product(layer, q, s, v, count), Product(layer, q, v, s, count), Product(layer, q, d, s, 2 * count))
    gather = _keys_and_values(tensors, layer, "all_gather")
    asked = per_group * (d + operator.sinks)  # queries, and with each the score of its head's sink
    operands, result = _heads(tensors, layer, asked + d + v), _heads(tensors, layer, per_group * v)
    scores = Product(layer, q, s, d, count), Product(layer, q, v, s, count)
    return Op(
        layer,
        operator.role,
        forward=(*_documents(tensors, layer), *operands, *gather, *scores, *result),
        input_gradient=(*result, *gather, *gradients, *_keys_and_values(tensors, layer, "reduce_scatter"), *operands),
        weight_gradient=(),
        window=shorter_window(operator.window, s),
    )


def _heads(tensors: Tensors, layer: str, width: int) -> Operations:
    """Exchanges heads for tokens or back, `width` numbers of a token and a group of heads."""
    inner = tensors.plan.layout.cp_inner
    if inner == 1:
        return ()
    elements = tensors.tokens * tensors.held(Width(width, "heads")) // inner
    return (Collective(layer, "all_to_all", "cp_inner", inner, elements * tensors.element_bytes * (inner - 1)),)


def _documents(tensors: Tensors, layer: str) -> Operations:
    """Where the documents of the neighbours' tokens begin, where documents are packed."""
    plan, inner = tensors.plan, tensors.plan.layout.cp_inner
    if inner == 1 or not plan.train.packed:
        return ()
    return (Collective(layer, "all_gather", "cp_inner", inner, tensors.tokens * ID_BYTES * (inner - 1)),)


def _keys_and_values(tensors: Tensors, layer: str, op: CollectiveOp) -> Operations:
    """Brings keys and values of all tokens of the sequence to every context-parallel rank, or their gradients back."""
    plan, model, layout = tensors.plan, tensors.plan.model, tensors.plan.layout
    outer, axis = layout.cp_outer, "cp" if layout.cp_inner == 1 else "cp_outer"
    if outer == 1:
        return ()
    # of cp_inner times the tokens, and a part of the heads
    own = tensors.tokens * tensors.held(Width(model.head_dim + model.value_head_dim, "heads"))
    if op == "all_gather" and plan.runtime.context_parallel == "ring":
        return (Collective(layer, "all_to_all", axis, outer, own * tensors.element_bytes),) * (outer - 1)
    if op == "reduce_scatter" and sequences_are_cut(plan):
        rows = plan.batch.micro_size * returned_rows(plan, outer, tensors.cp_rank // layout.cp_inner)
        sent = rows * (own // tensors.tokens) // layout.cp_inner * PARTIAL_BYTES
        return (Collective(layer, "all_to_all", axis, outer, sent),)
    return (Collective(layer, op, axis, outer, own * tensors.element_bytes * (outer - 1)),)
