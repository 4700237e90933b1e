"""`Simulation`: one predicted step, and how the step of equal replicas is put together: graph, prices, run, memory,
report. A plan of several modules is the general case: each is priced and weighed by its own plan, and the stages of all
run as one schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ...core.base.errors import PlanError
from ...core.plan.plan import AnyPlan, ModularPlan, Plan
from ...core.plan.schedule_of import modular_schedule, part_schedule, schedule_for
from ...core.schedule import build, lower
from ...core.schedule.action import Action, Kind
from ...core.schedule.schedule import Schedule
from ...core.schedule.timeline import MemorySample, Timeline
from ..cost.flops import step_flops
from ..cost.joined_pricing import JoinedPricing, module_reports
from ..cost.pricing import Pricing
from ..engine.attribution import attribute, busy_s, critical_pp_rank, sorts_of
from ..engine.contention import execute_shared
from ..engine.engine import Run, execute
from ..engine.graph import Graph, Sends, build_graph
from ..engine.joined_graph import MOST_INPUTS, joined_graph
from ..engine.seconds import Seconds
from ..memory.capacity import Capacity, capacities
from ..memory.memory import RankMemory, memory_samples, rank_memories, sample_components
from ..stack.profiles import profile_of
from ..stack.provenance import report_provenance


@dataclass(frozen=True, eq=False)
class Simulation:
    """One predicted step. `memory` holds the peak of every pipeline rank; `report` has the JSON keys of the interface.

    `prices` are those of the sorts of action of the run's graph. `dp_rank` is the data-parallel rank that was
    simulated: 0, or the slowest where replicas differ. `recorded`: its durations are those of recorded steps,
    and `prices` their means.
    """

    plan: AnyPlan
    run: Run
    memory: tuple[RankMemory, ...]
    report: dict[str, Any]
    prices: tuple[Seconds, ...]
    dp_rank: int = 0
    recorded: bool = False

    @cached_property
    def global_ranks(self) -> tuple[int, ...]:
        """The rank that stands for each pipeline rank: tensor-parallel rank 0 of the simulated data-parallel rank."""
        return representatives(self.plan, self.dp_rank)

    @cached_property
    def period_s(self) -> float:
        """Seconds from one step to the next when steps follow each other: the step's, or, where no rank waits for a
        global norm, those from the first to the last action of the rank that is occupied longest (Qi et al. 2024,
        section 4: post-validation)."""
        if self.plan.optimizer.clip_grad_norm:
            return float(self.report["step_time_s"])
        lanes = self.run.graph.schedule.offsets[:-1]
        return float((np.maximum.reduceat(self.run.end_s, lanes) - np.minimum.reduceat(self.run.start_s, lanes)).max())

    @cached_property
    def timeline(self) -> Timeline:
        """The spans of one representative rank per pipeline rank, with memory over time."""
        spans = self.run.timeline(global_ranks=self.global_ranks).spans
        plan, schedule = self.plan, self.plan.schedule
        devices = f"{plan.world_size} devices of {plan.cluster.name}"
        title = f"{plan.title} on {devices}: {plan.degrees}, {schedule.file or schedule.name}"
        return Timeline(spans, "predicted", self.memory_samples, title)

    @cached_property
    def memory_samples(self) -> tuple[MemorySample, ...]:
        """Bytes held over time by the same ranks."""
        parts = _parts(self.plan, self.run, self.memory)
        return tuple(
            sample
            for part, run, held, (first, last) in parts
            for sample in memory_samples(run, held, part, self.global_ranks[first:last])
        )

    @cached_property
    def sample_components(self) -> np.ndarray:
        """`[samples, COMPONENTS]` bytes of `memory_samples` by component."""
        parts = _parts(self.plan, self.run, self.memory)
        return np.concatenate([sample_components(run, held, part) for part, run, held, _ in parts])


def simulate_first(plan: AnyPlan, schedule: Schedule | None = None) -> Simulation:
    """The step of data-parallel rank 0, which stands for all where replicas are equal; what
    `variation` says is not read. `schedule` replaces that of the plan; it has the same placement."""
    graph = plan_graph(plan) if schedule is None else _graph_of(plan, lower(schedule))
    pricing = _pricing_of(plan, graph)
    run = run_plan(graph, pricing)
    memory = peak_memories(plan, graph.schedule)
    prices = pricing.of_graph(sorts_of(graph)).prices
    return Simulation(plan, run, memory, report_of(plan, run, prices, memory), prices)


def check_modules(plan: ModularPlan) -> None:
    """Raises `PlanError` for what no step of joined modules is predicted with: a `variation`, and more than
    `MOST_INPUTS` inputs of a module."""
    if not plan.variation.is_nothing:
        raise PlanError("[variation] is not simulated with [[modules]] yet. Leave it out.")
    for module in plan.modules:
        if len(module.inputs) > MOST_INPUTS:
            raise PlanError(
                f'module "{module.name}" has {len(module.inputs)} inputs, and simulate joins at most {MOST_INPUTS}.'
            )


def plan_graph(plan: AnyPlan) -> Graph:
    """The lowered schedule of a plan with its waits; named schedules are built once per shape and kept."""
    if isinstance(plan, Plan) and plan.schedule.file is None:
        profile, layout = profile_of(plan), plan.layout
        shape = (layout.pp, layout.vpp, plan.num_microbatches, plan.schedule.max_active_stages)
        return _named_graph(plan.schedule.name, shape, profile.send_rule, profile.recv_buffers)
    return _graph_of(plan, lowered_schedule(plan))


def _graph_of(plan: AnyPlan, schedule: Schedule) -> Graph:
    """A lowered schedule with the waits of a plan's stack; where branches join, sends are buffered."""
    profile = profile_of(plan.parts[-1])
    if schedule.placement.sources is not None:
        return joined_graph(schedule)
    return build_graph(schedule, sends=profile.send_rule, recv_buffers=profile.recv_buffers)


