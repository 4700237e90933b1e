"""The groups over which copies of stages share gradients and weights with ZeRO. See `numerics.copies.Copies`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...core.plan.plan import Plan
from ...core.program import num_shards
from ...core.program.buckets import sums_are_sharded
from ..numerics.copies import Copies
from ..transport.base import Group, Transport
from ..transport.mesh import Mesh


@dataclass(frozen=True)
class StageCopies:
    """Those of a stage's dense parameters, and of its experts, where there are such."""

    dense: Copies
    experts: Copies | None


def open_copies(transport: Transport, plan: Plan, mesh: Mesh) -> Mapping[int, StageCopies]:
    """The groups of all stages of a rank. All ranks of the world call it together."""
    opened: dict[str, Copies] = {}

    def copies(whole: Group, parts: int) -> Copies:
        if whole.name not in opened:
            opened[whole.name] = _open(transport, plan, whole, parts)
        return opened[whole.name]

    found = {}
    for stage in plan.placement.stages_of(mesh.coordinates["pp"]):
        shards = num_shards(plan, stage)
        experts = copies(mesh.expert_copies(stage), shards.expert) if plan.model.is_moe else None
        found[stage] = StageCopies(copies(mesh.copies(stage), shards.dense), experts)
    return found


def _open(transport: Transport, plan: Plan, whole: Group, parts: int) -> Copies:
    index, place = divmod(whole.rank, parts)
    members, axis = whole.ranks[index * parts : (index + 1) * parts], whole.axis
    shard, replicate = whole, None
    if parts < whole.size:
        axis = f"{whole.axis}_shard"
        shard = transport.group(f"{whole.name}-shard{index}", axis, members)
        replicate = transport.group(
            f"{whole.name}-replicate{place}", f"{whole.axis}_replicate", whole.ranks[place::parts]
        )
    gathers = backwards = shard
    if plan.layout.zero == 3 or plan.data_parallel.overlap_param_gather:
        gathers = transport.group(f"{whole.name}-gathers{index}", axis, members)
    if sums_are_sharded(plan):
        backwards = transport.group(f"{whole.name}-backwards{index}", axis, members)
    return Copies(whole, shard, replicate, gathers, backwards)
