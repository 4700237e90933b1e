"""Attention: grouped heads or multi-head latent attention, and its core under context parallelism."""

from __future__ import annotations

from ..model.roles import Role
from .linear import column, row, whole
from .tensors import Tensors, returned_rows, sequences_are_cut
from .work import PARTIAL_BYTES, Collective, CollectiveOp, LayerWork, Operations, Product


def attention_work(tensors: Tensors, prefix: str) -> tuple[LayerWork, ...]:
    """The attention of one layer, from the normed hidden state to the output product."""
    return _latent(tensors, prefix) if tensors.plan.model.is_mla else _grouped(tensors, prefix)


def _grouped(tensors: Tensors, prefix: str) -> tuple[LayerWork, ...]:
    model, heads = tensors.plan.model, tensors.plan.leaf_sizes.heads
    group = model.query_heads_per_group * model.head_dim
    return (
        column(tensors, prefix, Role.QKV, heads, group + 2 * model.head_dim),
        _core(tensors, prefix),
        row(tensors, prefix, Role.ATTENTION_OUTPUT, heads, group),
    )


def _latent(tensors: Tensors, prefix: str) -> tuple[LayerWork, ...]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1 and equations 37-47).

    The down-projections are small and held whole, each rank multiplying its own tokens; what is gathered
    for the up-projections are the low-rank vectors and the rotary key, which all heads share (as in
    Megatron-Core's `MLASelfAttention`).
    """
    model, heads = tensors.plan.model, tensors.plan.leaf_sizes.heads
    hidden, rank, rotary = model.hidden_size, model.kv_lora_rank, model.qk_rope_head_dim
    if model.q_lora_rank:
        queries: tuple[LayerWork, ...] = (
            whole(tensors, prefix, Role.QUERIES_DOWN, model.q_lora_rank, hidden),
            column(tensors, prefix, Role.QUERIES_UP, heads, model.head_dim, in_features=model.q_lora_rank),
        )
    else:
        queries = (column(tensors, prefix, Role.QUERIES, heads, model.head_dim),)
    unit = model.qk_nope_head_dim + model.v_head_dim
    return (
        *queries,
        whole(tensors, prefix, Role.KEYS_DOWN, rank + rotary, hidden),
        column(tensors, prefix, Role.KEYS_UP, heads, unit, in_features=rank, num_shared=rotary),
        _core(tensors, prefix),
        row(tensors, prefix, Role.ATTENTION_OUTPUT, heads, model.v_head_dim),
    )


def _core(tensors: Tensors, prefix: str) -> LayerWork:
    """Scores and their product with the values, per query head, over the full square (a causal
    kernel may skip half of it).

    Backward: the gradient of the scores, then those of values, queries and keys. The second computation of the scores
    inside a flash kernel is not counted.

    With context parallelism a rank's queries meet the keys and values of the whole sequence, which are gathered for the
    forward and again for the backward, whose gradients of keys and values are summed back to their owners. Passing them
    around a ring instead (Liu et al. 2023, Ring Attention) sends the same bytes in cp - 1 steps. Exact numerics send
    gradients back as the nodes of a tree over blocks of queries, of each the rows that have a value.
    """
    plan, model, layer = tensors.plan, tensors.plan.model, Role.CORE.named(prefix)
    q, s, d, v = tensors.sequence, plan.batch.sequence, model.head_dim, model.value_head_dim
    count = plan.batch.micro_size * tensors.owned(plan.leaf_sizes.heads, model.query_heads_per_group)
    if d == v:
        gradients: Operations = (Product(layer, q, s, d, count), Product(layer, q, d, s, 3 * count))
    else:  # of the scores, of the values, of queries and keys
        gradients = (Product(layer, q, s, v, count), Product(layer, q, v, s, count), Product(layer, q, d, s, 2 * count))
    gather = _keys_and_values(tensors, layer, "all_gather")
    return LayerWork(
        layer,
        Role.CORE,
        forward=(*gather, Product(layer, q, s, d, count), Product(layer, q, v, s, count)),
        input_gradient=(*gather, *gradients, *_keys_and_values(tensors, layer, "reduce_scatter")),
        weight_gradient=(),
    )


def _keys_and_values(tensors: Tensors, layer: str, op: CollectiveOp) -> Operations:
    """Brings keys and values of all tokens of the sequence to every context-parallel rank, or their gradients back."""
    plan, model, cp = tensors.plan, tensors.plan.model, tensors.plan.layout.cp
    if cp == 1:
        return ()
    own = tensors.tokens * tensors.owned(plan.leaf_sizes.heads, model.head_dim + model.value_head_dim)
    if op == "all_gather" and plan.runtime.context_parallel == "ring":
        return (Collective(layer, "all_to_all", "cp", cp, own * tensors.element_bytes),) * (cp - 1)
    if op == "reduce_scatter" and sequences_are_cut(plan):
        rows = plan.batch.micro_size * returned_rows(plan, tensors.cp_rank)
        return (Collective(layer, "all_to_all", "cp", cp, rows * own // tensors.tokens * PARTIAL_BYTES),)
    return (Collective(layer, op, "cp", cp, own * tensors.element_bytes * (cp - 1)),)