def _pricing_of(plan: AnyPlan, graph: Graph) -> Pricing | JoinedPricing:
    if isinstance(plan, ModularPlan):
        return JoinedPricing(plan)
    return Pricing(plan, gathers_scheduled=any(sort.kind is Kind.UNSHARD for sort in sorts_of(graph).sorts))


@lru_cache(maxsize=64)
def _named_graph(name: str, shape: tuple[int, int, int, int | None], sends: Sends, recv_buffers: int) -> Graph:
    return build_graph(named_schedule(name, *shape), sends=sends, recv_buffers=recv_buffers)


def lowered_schedule(plan: AnyPlan) -> Schedule:
    """The schedule of a plan with its communication, reductions and optimizer step. Where modules cut the batch
    differently it has the microbatches of the last."""
    if isinstance(plan, ModularPlan):
        return modular_schedule(plan, plan.parts[-1].num_microbatches)
    if plan.schedule.file is not None:
        return lower(schedule_for(plan))
    return named_schedule(
        plan.schedule.name, plan.layout.pp, plan.layout.vpp, plan.num_microbatches, plan.schedule.max_active_stages
    )


@lru_cache(maxsize=64)
def named_schedule(name: str, pp: int, vpp: int, num_microbatches: int, max_active_stages: int | None) -> Schedule:
    """The lowered schedule of a catalog name."""
    return lower(build(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches), max_active_stages=max_active_stages)


def run_plan(graph: Graph, pricing: Pricing | JoinedPricing) -> Run:
    """The run of a plan's schedule with a plan's prices."""
    _, duration_s, overlap, links = pricing.of_graph(sorts_of(graph))
    run = (
        execute(graph, duration_s, **overlap) if links is None else execute_shared(graph, duration_s, links, **overlap)
    )
    return _steps_at_once(run, duration_s) if pricing.plan.optimizer.clip_grad_norm else run


def _steps_at_once(run: Run, duration: np.ndarray) -> Run:
    """With clipping no rank may step before the global norm is known, hence before the last rank's
    gradients are reduced."""
    steps = np.flatnonzero(run.graph.schedule.actions.kind == Kind.STEP)
    # in place: nobody else has seen this run, and copies are large
    run.start_s[steps] = run.start_s[steps].max(initial=0.0)
    run.end_s[steps] = run.start_s[steps] + duration[steps]
    return run


def representatives(plan: AnyPlan, dp_rank: int = 0) -> tuple[int, ...]:
    """The global rank at tensor-parallel rank 0 of a data-parallel rank on every pipeline rank."""
    ranks: list[int] = []
    for part in plan.parts:
        first, second = (part.layout.global_rank(dp=dp_rank, pp=pp_rank) for pp_rank in (0, 1))
        ranks += (first + pp_rank * (second - first) for pp_rank in range(part.layout.pp))
    return tuple(ranks)


