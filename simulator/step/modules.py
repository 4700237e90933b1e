"""`simulate` of a plan of several modules: every module is priced by its own plan, and all run as one schedule.

Modelled assumptions besides those of `pricing`: a module's groups lie over nodes as if its first rank began one; a
message over a bridge takes as long as that rank of either side needs which has most to send or receive, one part after
the other; sends are buffered where modules join; where modules cut the batch differently, the microbatches of each are
as many, and so much larger, as those of the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...core.base.errors import PlanError
from ...core.plan.plan import ModularPlan, ModulePlan
from ...core.plan.schedule_of import modular_schedule, part_schedule
from ...core.program.bridge import bridge_messages, stage_grid
from ...core.program.work import activation_bytes
from ...core.schedule.action import COMPUTE, RECEIVES, SENDS, Action, Kind
from ...core.schedule.schedule import Schedule
from ...core.schedule.timeline import MemorySample, Timeline
from ..cost.flops import step_flops
from ..cost.pricing import Pricing
from ..engine.attribution import Sort, attribute, busy_s, critical_pp_rank, sorts_of
from ..engine.engine import Run, execute
from ..engine.graph import NUM_WAITS, Graph, build_graph
from ..engine.seconds import Seconds, on_grid
from ..memory.capacity import capacity_of
from ..memory.memory import RankMemory, memory_samples, rank_memories
from ..network.network import message_s
from ..stack.profiles import profile_of
from ..stack.provenance import report_provenance

MOST_INPUTS = NUM_WAITS - 1
"""Modules whose hidden states may join before an action of the engine."""


@dataclass(frozen=True, eq=False)
class ModularSimulation:
    """One predicted step of a plan of modules: what `simulate.Simulation` has, over the pipeline
    ranks of all modules."""

    plan: ModularPlan
    run: Run
    memory: tuple[RankMemory, ...]
    report: dict[str, Any]
    prices: tuple[Seconds, ...]
    recorded: bool = False

    @cached_property
    def global_ranks(self) -> tuple[int, ...]:
        """The rank that stands for each pipeline rank: the first of its tensor- and data-parallel ranks."""
        return _representatives(self.plan)

    @cached_property
    def timeline(self) -> Timeline:
        """The spans of one representative rank per pipeline rank, with memory over time."""
        plan = self.plan
        title = (
            f"{plan.title} on {plan.world_size} devices of {plan.cluster.name}: {plan.degrees}, {plan.schedule.name}"
        )
        return Timeline(
            self.run.timeline(global_ranks=self.global_ranks).spans, "predicted", self.memory_samples, title
        )

    @cached_property
    def memory_samples(self) -> tuple[MemorySample, ...]:
        """Bytes held over time by the same ranks."""
        return tuple(_samples(self.plan, self.run, self.memory, self.global_ranks))


def simulate_modules(plan: ModularPlan) -> ModularSimulation:
    """The predicted step of a plan of modules. Raises `PlanError` for more than `MOST_INPUTS` inputs of a module,
    and for a `variation`."""
    if not plan.variation.is_nothing:
        raise PlanError("[variation] is not simulated with [[modules]] yet. Leave it out.")
    for module in plan.modules:
        if len(module.inputs) > MOST_INPUTS:
            raise PlanError(
                f'module "{module.name}" has {len(module.inputs)} inputs, and simulate joins at most {MOST_INPUTS}.'
            )
    graph = _graph(plan)
    sorts, pricings = sorts_of(graph), tuple(Pricing(part) for part in plan.parts)
    prices, overlaps = zip(*(_priced(plan, pricings, sort) for sort in sorts.sorts), strict=True)
    duration_s = np.array([price.total_s for price in prices])[sorts.of_action]
    lead_s, tail_s = np.array(overlaps).T[:, sorts.of_action]
    run = execute(graph, duration_s, lead_s=lead_s, tail_s=tail_s)
    if plan.optimizer.clip_grad_norm:  # no rank steps before the norm over all modules is known
        steps = np.flatnonzero(graph.schedule.actions.kind == Kind.STEP)
        run.start_s[steps] = run.start_s[steps].max(initial=0.0)
        run.end_s[steps] = run.start_s[steps] + duration_s[steps]
    memory = tuple(_memories(plan))
    return ModularSimulation(plan, run, memory, _report(plan, run, prices, memory), prices)


def bridge_bytes(
    plan: ModularPlan, source: ModulePlan, target: ModulePlan, *, backward: bool
) -> dict[tuple[int, int], int]:
    """`(from rank, to rank)` -> bytes of a whole step that pass between two modules: hidden
    states, or their gradients."""
    grids = [
        stage_grid(part, samples=[(part.samples_of(dp),) for dp in range(part.layout.dp)], pp_rank=pp_rank)
        for part, pp_rank in ((source, source.layout.pp - 1), (target, 0))
    ]
    giving, taking = reversed(grids) if backward else grids
    width = activation_bytes(plan.precision.dtype)
    found: dict[tuple[int, int], int] = {}
    for bridged in bridge_messages(giving, taking, plan.batch.micro_size):
        ends = bridged.message.source, bridged.message.destination
        found[ends] = found.get(ends, 0) + width * bridged.message.num_items
    return found


def _place(plan: ModularPlan, stage: int) -> int:
    """The number of the module that a stage belongs to."""
    return max(number for number, part in enumerate(plan.parts) if part.first_stage <= stage)


def _priced(plan: ModularPlan, pricings: Sequence[Pricing], sort: Sort) -> tuple[Seconds, tuple[float, float]]:
    """The price of a sort of action, and the lead and tail of a reduction."""
    number = _place(plan, sort.stage)
    part, pricing = plan.parts[number], pricings[number]
    own = sort._replace(stage=sort.stage - part.first_stage, pp_rank=sort.pp_rank - part.first_stage)
    outside = (sort.kind is Kind.SEND_F and own.stage == part.layout.pp - 1) or (
        sort.kind is Kind.SEND_B and own.stage == 0
    )
    if outside:
        joins = [
            (source, target)
            for source, target in plan.joins
            if (source if sort.kind is Kind.SEND_F else target) is part
        ]
        price = Seconds(
            pp_comm=on_grid(max(_bridge_s(plan, *join, backward=sort.kind is Kind.SEND_B) for join in joins))
        )
    else:
        price = pricing.price(own)
    # where modules cut the batch differently, all run as many microbatches as the last one here
    if sort.kind in COMPUTE | SENDS:
        price = price.times(part.num_microbatches / plan.parts[-1].num_microbatches).on_grid()
    reduces = sort.kind is Kind.REDUCE_GRAD and pricing.profile.overlap_grad_reduce
    return price, pricing.reduction_overlap(own) if reduces else (0.0, 0.0)


def _bridge_s(plan: ModularPlan, source: ModulePlan, target: ModulePlan, *, backward: bool) -> float:
    """Seconds of one microbatch's message between two modules."""
    giving = target if backward else source
    busy: dict[tuple[bool, int], float] = {}
    for (sender, receiver), num_bytes in bridge_bytes(plan, source, target, backward=backward).items():
        seconds = giving.num_microbatches * message_s(
            plan.cluster, sender, receiver, -(-num_bytes // giving.num_microbatches), ranks=2
        )
        for end in ((True, sender), (False, receiver)):
            busy[end] = busy.get(end, 0.0) + seconds
    return max(busy.values()) / giving.num_microbatches


def _graph(plan: ModularPlan) -> Graph:
    schedule = modular_schedule(plan, plan.parts[-1].num_microbatches)
    profile = profile_of(plan.parts[-1])
    if schedule.placement.sources is None:
        return build_graph(schedule, sends=profile.send_rule, recv_buffers=profile.recv_buffers)
    return joined_graph(schedule)


def joined_graph(schedule: Schedule) -> Graph:
    """The waits of a lowered schedule whose branches join, sends buffered. A receive ends with the last send
    that feeds it listed."""
    placement, size = schedule.placement, len(schedule)
    at = {(action.kind, action.stage, action.microbatch): index for index, action in enumerate(schedule.actions)}
    waits, partner = np.full((NUM_WAITS, size), -1, dtype=np.int64), np.full(size, -1, dtype=np.int64)
    rank = schedule.pp_rank.astype(np.int64)
    last_of: dict[tuple[int, str], int] = {}
    for index, action in enumerate(schedule.actions):
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        lane = "compute" if kind in COMPUTE or kind is Kind.STEP else kind.name
        sends: list[int] = []
        if kind is Kind.F:
            sends = [at[Kind.SEND_F, source, microbatch] for source in placement.sources_of(stage)]
        elif kind is Kind.B and not placement.has_loss(stage):
            sends = [at[Kind.SEND_B, placement.target_of(stage), microbatch]]
        elif kind in SENDS:
            sends = [at[Kind.F if kind is Kind.SEND_F else Kind.B, stage, microbatch]]
        elif kind is Kind.REDUCE_GRAD:
            sends = [last_of[int(rank[index]), "compute"]]
        elif kind is Kind.STEP:
            sends = [at[Kind.REDUCE_GRAD, stage, None]]
        if kind in RECEIVES:
            feeds = placement.sources_of(stage) if kind is Kind.RECV_F else (placement.target_of(stage),)
            send = Kind.SEND_F if kind is Kind.RECV_F else Kind.SEND_B
            partner[index] = at[send, feeds[-1], microbatch]
            partner[[at[send, feed, microbatch] for feed in feeds]] = index
            continue
        waits[0, index] = last_of.get((int(rank[index]), lane), -1)
        waits[1 : 1 + len(sends), index] = sends
        last_of[int(rank[index]), lane] = index
    return Graph(schedule, "buffered", rank, waits, partner, np.full(size, -1, dtype=np.int64))


def _memories(plan: ModularPlan) -> Iterator[RankMemory]:
    for part in plan.parts:
        schedule = part_schedule(plan, part, part.num_microbatches)
        for memory in rank_memories(part, schedule, profile_of(part).recv_buffers):
            yield replace(
                memory, pp_rank=memory.pp_rank + part.first_stage, peak_action=_in_whole(part, memory.peak_action)
            )


def _in_whole(part: ModulePlan, token: str) -> str:
    """An action of a module by its stage in the whole."""
    if not token:
        return ""
    action = Action.from_str(token)
    return str(replace(action, stage=action.stage + part.first_stage))


def _samples(
    plan: ModularPlan, run: Run, memory: Sequence[RankMemory], global_ranks: Sequence[int]
) -> Iterator[MemorySample]:
    """Samples module by module, each from its part of the run."""
    for part in plan.parts:
        first, last = part.first_stage, part.first_stage + part.layout.pp
        lo, hi = run.graph.schedule.offsets[[first, last]].tolist()
        graph = replace(run.graph, schedule=part_schedule(plan, part, run.graph.schedule.num_microbatches))
        own = [replace(each, pp_rank=each.pp_rank - first) for each in memory[first:last]]
        yield from memory_samples(Run(graph, run.start_s[lo:hi], run.end_s[lo:hi]), own, part, global_ranks[first:last])


def _representatives(plan: ModularPlan) -> tuple[int, ...]:
    return tuple(part.layout.global_rank(pp=pp_rank) for part in plan.parts for pp_rank in range(part.layout.pp))


def _report(plan: ModularPlan, run: Run, prices: Sequence[Seconds], memory: tuple[RankMemory, ...]) -> dict[str, Any]:
    ranks, step_s, tokens = _representatives(plan), float(run.end_s.max()), plan.batch.global_size * plan.batch.sequence
    busy = busy_s(run.graph, prices)
    bubble_pp, critical_pp = int(busy.argmin()), critical_pp_rank(run)
    model_flops, causal_flops, hardware_flops = (sum(each) for each in zip(*map(_flops, plan.parts), strict=True))
    peak_flops = step_s * plan.world_size * plan.cluster.peak_flops_per_s[plan.precision.dtype]
    heaviest = max(memory, key=lambda each: (each.peak_bytes, -each.pp_rank))
    capacity = next(
        capacity_of(part).usable_bytes for part in plan.parts if heaviest.pp_rank < part.first_stage + part.layout.pp
    )
    return {
        "step_time_s": step_s,
        "tokens_per_s": tokens / step_s,
        "model_flops_per_s_per_device": model_flops / step_s / plan.world_size,
        "mfu": model_flops / peak_flops,
        "mfu_causal": causal_flops / peak_flops,
        "hfu": hardware_flops / peak_flops,
        "bubble_fraction": (step_s - float(busy[bubble_pp])) / step_s,
        "bubble_rank": ranks[bubble_pp],
        "critical_rank": ranks[critical_pp],
        "time_s": attribute(run, critical_pp, prices),
        "peak_memory_bytes": heaviest.peak_bytes,
        "peak_memory_rank": ranks[heaviest.pp_rank],
        "peak_memory_action": heaviest.peak_action,
        "capacity_bytes": capacity,
        "memory_bytes": heaviest.components(),
        "num_parameters": plan.num_parameters,
        "num_devices": plan.world_size,
        "modules": [_module_report(plan, part, memory) for part in plan.parts],
        "provenance": report_provenance(plan.cluster, profile_of(plan.parts[-1])),
    }


def _module_report(plan: ModularPlan, part: ModulePlan, memory: Sequence[RankMemory]) -> dict[str, Any]:
    """What the report says of one module: its ranks, its heaviest one's bytes, and the bytes that go to the
    next module in a step."""
    own = memory[part.first_stage : part.first_stage + part.layout.pp]
    sent = [bridge_bytes(plan, *join, backward=False) for join in plan.joins if join[0] is part]
    return {
        "name": part.name,
        "ranks": [part.first_rank, part.first_rank + part.layout.world_size - 1],
        "layout": part.layout.degrees,
        "num_parameters": sum(each.num_elements for each in part.held_parameters),
        "peak_memory_bytes": max(each.peak_bytes for each in own),
        "bridge_bytes": sum(sum(each.values()) for each in sent),
    }


def _flops(part: ModulePlan) -> tuple[float, float, float]:
    """FLOPs of a module's step as `flops.StepFlops` counts them, without a head where it has none."""
    flops, tokens = step_flops(part), part.batch.global_size * part.batch.sequence
    head = 0.0 if part.has_loss else 3.0 * tokens * 2 * part.model.hidden_size * part.model.vocab_size
    return flops.model - head, flops.model_causal - head, flops.hardware - head
