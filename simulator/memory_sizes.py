"""The memory of every stage of a plan, in bytes: what one microbatch keeps and needs, and what is held of the stage throughout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ..core.plan import Plan
from ..core.program import Group, stage_groups
from .memory_layers import embedding_nodes, full_recompute, head_nodes, layer_nodes, mtp_nodes
from .memory_profiles import memory_profile
from .memory_static import gathered_bytes, gradients_bytes, optimizer_bytes, step_bytes, weights_bytes
from .memory_tape import EMPTY, TapeMemory, tape_memory
from .memory_tensors import LayerTensors


@dataclass(frozen=True)
class StageSizes:
    """Bytes of one stage on its ranks: its tape for one microbatch, what is held of it throughout, and what comes and goes."""

    tape: TapeMemory
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    step_bytes: int
    gathered_bytes: int


def stage_activation_bytes(plan: Plan) -> list[int]:
    """Bytes one microbatch keeps on every stage between forward and backward."""
    return [sizes.tape.kept_bytes for sizes in stage_sizes(plan)]


def layer_activation_bytes(plan: Plan, *, moe: bool = False) -> int:
    """Bytes one microbatch keeps of one transformer layer."""
    tensors = LayerTensors(plan, memory_profile(plan))
    return _part_memory(tensors, Group("moe" if moe else "dense", recomputed=plan.recompute.mode == "full")).kept_bytes


@lru_cache(maxsize=64)
def stage_sizes(plan: Plan) -> tuple[StageSizes, ...]:
    """The sizes of every stage; stages of equal content share one object."""
    profile = memory_profile(plan)
    tensors = LayerTensors(plan, profile)
    parts: dict[Group, TapeMemory] = {}
    alike: dict[tuple[object, ...], StageSizes] = {}
    found = []
    for content in plan.stages:
        dense = min(max(plan.model.first_dense_layers - content.first_layer, 0), len(content.layers)) if plan.model.is_moe else 0
        key = (len(content.layers), dense, content.embedding, content.head, len(plan.placement.ranks[content.stage]))
        if key not in alike:
            alike[key] = _sizes_of(plan, tensors, content.stage, parts)
        found.append(alike[key])
    return tuple(found)


def _sizes_of(plan: Plan, tensors: LayerTensors, stage: int, parts: dict[Group, TapeMemory]) -> StageSizes:
    """The sizes of one stage; `parts` collects the tapes of its parts for the stages that follow."""
    tape, profile = EMPTY, tensors.profile
    for group in stage_groups(plan, stage):
        part = Group(group.kind, recomputed=group.recomputed)
        if part not in parts:
            parts[part] = _part_memory(tensors, part)
        tape = tape + parts[part].times(group.count)
    return StageSizes(
        tape=tape if profile.defers_products else replace(tape, deferred_bytes=tape.kept_bytes),
        weights_bytes=weights_bytes(plan, profile, stage),
        gradients_bytes=gradients_bytes(plan, profile, stage),
        optimizer_bytes=optimizer_bytes(plan, profile, stage),
        step_bytes=step_bytes(plan, profile, stage),
        gathered_bytes=gathered_bytes(plan, stage),
    )


def _part_memory(tensors: LayerTensors, group: Group) -> TapeMemory:
    match group.kind:
        case "embedding":
            return tape_memory(tuple(embedding_nodes(tensors)))
        case "head":
            return tape_memory(tuple(head_nodes(tensors)))
        case "mtp":
            layer = Group("moe" if tensors.plan.model.is_moe else "dense", recomputed=group.recomputed)
            return tape_memory(tuple(mtp_nodes(tensors))) + _part_memory(tensors, layer)
        case _:
            nodes = layer_nodes(tensors, moe=group.kind == "moe")
            return tape_memory(full_recompute(nodes, tensors.hidden) if group.recomputed else nodes)