def peak_memories(plan: AnyPlan, schedule: Schedule) -> tuple[RankMemory, ...]:
    """Peak memory of every pipeline rank when it runs its row of the plan's lowered schedule."""
    found: list[RankMemory] = []
    for part in plan.parts:
        own = schedule if part is plan else part_schedule(plan, part, part.num_microbatches)
        found += (_in_run(part, memory) for memory in rank_memories(part, own, profile_of(part).recv_buffers))
    return tuple(found)


def _in_run(part: Plan, memory: RankMemory) -> RankMemory:
    """The memory of a part's pipeline rank by its number, and the action by its stage, in the run."""
    if not part.first_stage:
        return memory
    at_peak = Action.from_str(memory.peak_action) if memory.peak_action else None
    peak_action = "" if at_peak is None else str(replace(at_peak, stage=at_peak.stage + part.first_stage))
    return replace(memory, pp_rank=memory.pp_rank + part.first_stage, peak_action=peak_action)


def _parts(
    plan: AnyPlan, run: Run, memory: Sequence[RankMemory]
) -> Iterator[tuple[Plan, Run, list[RankMemory], tuple[int, int]]]:
    """The models of a plan, each with its own rows of the run, its ranks' memory, and which of all pipeline ranks these
    are."""
    whole = run.graph.schedule
    for part in plan.parts:
        first, last = part.first_stage, part.first_stage + part.layout.pp
        lo, hi = whole.offsets[[first, last]].tolist()
        schedule = whole if part is plan else part_schedule(plan, part, whole.num_microbatches)
        own = Run(replace(run.graph, schedule=schedule), run.start_s[lo:hi], run.end_s[lo:hi])
        held = [replace(each, pp_rank=each.pp_rank - first) for each in memory[first:last]]
        yield part, own, held, (first, last)


def worst(memory: Sequence[RankMemory]) -> RankMemory:
    """The rank with the highest peak; of several the lowest."""
    return max(memory, key=lambda rank: rank.peak_bytes)  # of equal ones max takes the first


def report_of(
    plan: AnyPlan, run: Run, prices: Sequence[Seconds], memory: tuple[RankMemory, ...], dp_rank: int = 0
) -> dict[str, Any]:
    """The JSON keys of a run of one data-parallel rank's pipeline, whose sorts of action have the given prices."""
    ranks = representatives(plan, dp_rank)
    step_s = float(run.end_s.max())
    busy = busy_s(run.graph, prices)
    bubble_pp = int(busy.argmin())
    critical_pp = critical_pp_rank(run)
    flops = step_flops(plan)
    num_devices = plan.world_size
    peak_flops = step_s * num_devices * plan.cluster.peak_flops_per_s[plan.precision.dtype]
    heaviest, peaks = worst(memory), [each.peak_bytes for each in memory]
    return {
        "step_time_s": step_s,
        "tokens_per_s": plan.batch.global_size * plan.batch.sequence / step_s,
        "model_flops_per_s_per_device": flops.model / step_s / num_devices,
        "mfu": flops.model / peak_flops,
        "mfu_causal": flops.model_causal / peak_flops,
        "hfu": flops.hardware / peak_flops,
        "bubble_fraction": max(0.0, step_s - float(busy[bubble_pp])) / step_s,  # sums round
        "bubble_rank": ranks[bubble_pp],
        "critical_rank": ranks[critical_pp],
        "time_s": attribute(run, critical_pp, prices),
        "peak_memory_bytes": heaviest.peak_bytes,
        "peak_memory_rank": ranks[heaviest.pp_rank],
        "peak_memory_action": heaviest.peak_action,
        "capacity_bytes": plan_capacities(plan)[heaviest.pp_rank].usable_bytes,
        "memory_bytes": heaviest.components(),
        "num_parameters": plan.num_parameters,
        "num_devices": num_devices,
        **({"modules": module_reports(plan, peaks)} if isinstance(plan, ModularPlan) else {}),
        "provenance": report_provenance(plan.cluster, profile_of(plan.parts[-1]), exact=plan.numerics.mode == "exact"),
    }


def plan_capacities(plan: AnyPlan) -> list[Capacity]:
    """The capacity of the smallest device of every pipeline rank."""
    return [capacity for part in plan.parts for capacity in capacities(part)]
