"""The memory of every stage of a plan, in bytes: what one microbatch keeps and needs, and what is held of
the stage throughout."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

from ...core.model.blocks import Block, layer_blocks
from ...core.plan.plan import Plan
from ...core.program import Group, composition, stage_groups, tied_ends
from ...core.program.offload import staged_bytes
from ...core.program.optimizer_state import moment_numbers
from ..stack.profiles import profile_of
from .layers import embedding_nodes, full_recompute, head_nodes, layer_nodes, mtp_nodes
from .muon import muon_bytes
from .own import own_nodes, own_reduce_bytes, own_step_bytes
from .own_zero import backward_bytes, gathering_bytes
from .static import (
    elements_of,
    gathered_bytes,
    gradients_bytes,
    offloaded_optimizer_bytes,
    optimizer_bytes,
    step_bytes,
    weights_bytes,
)
from .tape import Node, TapeMemory, tape_memory, with_offloaded
from .tensors import LayerTensors


@dataclass(frozen=True)
class StageSizes:
    """Bytes of one stage on its ranks: its tape for one microbatch, what is held of it throughout, what comes and goes,
    and what one microbatch and the optimizer keep in host memory instead."""

    tape: TapeMemory
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    step_bytes: int
    gathered_bytes: int
    reduce_bytes: int = 0
    gathering_bytes: int = 0
    offloaded_bytes: int = 0
    offloaded_optimizer_bytes: int = 0


def group_retained_bytes(plan: Plan, group: Group) -> int:
    """Bytes one microbatch keeps of one part of a group, on the device or in host memory."""
    return _part_memory(LayerTensors(plan, profile_of(plan).memory), group).retained_bytes


def layer_activation_bytes(plan: Plan, layer: int = 0) -> int:
    """Bytes one microbatch keeps of one transformer layer."""
    tensors = LayerTensors(plan, profile_of(plan).memory)
    return _layer_memory(tensors, layer_blocks(plan.model)[layer], plan.recompute.mode == "full").retained_bytes


class Parts(NamedTuple):
    """`Group.part` -> its tape, of parts without experts and of those with experts."""

    dense: dict[int, TapeMemory]
    expert: dict[int, TapeMemory]


class _SamePlan:
    """A plan as a key: equal to those that differ in the order of their schedule only."""

    def __init__(self, plan: Plan):
        others = (getattr(plan, entry.name) for entry in fields(plan) if entry.name != "schedule")
        self.plan, self.key = plan, (*others, plan.schedule.max_active_stages, plan.placement.ranks)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SamePlan) and self.key == other.key


def stage_sizes(plan: Plan) -> tuple[StageSizes, ...]:
    """The sizes of every stage; stages of equal content share one object."""
    if "stage_sizes" not in plan.memo:
        plan.memo["stage_sizes"] = _sizes(_SamePlan(plan))
    found: tuple[StageSizes, ...] = plan.memo["stage_sizes"]
    return found


@lru_cache(maxsize=1024)
def _sizes(keyed_plan: _SamePlan) -> tuple[StageSizes, ...]:
    plan = keyed_plan.plan
    tensors, parts = LayerTensors(plan, profile_of(plan).memory), part_tapes(plan)
    by_composition: dict[tuple[object, ...], StageSizes] = {}
    found = []
    for content in plan.stages:
        key = (
            composition(stage_groups(plan, content.stage)),
            len(plan.placement.ranks[content.stage]),
            moment_numbers(plan, content.stage) if plan.optimizer.groups else None,  # groups go by numbers of layers
        )
        if key not in by_composition:
            by_composition[key] = _sizes_of(plan, tensors, content.stage, parts)
        found.append(by_composition[key])
    return tuple(found)


def part_tapes(plan: Plan) -> Parts:
    """The tapes of parts that are known of plans like this one, for `part_tape` to complete."""
    layout = plan.layout
    dense_cut = (layout.tp, layout.cp, layout.cp_inner, layout.sequence_parallel, max(layout.tp, layout.expert_tp))
    profile = profile_of(plan).memory
    how = (plan.batch, plan.precision, plan.recompute, plan.numerics, plan.runtime, plan.train)
    dense = _tapes_of(profile, plan.model, dense_cut, *how)
    return Parts(dense, _tapes_of(profile, plan.model, (*dense_cut, layout.ep, layout.etp), *how))


@lru_cache(maxsize=512)
def _tapes_of(*_family: object) -> dict[int, TapeMemory]:
    """The tapes of parts that plans share whose layers are cut in the same way, whatever their stages, copies and
    ZeRO; empty at first."""
    return {}


def part_tape(group: Group, tensors: LayerTensors, parts: Parts) -> TapeMemory:
    """The tape of one part of a group, kept in `parts`."""
    known = parts.expert if group.has_experts else parts.dense
    if group.part not in known:
        known[group.part] = _part_memory(tensors, group)
    return known[group.part]


def _sizes_of(plan: Plan, tensors: LayerTensors, stage: int, parts: Parts) -> StageSizes:
    """The sizes of one stage."""
    profile, groups, elements = tensors.profile, stage_groups(plan, stage), elements_of(plan, tensors.profile, stage)
    gradients = gradients_bytes(plan, profile, elements)
    tape = with_offloaded([(part_tape(group, tensors, parts), group.count, group.offloaded) for group in groups])
    offloaded = sum(
        part_tape(group, tensors, parts).retained_bytes * group.count for group in groups if group.offloaded
    )
    if profile.separate_gradients:
        whole, weight = (
            backward_bytes(plan, stage, num_bytes) for num_bytes in (tape.backward_bytes, tape.weight_bytes)
        )
        tape = replace(tape, backward_bytes=whole, weight_bytes=weight)
    return StageSizes(
        tape=tape
        if profile.defers_products
        else replace(tape, deferred_bytes=tape.retained_bytes + offloaded, split_bytes=tape.backward_bytes),
        weights_bytes=weights_bytes(plan, profile, elements),
        gradients_bytes=gradients,
        optimizer_bytes=optimizer_bytes(plan, profile, elements),
        step_bytes=step_bytes(plan, profile, elements),
        gathered_bytes=gathered_bytes(plan, stage),
        gathering_bytes=gathering_bytes(plan, stage) if profile.separate_gradients else 0,
        offloaded_bytes=offloaded,
        offloaded_optimizer_bytes=offloaded_optimizer_bytes(plan, profile, elements),
        reduce_bytes=own_reduce_bytes(plan, stage, gradients) if profile.separate_gradients else 0,
    )


@lru_cache(maxsize=64)
def rank_step_bytes(plan: Plan, owned: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """What the optimizer step of every rank, which holds the stages `owned`, holds besides all else. Matrices are made
    orthogonal before what is updated comes together."""
    orthogonal = (max((muon_bytes(plan, stage) for stage in stages), default=0) for stages in owned)
    return tuple(map(max, _rank_step_bytes(plan, owned), orthogonal))


def _rank_step_bytes(plan: Plan, owned: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    sizes = stage_sizes(plan)
    away = (sum(sizes[stage].offloaded_optimizer_bytes for stage in stages) for stages in owned)
    staged = [staged_bytes(num_bytes, plan.optimizer, masters=plan.offload.masters) for num_bytes in away]
    if not profile_of(plan).memory.separate_gradients:
        return tuple(
            sum(sizes[stage].step_bytes for stage in stages) + own for stages, own in zip(owned, staged, strict=True)
        )
    by_content: dict[tuple[object, ...], int] = {}  # ranks that hold the same cost the same
    found = []
    for pp_rank, stages in enumerate(owned):
        key = (bool(tied_ends(plan, pp_rank)), *(id(sizes[stage]) for stage in stages))
        if key not in by_content:
            by_content[key] = own_step_bytes(
                plan, pp_rank, stages, sum(sizes[stage].gradients_bytes for stage in stages)
            )
        found.append(by_content[key] + staged[pp_rank])
    return tuple(found)


def _part_memory(tensors: LayerTensors, group: Group) -> TapeMemory:
    match group.kind:
        case "embedding":
            return _tape(tensors, tuple(embedding_nodes(tensors)))
        case "head":
            return _tape(tensors, tuple(head_nodes(tensors)))
        case "prediction":
            _, layer, _ = group.blocks
            return _tape(tensors, tuple(mtp_nodes(tensors))) + _layer_memory(tensors, layer, group.recomputed)
        case "layer":
            (layer,) = group.blocks
            return _layer_memory(tensors, layer, group.recomputed)


def _layer_memory(tensors: LayerTensors, layer: Block, recomputed: bool) -> TapeMemory:
    nodes = layer_nodes(tensors, layer.operators)
    return _tape(tensors, full_recompute(nodes, tensors.hidden, tensors.retained_input) if recomputed else nodes)


def _tape(tensors: LayerTensors, nodes: tuple[Node, ...]) -> TapeMemory:
    return tape_memory(own_nodes(nodes, tensors) if tensors.profile.separate_gradients else nodes)
