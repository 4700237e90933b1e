"""What the backward pass computes again."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

from .work import LayerWork

if TYPE_CHECKING:
    from ..plan import Plan

_PARTS = {
    "core_attn": ("attention.core",),
    "mla_up_proj": ("attention.q_up", "attention.kv_up"),
    "mlp": ("mlp.up", "mlp.down"),
    "moe": ("mlp.router", "mlp.dispatch", "mlp.experts.up", "mlp.experts.down", "mlp.combine", "mlp.shared.up", "mlp.shared.down"),
    "shared_experts": ("mlp.shared.up", "mlp.shared.down"),
}
"""Module of selective recomputation -> the parts of a layer it repeats (Megatron-Core's `--recompute-modules`). `norm` and `moe_act`
repeat elementwise work only, which is not listed among operations."""


def recomputed_modules(plan: Plan) -> frozenset[str]:
    """The modules that selective recomputation repeats; none in the other modes."""
    return frozenset(plan.recompute.modules) if plan.recompute.mode == "selective" else frozenset()


def num_recomputed_layers(plan: Plan, num_layers: int) -> int:
    """How many of a stage's first `num_layers` layers full recomputation repeats whole: all, or `recompute.num_layers` of them
    (Megatron-LM's `--recompute-method block`)."""
    if plan.recompute.mode != "full":
        return 0
    limit = plan.recompute.num_layers
    return num_layers if limit is None else min(limit, num_layers)


def recomputes_whole(plan: Plan, layer: int) -> bool:
    """True when a layer keeps only its input. A limit on the layers of a stage leaves out those of multi-token prediction."""
    if plan.recompute.mode != "full" or plan.recompute.num_layers is None:
        return plan.recompute.mode == "full"
    if layer >= plan.model.num_layers:
        return False
    firsts = [content.first_layer for content in plan.stages]
    return layer - firsts[bisect_right(firsts, layer) - 1] < plan.recompute.num_layers


def with_recomputation(plan: Plan, layer: int, works: tuple[LayerWork, ...]) -> tuple[LayerWork, ...]:
    """The parts of a layer, each with the operations that the plan repeats of it."""
    if recomputes_whole(plan, layer):
        return tuple(replace(work, recomputed=work.forward) for work in works)
    if plan.recompute.mode != "selective":
        return works
    parts = tuple(f".{part}" for module in plan.recompute.modules for part in _PARTS.get(module, ()))
    return tuple(replace(work, recomputed=work.forward) if work.layer.endswith(parts) else work for work in works)
