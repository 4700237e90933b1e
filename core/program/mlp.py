"""The MLP of a layer: dense, or a router with experts and shared experts."""

from __future__ import annotations

from typing import Literal

from .linear import column, row
from .tensors import Tensors
from .work import Collective, LayerWork, Operations, Product, scattered_bytes


def mlp_work(tensors: Tensors, prefix: str, *, moe: bool) -> tuple[LayerWork, ...]:
    """The MLP of one layer, from the normed hidden state to the sum over its parts."""
    if not moe:
        return _dense(tensors, f"{prefix}.mlp", "ffn")
    works = (_router(tensors, f"{prefix}.mlp.router"), *_experts(tensors, f"{prefix}.mlp"))
    return (*works, *_dense(tensors, f"{prefix}.mlp.shared", "shared_ffn")) if tensors.plan.model.num_shared_experts else works


def _dense(tensors: Tensors, prefix: str, feature: Literal["ffn", "shared_ffn"]) -> tuple[LayerWork, ...]:
    leaves = tensors.plan.leaf_sizes.feature(feature)
    return (
        column(tensors, f"{prefix}.up", leaves, 2 if tensors.plan.model.gated else 1),
        row(tensors, f"{prefix}.down", leaves, 1),
    )


def _router(tensors: Tensors, layer: str) -> LayerWork:
    """Scores of every expert for a rank's own tokens, in fp32 (Fedus et al. 2022, Switch Transformers, section 2.4)."""
    m, n, k = tensors.own_tokens, tensors.plan.model.num_experts, tensors.plan.model.hidden_size
    return LayerWork(
        layer,
        forward=(Product(layer, m, n, k, dtype="fp32"),),
        input_gradient=(Product(layer, m, k, n, dtype="fp32"),),
        weight_gradient=(Product(layer, n, k, m, dtype="fp32"),),
    )


def _experts(tensors: Tensors, prefix: str) -> tuple[LayerWork, ...]:
    """Dispatch, the two products of the local experts, and combine, with every expert taking an equal share of the tokens.

    A rank sends a copy of each of its tokens to each of the token's experts; with expert tensor parallelism the members of `etp`
    bring what they were sent together, and each computes with its part of the experts' width (Megatron-Core's all-to-all dispatcher;
    Liu et al. 2025, MoE Parallel Folding, arXiv 2504.14960, section 3.2). The backward goes the same way back.
    """
    plan, model, layout = tensors.plan, tensors.plan.model, tensors.plan.layout
    up, down = f"{prefix}.experts.up", f"{prefix}.experts.down"
    copies = tensors.own_tokens * model.experts_per_token * (1 if _same_tokens(tensors) else layout.expert_tp)
    count = model.num_experts // layout.ep
    m, h = -(-copies // count), model.hidden_size
    lo, hi = plan.leaf_sizes.feature("expert_ffn").owned_items(layout.expert_tp, tensors.tp_rank % layout.expert_tp)
    f = hi - lo
    g = f * (2 if model.gated else 1)

    def product(layer: str, m: int, n: int, k: int) -> Operations:
        return (Product(layer, m, n, k, count, grouped=True),)

    return (
        LayerWork(f"{prefix}.dispatch", _to_experts(tensors, f"{prefix}.dispatch"), _from_experts(tensors, f"{prefix}.dispatch"), ()),
        LayerWork(up, product(up, m, g, h), product(up, m, h, g), product(up, g, h, m)),
        LayerWork(down, product(down, m, h, f), product(down, m, f, h), product(down, h, f, m)),
        LayerWork(f"{prefix}.combine", _from_experts(tensors, f"{prefix}.combine"), _to_experts(tensors, f"{prefix}.combine"), ()),
    )


def _same_tokens(tensors: Tensors) -> bool:
    """True when the members of `etp` are tensor-parallel ranks that all hold the same tokens, so they need not bring theirs together."""
    return tensors.tp > 1 and not tensors.plan.layout.sequence_parallel


def _to_experts(tensors: Tensors, layer: str) -> Operations:
    """Copies of tokens, or gradients of their results, on the way to experts: an all-to-all, then a gather over `etp`."""
    layout, payload = tensors.plan.layout, _copies_bytes(tensors)
    if layout.expert_tp == 1 or _same_tokens(tensors):
        return _exchanged(tensors, layer)
    return (*_exchanged(tensors, layer), Collective(layer, "all_gather", "etp", layout.expert_tp, payload * (layout.expert_tp - 1)))


def _from_experts(tensors: Tensors, layer: str) -> Operations:
    """The way back: partial sums are added over `etp`, before the all-to-all where its members hold different tokens."""
    etp = tensors.plan.layout.expert_tp
    if etp == 1:
        return _exchanged(tensors, layer)
    if not _same_tokens(tensors):
        return (Collective(layer, "reduce_scatter", "etp", etp, _copies_bytes(tensors) * (etp - 1)), *_exchanged(tensors, layer))
    hidden_bytes = tensors.tokens * tensors.plan.model.hidden_size * tensors.element_bytes
    return (*_exchanged(tensors, layer), Collective(layer, "all_reduce", "etp", etp, -(-2 * (etp - 1) * hidden_bytes // etp)))


def _exchanged(tensors: Tensors, layer: str) -> Operations:
    ep = tensors.plan.layout.ep
    return () if ep == 1 else (Collective(layer, "all_to_all", "ep", ep, scattered_bytes(_copies_bytes(tensors), ep)),)


def _copies_bytes(tensors: Tensors) -> int:
    """Bytes of a copy of each of a rank's tokens for each of its experts."""
    model = tensors.plan.model
    return tensors.own_tokens * model.experts_per_token * model.hidden_size * tensors.element_bytes
