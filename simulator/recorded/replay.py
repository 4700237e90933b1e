"""`simulate` with the durations of recorded steps: measured once, run under any schedule of the same stages."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

import numpy as np

from ...core.base.errors import PlanError
from ...core.plan.plan import Plan
from ...core.schedule.action import Kind
from ...core.schedule.timeline import Timeline
from ..cost.pricing import Pricing
from ..engine.attribution import Sort, sorts_of
from ..engine.graph import Graph
from ..engine.replicas import ReplicaRun, execute_replicas
from ..engine.seconds import GRID, Seconds
from ..memory.memory import rank_memories
from ..stack.profiles import profile_of
from ..stack.provenance import Origin
from ..step.step import Simulation, plan_graph, report_of
from ..variation.columns import couplings_of
from .recorded import recorded_durations_s

LANE_COMPONENTS = {
    Kind.STEP: "optimizer",
    Kind.REDUCE_GRAD: "dp_comm",
    Kind.UNSHARD: "dp_comm",
    Kind.RESHARD: "dp_comm",
}
"""Where the seconds of a kind of action go that costs nothing by its price; messages are `pp_comm`,
all else is `compute`."""


def simulate_recorded(plan: Plan, timelines: Sequence[Timeline]) -> Simulation:
    """The step of a plan whose actions take what they took in a recorded step (`recorded_durations_s`).

    Of several recorded steps each gives one, and the one in the middle is returned; `recorded_step_time_s` of
    its report has them all, in the order given. The seconds of an action are split by cause as its price is.
    Raises `TimelineError` where a recorded step does not fit the plan, and `PlanError` for a plan with a
    variation, which is one of prices.
    """
    if not plan.variation.is_nothing:
        raise PlanError("[variation] varies prices, but recorded durations replace them. Leave out one or the other.")
    graph = plan_graph(plan)
    pricing = Pricing(plan, gathers_scheduled=any(sort.kind is Kind.UNSHARD for sort in sorts_of(graph).sorts))
    steps = [_simulated(plan, graph, pricing, timeline) for timeline in timelines]
    step_s = [step.report["step_time_s"] for step in steps]
    middle = steps[step_s.index(median_low(step_s))]
    middle.report["recorded_step_time_s"] = step_s
    return middle


def _simulated(plan: Plan, graph: Graph, pricing: Pricing, timeline: Timeline) -> Simulation:
    """The step that one recorded step's durations give: that of the slowest replica."""
    duration_s = np.round(recorded_durations_s(plan, graph, timeline, pricing) * GRID) / GRID
    couplings, order = couplings_of(plan)
    run = _steps_at_once(execute_replicas(graph, duration_s[:, order], couplings))
    compute = graph.is_compute & (graph.schedule.actions.kind != Kind.STEP)
    column = int(run.end_s[compute].max(axis=0).argmax())
    dp_rank, one = int(order[column]), run.run(column)
    prices = _split_as_priced(graph, pricing, one.end_s - one.start_s)
    memory = rank_memories(plan, graph.schedule, profile_of(plan).recv_buffers)
    report = report_of(plan, one, prices, memory, dp_rank)
    report["provenance"] = {**report["provenance"], "durations": Origin(kind="measured", source=timeline.title)}
    return Simulation(plan, one, memory, report, prices, dp_rank, recorded=True)


def _steps_at_once(run: ReplicaRun) -> ReplicaRun:
    """No rank steps before all can: STEP takes the loss and the norm over all ranks."""
    steps = np.flatnonzero(run.graph.schedule.actions.kind == Kind.STEP)
    lasting_s = run.end_s[steps] - run.start_s[steps]
    run.start_s[steps] = run.start_s[steps].max(initial=0.0)
    run.end_s[steps] = run.start_s[steps] + lasting_s
    return run


def _split_as_priced(graph: Graph, pricing: Pricing, lasting_s: np.ndarray) -> tuple[Seconds, ...]:
    """Mean seconds of every sort of action, split by cause as the price of the sort is."""
    sorts = sorts_of(graph)
    counts = np.maximum(np.bincount(sorts.of_action, minlength=len(sorts.sorts)), 1)
    means = np.bincount(sorts.of_action, weights=lasting_s, minlength=len(sorts.sorts)) / counts
    return tuple(_split(sort, pricing.price(sort), float(mean)) for sort, mean in zip(sorts.sorts, means, strict=True))


def _split(sort: Sort, price: Seconds, seconds: float) -> Seconds:
    if price.total_s:
        return price.times(seconds / price.total_s).on_grid()
    message = "pp_comm" if sort.kind.name.startswith(("SEND", "RECV")) else "compute"
    return Seconds(**{LANE_COMPONENTS.get(sort.kind, message): seconds}).on_grid()
