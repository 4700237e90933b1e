"""`search`: which layout of a model on a cluster is fastest, and why the others lost.

Every combination of degrees, microbatch, recompute, ZeRO stage and schedule is decided: by a rule of the plan, by a
lower bound on its time, by memory, or by a full simulation. What has the lowest bound is looked at next: a family is
split into cuts, these into plans, each with a sharper bound than before, and plans are simulated, until no bound is
below the slowest of the best ones found. So the ranking is that of simulating everything.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from time import perf_counter
from typing import Any

from ...core.base.errors import ScheduleError
from ...core.commands.options import SHARED_WITH_PLANS, SearchSpace
from ...core.plan.plan import Plan
from ...core.schedule import build, lower
from ...core.schedule.schedule import Schedule
from ..cost.pricing import Pricing
from ..memory.capacity import capacity_of
from ..memory.memory import RankMemory, rank_memories
from ..simulation.simulate import simulate
from ..stack.profiles import profile_of
from ..step.step import worst
from .bounds import chain_bounds_s, family_bound_s, lower_bound_s, memory_bound_bytes
from .space import Cut, Family, Tally, cuts, families, variants

NUM_RANKED = 10
"""Candidates in the report."""

MAX_SIMULATIONS = 200
"""Simulations after which the search stops even if bounds are left below the best; the report then
says so under `rejected`."""

REASONS = {
    "out-of-memory": "the worst rank's peak is above what is usable of the device's memory",
    "bound-above-best": "a lower bound on the step time is above the slowest ranked candidate",
    "slower": "simulated, and slower than the ranked candidates",
    "illegal-layout": "degrees or rank order contradict each other",
    "not-simulated": f"left over after {MAX_SIMULATIONS} simulations",
}
"""Reasons for a rejection besides the rules of `core.plan.rules`."""


@dataclass(frozen=True, eq=False)
class SearchResult:
    """`report` has the JSON keys of the interface; `plans` are the ranked plans, best first."""

    report: dict[str, Any]
    plans: tuple[Plan, ...] = ()


def search(space: SearchSpace | Plan) -> SearchResult:
    """The ranked layouts of a search space; of a plan, all but its layout, microbatch,
    recomputation and schedule is taken.

    Raises `PlanError` when values are pinned that a search cannot take, or pinned degrees that do not
    make the number of devices.

    `rejected` counts combinations of all free values, each by what decided it first; where a rule already forbids the
    degrees or the microbatch, all combinations with them count once.
    """
    started = perf_counter()
    tally = Tally()
    if isinstance(space, Plan):
        space = SearchSpace(**{name: getattr(space, name) for name in SHARED_WITH_PLANS})
    best = _best(space, tally)
    report = {
        "candidates": [_candidate(plan, found) for plan, found in best],
        "evaluated": tally.evaluated,
        "simulated": tally.simulated,
        "rejected": {reason: number for reason, number in sorted(tally.rejected.items()) if number},
        "elapsed_s": perf_counter() - started,
    }
    return SearchResult(report, tuple(plan for plan, _ in best))


def _best(space: SearchSpace, tally: Tally) -> list[tuple[Plan, dict[str, Any]]]:
    """The fastest plans that fit, with what is predicted of them, best first: branch and bound over families, cuts and
    plans (Land & Doig 1960)."""
    place = count()
    shared: dict[tuple[object, ...], Any] = {}
    queue: list[tuple[float, int, Family | Cut | Plan]] = [
        (family_bound_s(family, Pricing(family.plan, shared=shared)), next(place), family)
        for family in families(space, tally)
    ]
    heapq.heapify(queue)
    ranked: list[tuple[float, int, Plan, dict[str, Any]]] = []
    while queue:
        bound_s, _, entry = queue[0]
        if len(ranked) >= NUM_RANKED and bound_s > ranked[NUM_RANKED - 1][0]:
            tally.reject("bound-above-best", _size(queue))
            break
        heapq.heappop(queue)
        if isinstance(entry, Family):
            for cheap_s, cut in _bounded(entry, shared):
                heapq.heappush(queue, (max(bound_s, cheap_s), next(place), cut))
        elif isinstance(entry, Cut):
            for sharp_s, plan in _fitting(entry, space, tally):
                heapq.heappush(queue, (max(bound_s, sharp_s), next(place), plan))
        elif (reason := _misfit(entry)) is not None:
            tally.reject(reason)
        elif tally.simulated == MAX_SIMULATIONS:
            tally.reject("not-simulated", 1 + _size(queue))
            break
        else:
            tally.simulated += 1
            report = simulate(entry).report
            bisect.insort(ranked, (report["step_time_s"], next(place), entry, report))
    best, slower = ranked[:NUM_RANKED], ranked[NUM_RANKED:]
    tally.reject("slower", len(slower))
    tally.evaluated += len(best)
    return [(plan, report) for _, _, plan, report in best]


def _size(queue: list[tuple[float, int, Family | Cut | Plan]]) -> int:
    """Plans that are left."""
    return sum(1 if isinstance(entry, Plan) else entry.size for _, _, entry in queue)


def _bounded(family: Family, shared: dict[tuple[object, ...], Any]) -> Iterator[tuple[float, Cut]]:
    """Every cut of a family with its cheap bound."""
    for same_cut in cuts(family):
        plan = same_cut[0].plan
        yield from zip(
            chain_bounds_s(plan, [cut.schedule for cut in same_cut], Pricing(plan, shared=shared)),
            same_cut,
            strict=True,
        )


def _fitting(cut: Cut, space: SearchSpace, tally: Tally) -> Iterator[tuple[float, Plan]]:
    """(sharp bound in seconds, plan) of what may fit."""
    for plan in variants(cut, space):
        if memory_bound_bytes(plan) > capacity_of(plan).usable_bytes:
            tally.reject("out-of-memory")
            continue
        yield lower_bound_s(plan, Pricing(plan, gathers_scheduled=plan.schedule.max_active_stages is not None)), plan


def _misfit(plan: Plan) -> str | None:
    """Why a plan cannot run: its worst rank holds too much, or its order needs more stages gathered at a
    time than are pinned."""
    try:
        heaviest = worst(_memories(plan))
    except ScheduleError:
        return "schedule-can-be-built"
    return "out-of-memory" if heaviest.peak_bytes > capacity_of(plan).usable_bytes else None


def _memories(plan: Plan) -> tuple[RankMemory, ...]:
    """Peaks of the pipeline ranks. After two rounds of warm-up 1F1B holds no more, so a few microbatches are enough."""
    layout, microbatches = plan.layout, plan.num_microbatches
    if plan.schedule.name in ("1F1B", "Interleaved1F1B") and plan.numerics.mode == "fast":
        microbatches = min(microbatches, 2 * layout.num_stages + microbatches % layout.pp)
    schedule = _lowered(plan.schedule.name, layout.pp, layout.vpp, microbatches, plan.schedule.max_active_stages)
    return rank_memories(plan, schedule, profile_of(plan).recv_buffers)


@lru_cache(maxsize=256)
def _lowered(name: str, pp: int, vpp: int, num_microbatches: int, max_active_stages: int | None) -> Schedule:
    return lower(build(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches), max_active_stages=max_active_stages)


def _candidate(plan: Plan, report: Mapping[str, Any]) -> dict[str, Any]:
    layout, batch = plan.layout, plan.batch
    return {
        "layout": {
            "tp": layout.tp,
            "pp": layout.pp,
            "vpp": layout.vpp,
            "dp": layout.dp,
            "cp": layout.cp,
            "ep": layout.ep,
            "etp": layout.expert_tp,
            "sequence_parallel": layout.sequence_parallel,
            "zero": layout.zero,
            "stages": layout.stages,
        },
        "batch": {"global": batch.global_size, "micro": batch.micro_size, "sequence": batch.sequence},
        "recompute": plan.recompute.mode,
        "schedule": plan.schedule.name,
        "step_time_s": report["step_time_s"],
        "mfu": report["mfu"],
        "peak_memory_bytes": report["peak_memory_bytes"],
    }
