"""`search_order`: the fastest order of actions found for one plan, with the seconds and bytes of its own stages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...core.base.errors import PlanError, ScheduleError
from ...core.plan.plan import Plan
from ...core.plan.schedule_of import schedule_for
from ...core.schedule.action import Kind
from ...core.schedule.schedule import Schedule
from ...core.schedule.search import SearchResult, search_placements
from ..cost.pricing import Pricing
from ..memory.sizes import stage_sizes
from ..step.step import Simulation, simulate_first
from .margins import margins_of


@dataclass(frozen=True)
class FoundOrder:
    """The fastest `schedule` for a plan, which may be its own, and the step with it.

    `result` is the search's own answer for all the memory that there is: its seconds are those of forwards, backwards
    and messages alone, and its lower bound holds for them. `is_found` is False where nothing better than the plan's own
    schedule was found.
    """

    schedule: Schedule
    result: SearchResult
    before: Simulation
    after: Simulation
    is_found: bool

    @property
    def report(self) -> dict[str, Any]:
        """The JSON keys."""
        result, after = self.result, self.after.report
        return {
            "found": self.is_found,
            "schedule": self.schedule.name,
            "step_time_s": after["step_time_s"],
            "step_time_before_s": self.before.report["step_time_s"],
            "peak_memory_bytes": after["peak_memory_bytes"],
            "passes_s": result.makespan_s,
            "lower_bound_s": result.lower_bound_s,
            "bound_reason": result.bound_reason,
            "best_named": result.best_named,
            "best_named_s": None if math.isinf(result.best_named_s) else result.best_named_s,
            "evaluated": result.evaluated,
        }


def search_order(plan: Plan) -> FoundOrder:
    """Searches an order of F, I and W for the placement of a plan.

    Every stage has the seconds of its own F, I and W, and a rank may hold as many bytes of activations as its device
    has left besides all else. What was found is then simulated as a whole, with reductions, optimizer and memory, and
    counts only where it fits, and is faster than the plan's own schedule or that one does not fit. Raises `PlanError`
    for a plan whose schedule says more than an order, and `ScheduleError` where not even one microbatch fits.
    """
    if plan.placement.kind == "explicit":
        raise PlanError(
            f"{plan.schedule.file} places stages in no known pattern, and orders are searched for loops, vees and "
            "replicated stages. Choose a schedule by name."
        )
    if plan.schedule.max_active_stages is not None:
        raise PlanError("an order is searched without UNSHARD. Leave schedule.max_active_stages out.")
    before = simulate_first(plan)
    best, schedule = before, schedule_for(plan)
    results: list[SearchResult] = []
    for result in _searches(plan):
        results.append(result)
        after = simulate_first(plan, result.schedule)
        if not _fits(after):
            continue
        if not _fits(best) or after.report["step_time_s"] < best.report["step_time_s"]:
            best, schedule = after, result.schedule
        break  # less memory would not make it faster
    return FoundOrder(schedule, results[0], before, best, is_found=best is not before)


def _fits(step: Simulation) -> bool:
    return bool(step.report["peak_memory_bytes"] <= step.report["capacity_bytes"])


def _searches(plan: Plan) -> Iterator[SearchResult]:
    """Orders for less and less memory. The search counts what a forward keeps until W is done, but what W needs after I
    may be more: the last search counts that for the whole time."""
    stages, pricing, sizes = range(plan.layout.num_stages), Pricing(plan), stage_sizes(plan)
    seconds = {
        kind: [pricing.seconds(kind, stage).total_s for stage in stages]
        for kind in (Kind.F, Kind.I, Kind.W, Kind.SEND_F, Kind.SEND_B)
    }
    retained = [size.tape.retained_bytes for size in sizes]
    more = [max(0, size.tape.deferred_bytes - size.tape.retained_bytes) for size in sizes]
    for quarter in range(5 if any(more) else 1):
        try:
            yield search_placements(
                [plan.placement],
                forward_s=seconds[Kind.F],
                backward_input_s=seconds[Kind.I],
                backward_weight_s=seconds[Kind.W],
                send_s=[max(pair) for pair in zip(seconds[Kind.SEND_F], seconds[Kind.SEND_B], strict=True)],
                activation=[size + quarter * extra // 4 for size, extra in zip(retained, more, strict=True)],
                capacity=_rooms(plan),
            )
        except ScheduleError:
            if not quarter:
                raise
            return  # so much more does not fit at all


def _rooms(plan: Plan) -> list[int]:
    """Bytes that each pipeline rank has for activations: what its device has left besides the static state and the
    most that one action of its stages needs alone."""
    found, sizes = margins_of(plan), stage_sizes(plan)
    rooms = []
    for memory, capacity, stages in zip(found.memories, found.capacities, plan.placement.stages_of_ranks, strict=True):
        tapes = [sizes[stage].tape for stage in stages]
        working = max(
            max(tape.forward_bytes, tape.backward_bytes, tape.split_bytes) - tape.retained_bytes for tape in tapes
        )
        rooms.append(max(0, capacity.usable_bytes - memory.static_bytes - memory.summed_bytes - working))
    return rooms
