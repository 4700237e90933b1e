"""`simulate`: a plan in, the predicted timeline, memory and report out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ..core.action import Kind
from ..core.model import ModelSpec
from ..core.plan import Plan
from ..core.schedule import Schedule
from ..core.schedules import build, lower, schedule_for
from ..core.timeline import MemorySample, Timeline
from .attribution import attribute, busy_s, critical_pp_rank
from .engine import Run, execute
from .flops import step_flops
from .graph import Graph, Sends, build_graph
from .memory import RankMemory, memory_samples, rank_memories
from .pricing import Pricing
from .provenance import report_provenance


@dataclass(frozen=True)
class Profile:
    """How a runtime communicates: what ends a send, and how many receives it posts ahead."""

    sends: Sends
    recv_buffers: int


PROFILES: Mapping[str, Profile] = {"shardproof": Profile(sends="rendezvous", recv_buffers=2)}
"""`runtime.profile` -> behaviour. `shardproof` is our own backend (`backend.pipeline.messages`)."""


@dataclass(frozen=True, eq=False)
class Simulation:
    """One predicted step. `memory` holds the peak of every pipeline rank; `report` has the JSON keys of the interface."""

    plan: Plan
    run: Run
    memory: tuple[RankMemory, ...]
    report: dict[str, Any]

    @cached_property
    def global_ranks(self) -> tuple[int, ...]:
        """The rank that stands for each pipeline rank: tensor- and data-parallel rank 0."""
        return representatives(self.plan)

    @cached_property
    def timeline(self) -> Timeline:
        """The spans of one representative rank per pipeline rank, with memory over time."""
        spans = self.run.timeline(global_ranks=self.global_ranks).spans
        plan, schedule = self.plan, self.plan.schedule
        devices = f"{plan.layout.world_size} devices of {plan.cluster.name}"
        title = f"{plan.model.name} on {devices}: {plan.layout.degrees}, {schedule.file or schedule.name}"
        return Timeline(spans, "predicted", self.memory_samples, title)

    @cached_property
    def memory_samples(self) -> tuple[MemorySample, ...]:
        """Bytes held over time by the same ranks."""
        return memory_samples(self.run, self.memory, self.plan, self.global_ranks)


def simulate(plan: Plan) -> Simulation:
    """The predicted step of a plan. Raises `ScheduleError` when its schedule does not fit or cannot run.

    One rank per pipeline rank is simulated: tensor- and data-parallel rank 0. Its peers run the same actions at the same time.
    """
    graph = plan_graph(plan)
    pricing = Pricing(plan, gathers_scheduled=bool((graph.schedule.actions.kind == Kind.UNSHARD).any()))
    run = run_plan(graph, pricing)
    memory = rank_memories(plan, graph.schedule, PROFILES[plan.runtime.profile].recv_buffers)
    return Simulation(plan, run, memory, _report(plan, run, pricing, memory))


def plan_graph(plan: Plan) -> Graph:
    """The lowered schedule of a plan with its waits; named schedules are built once per shape and kept."""
    profile = PROFILES[plan.runtime.profile]
    if plan.schedule.file is None:
        layout = plan.layout
        return _named_graph(plan.schedule.name, layout.pp, layout.vpp, plan.num_microbatches, plan.schedule.max_active_stages, profile)
    schedule = lower(schedule_for(plan))
    return build_graph(schedule, sends=profile.sends, recv_buffers=profile.recv_buffers)


@lru_cache(maxsize=64)
def _named_graph(name: str, pp: int, vpp: int, num_microbatches: int, max_active_stages: int | None, profile: Profile) -> Graph:
    schedule = named_schedule(name, pp, vpp, num_microbatches, max_active_stages)
    return build_graph(schedule, sends=profile.sends, recv_buffers=profile.recv_buffers)


@lru_cache(maxsize=64)
def named_schedule(name: str, pp: int, vpp: int, num_microbatches: int, max_active_stages: int | None) -> Schedule:
    """The lowered schedule of a catalog name."""
    return lower(build(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches), max_active_stages=max_active_stages)


def run_plan(graph: Graph, pricing: Pricing) -> Run:
    """The run of a plan's schedule with a plan's prices."""
    actions, owners = graph.schedule.actions, graph.schedule.placement.ranks
    second = np.array([ranks[-1] if len(ranks) > 1 else -1 for ranks in owners])
    tables = np.stack([pricing.table(replica) for replica in range(max(map(len, owners)))])

    def price(kind: np.ndarray | Kind, stage: np.ndarray, rank: np.ndarray) -> np.ndarray:
        return tables[(rank == second[stage]).astype(int), kind, stage]

    duration = price(actions.kind, actions.stage, graph.rank)
    pair = np.flatnonzero(actions.kind == Kind.OVERLAP_F_B)
    forward, backward = actions.stage[pair], actions.pair_stage[pair]
    duration[pair] = price(Kind.F, forward, graph.rank[pair]) + price(Kind.B, backward, graph.rank[pair])
    run = execute(graph, duration)
    return _steps_together(run, duration) if pricing.plan.optimizer.clip_grad_norm else run


def _steps_together(run: Run, duration: np.ndarray) -> Run:
    """With clipping no rank may step before the global norm is known, hence before the last rank's gradients are reduced."""
    steps = np.flatnonzero(run.graph.schedule.actions.kind == Kind.STEP)
    start_s, end_s = run.start_s.copy(), run.end_s.copy()
    start_s[steps] = start_s[steps].max(initial=0.0)
    end_s[steps] = start_s[steps] + duration[steps]
    return Run(run.graph, start_s, end_s)


def representatives(plan: Plan) -> tuple[int, ...]:
    """The global rank at tensor- and data-parallel rank 0 of every pipeline rank."""
    return tuple(plan.layout.global_rank(pp=pp_rank) for pp_rank in range(plan.layout.pp))


def worst(memory: tuple[RankMemory, ...]) -> RankMemory:
    """The rank with the highest peak; of several the lowest."""
    return max(memory, key=lambda rank: (rank.peak_bytes, -rank.pp_rank))


@lru_cache(maxsize=16)
def _num_parameters(model: ModelSpec) -> int:
    return model.num_parameters


def _report(plan: Plan, run: Run, pricing: Pricing, memory: tuple[RankMemory, ...]) -> dict[str, Any]:
    ranks = representatives(plan)
    step_s = float(run.end_s.max())
    busy = busy_s(run)
    bubble_pp = int(busy.argmin())
    critical_pp = critical_pp_rank(run)
    flops = step_flops(plan)
    num_devices = plan.layout.world_size
    peak_flops = step_s * num_devices * plan.cluster.peak_flops_per_s[plan.precision.dtype]
    heaviest = worst(memory)
    return {
        "step_time_s": step_s,
        "tokens_per_s": plan.batch.global_size * plan.batch.sequence / step_s,
        "model_flops_per_s_per_device": flops.model / step_s / num_devices,
        "mfu": flops.model / peak_flops,
        "mfu_causal": flops.model_causal / peak_flops,
        "hfu": flops.hardware / peak_flops,
        "bubble_fraction": (step_s - float(busy[bubble_pp])) / step_s,
        "bubble_rank": ranks[bubble_pp],
        "critical_rank": ranks[critical_pp],
        "time_s": attribute(run, critical_pp, pricing.seconds),
        "peak_memory_bytes": heaviest.peak_bytes,
        "peak_memory_rank": ranks[heaviest.pp_rank],
        "memory_bytes": heaviest.components(),
        "num_parameters": _num_parameters(plan.model),
        "num_devices": num_devices,
        "provenance": report_provenance(plan.cluster),
    }
