"""What the backward pass computes again."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

from ..base.reduction import cut
from ..model.blocks import layer_prefix
from ..model.roles import Role
from .tensors import Tensors
from .work import Op

if TYPE_CHECKING:
    from ..plan.plan import Plan

_SHARED = (Role.SHARED_UP, Role.SHARED_DOWN)

_REPEATED = {
    "core_attn": (Role.CORE,),
    "mla_up_proj": (Role.QUERIES, Role.QUERIES_UP, Role.KEYS_UP),
    "mlp": (Role.UP, Role.DOWN),
    "moe": (
        *(Role.ROUTER, Role.DISPATCH, Role.EXPERTS_UP, Role.EXPERTS_DOWN, Role.COMBINE),
        *(*_SHARED, Role.SHARED_GATE),
    ),
    "shared_experts": _SHARED,
}
"""Module of selective recomputation -> the roles that it repeats (Megatron-Core's `--recompute-modules`). `norm`,
`mlp_act` and `moe_act` repeat elementwise work only, which is not listed among operations."""


def recomputed_modules(plan: Plan) -> frozenset[str]:
    """The modules that selective recomputation repeats; none in the other modes."""
    return frozenset(plan.recompute.modules) if plan.recompute.mode == "selective" else frozenset()


def repeated_roles(plan: Plan) -> frozenset[Role]:
    """The operators that multiply or send which selective recomputation repeats."""
    return frozenset(role for module in recomputed_modules(plan) for role in _REPEATED.get(module, ()))


def recomputed_runs(plan: Plan, first: int, last: int) -> tuple[tuple[int, int], ...]:
    """The layers `[lo, hi)` that full recomputation repeats whole of a stage with the layers `[first,
    last)`: all, the first `recompute.num_layers` of them (Megatron-LM's `--recompute-method block`), or
    those among `recompute.layers`."""
    if plan.recompute.mode != "full":
        return ()
    chosen, limit = plan.recompute.layers, plan.recompute.num_layers
    if chosen is None:
        end = last if limit is None else min(last, first + limit)
        return ((first, end),) if end > first else ()
    own = [layer for layer in chosen if first <= layer < last]
    starts = [layer for layer in own if layer - 1 not in own]
    return tuple(zip(starts, (layer + 1 for layer in own if layer + 1 not in own), strict=True))


def recomputes_all(plan: Plan) -> bool:
    """True when full recomputation repeats every layer, those of multi-token prediction too,
    which a limit leaves out."""
    return plan.recompute.mode == "full" and plan.recompute.num_layers is None and plan.recompute.layers is None


def recomputes_whole(plan: Plan, layer: int) -> bool:
    """True when a layer keeps only its input."""
    if plan.recompute.mode != "full" or recomputes_all(plan):
        return plan.recompute.mode == "full"
    if layer >= plan.model.num_layers:
        return False
    stage = plan.stages[bisect_right([content.first_layer for content in plan.stages], layer) - 1]
    return any(lo <= layer < hi for lo, hi in recomputed_runs(plan, stage.first_layer, stage.last_layer))


def with_recomputation(tensors: Tensors, layer: int, ops: tuple[Op, ...]) -> tuple[Op, ...]:
    """The parts of a layer, each with the operations that the plan repeats of it."""
    plan = tensors.plan
    if recomputes_whole(plan, layer):
        repeated = tuple(replace(op, recomputed=op.forward) for op in ops)
        return (*_input_again(tensors, layer_prefix(layer)), *repeated) if plan.recompute.distribute else repeated
    if plan.recompute.mode != "selective":
        return ops
    roles = repeated_roles(plan)
    return tuple(replace(op, recomputed=op.forward) if op.role in roles else op for op in ops)


def _input_again(tensors: Tensors, layer: str) -> tuple[Op, ...]:
    """A layer's input from the even parts of it that tensor-parallel ranks keep."""
    if tensors.tp == 1:
        return ()
    lo, hi = cut(tensors.own_tokens * tensors.plan.model.hidden_size, tensors.tp, tensors.tp_rank)
    gather = tensors.tp_collective(layer, "all_gather", (hi - lo) * tensors.element_bytes * (tensors.tp - 1))
    return (Op(layer, Role.INPUT, (), (), (), recomputed=(gather,)),)
