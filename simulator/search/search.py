"""`search`: which layout of a model on a cluster is fastest, and why the others lost.

Every combination of degrees, microbatch, recompute, ZeRO stage and schedule is decided: by a rule of the plan, by a
lower bound on its time, by memory, or by a full simulation. What has the lowest bound is looked at next: a family is
split into cuts, these into plans, each with a sharper bound than before, and plans are simulated, until no bound is
below the slowest of the best ones found. So the ranking is that of simulating everything.
"""

from __future__ import annotations

import bisect
import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from time import perf_counter
from typing import Any, NamedTuple

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
from .bounds import chain_bounds_s, family_bound_s, lower_bound_s
from .fitting import Fitting, siblings
from .freed import chosen_of, spaces_of
from .memory_floor import MemoryFloors
from .question import SLOWEST_OF_FRONT, Progress, Question, check_objective, costs
from .simplicity import complexity, num_axes, plainer_first
from .space import Cut, Family, Tally, cuts, families, variants
from .work_floor import WorkFloors

NUM_RANKED = 10
"""Candidates that are looked for at least, so that of near-equal ones the plainer can come first."""

MAX_SIMULATIONS = 200
"""Simulations after which the search stops even if bounds are left below the best; the report then
says so under `rejected`."""

REASONS = {
    "out-of-memory": "the worst rank's peak is above what is usable of the device's memory",
    "bound-above-best": "a lower bound on the step time is above the slowest ranked candidate",
    "slower": "simulated, and slower than the ranked candidates",
    "beaten": "another is as fast at least, needs no more memory and is no less plain",
    "illegal-layout": "degrees or rank order contradict each other",
    "not-simulated": f"left over after {MAX_SIMULATIONS} simulations",
}
"""Reasons for a rejection besides the rules of `core.plan.rules`."""


@dataclass(frozen=True, eq=False)
class SearchResult:
    """`report` has the JSON keys of the interface; `plans` are the ranked plans, best first."""

    report: dict[str, Any]
    plans: tuple[Plan, ...] = ()


def search(space: SearchSpace | Plan, question: Question | None = None) -> SearchResult:
    """The ranked layouts of a search space; of a plan, all but its layout, microbatch,
    recomputation and schedule is taken.

    Raises `PlanError` when values are pinned that a search cannot take, or pinned degrees that do not
    make the number of devices.

    `rejected` counts combinations of all free values, each by what decided it first; where a rule already forbids the
    degrees or the microbatch, all combinations with them count once.
    """
    started = perf_counter()
    question = question or Question()
    if isinstance(space, Plan):
        space = SearchSpace(**{name: getattr(space, name) for name in SHARED_WITH_PLANS})
    check_objective(question.objective, space.cluster)
    hunt = _Hunt(space, question)
    best = hunt.front() if question.pareto else hunt.smallest() if question.objective == "memory" else hunt.fastest()
    tally = hunt.tally
    tally.evaluated += len(best)
    report = {
        "candidates": [
            {**candidate(plan, found), **({"free": chosen_of(plan, space.free)} if space.free else {})}
            for plan, found in best
        ],
        "evaluated": tally.evaluated,
        "simulated": tally.simulated,
        "rejected": {reason: number for reason, number in sorted(tally.rejected.items()) if number},
        "elapsed_s": perf_counter() - started,
    }
    if space.free:
        report["free"] = {key: list(values) for key, values in space.free.items()}
    return SearchResult(report, tuple(plan for plan, _ in best))


Answer = tuple[Plan, dict[str, Any]]
"""A plan with what is predicted of it."""


class _Unpriced(NamedTuple):
    """A family whose own layers are not priced yet."""

    family: Family

    @property
    def size(self) -> int:
        """Plans of the family."""
        return self.family.size


_Entry = _Unpriced | Family | Cut | Plan
"""What a search has a bound for."""


class _Hunt:
    """One search: branch and bound over families, cuts and plans (Land & Doig 1960)."""

    def __init__(self, space: SearchSpace, question: Question):
        self.space, self.question, self.tally = space, question, Tally()
        self._spaces = tuple(spaces_of(space))
        self._place = count()
        self._floors: dict[object, MemoryFloors] = defaultdict(MemoryFloors)
        self._shared: dict[object, dict[tuple[object, ...], Any]] = defaultdict(dict)
        self._queue: list[tuple[float, int, _Entry]] = []

    def fastest(self) -> list[Answer]:
        """The fastest plans that fit, best first, of near-equal ones the plainest."""
        most = max(NUM_RANKED, self.question.top)
        ranked: list[tuple[float, int, Plan, dict[str, Any]]] = []
        for _ in self._by_time(lambda bound_s, _: len(ranked) >= most and bound_s > ranked[most - 1][0], ranked):
            pass
        best, slower = ranked[:most], ranked[most:]
        ordered = plainer_first([(step_s, plan, report) for step_s, _, plan, report in best])
        self.tally.reject("slower", len(slower) + len(ordered[self.question.top :]))
        return [(plan, report) for _, plan, report in ordered[: self.question.top]]

    def front(self) -> list[Answer]:
        """The plans that none beats in time, memory and simplicity together, fastest first."""
        ranked: list[tuple[float, int, Plan, dict[str, Any]]] = []

        def lost(bound_s: float, entry: _Entry | None) -> bool:
            if ranked and bound_s > ranked[0][0] * SLOWEST_OF_FRONT:
                return True
            if entry is None or not isinstance(entry, Family | Plan):
                return False
            least = entry.least_bytes if isinstance(entry, Family) else self._floors[_sharing(entry)].bytes_of(entry)
            things = num_axes(entry.plan) if isinstance(entry, Family) else complexity(entry)[0]
            return any(
                step_s <= bound_s and report["peak_memory_bytes"] <= least and complexity(plan)[0] <= things
                for step_s, _, plan, report in ranked
            )

        for _ in self._by_time(lost, ranked):
            pass
        found: list[tuple[float, int, Plan, dict[str, Any]]] = []
        for entry in ranked:
            step_s, _, plan, report = entry
            if step_s <= ranked[0][0] * SLOWEST_OF_FRONT and not any(
                other["peak_memory_bytes"] <= report["peak_memory_bytes"]
                and complexity(known)[0] <= complexity(plan)[0]
                for _, _, known, other in found
            ):
                found.append(entry)
        self.tally.reject("beaten", len(ranked) - len(found))
        return [(plan, report) for _, _, plan, report in found]

    def smallest(self) -> list[Answer]:
        """The plans whose worst rank holds least, best first; of those that hold as much the fastest."""
        place, queue = self._place, list[tuple[float, int, Family | Plan, bool]]()
        queue = [(family.least_bytes, next(place), family, False) for family in self._possible()]
        heapq.heapify(queue)
        found: list[tuple[float, Plan]] = []
        while queue and (len(found) < self.question.top or queue[0][0] <= found[-1][0]):
            num_bytes, _, entry, is_exact = heapq.heappop(queue)
            if isinstance(entry, Family):
                for same_cut in cuts(entry):
                    for plan in (plan for cut in same_cut for plan in variants(cut)):
                        least = self._floors[_sharing(plan)].bytes_of(plan)
                        heapq.heappush(queue, (least, next(place), plan, False))
            elif is_exact:
                found.append((num_bytes, entry))
            elif (reason := self._misfit(entry)) is not None:
                self.tally.reject(reason)
            else:
                heapq.heappush(queue, (worst(_memories(entry)).peak_bytes, next(place), entry, True))
        self.tally.reject("bound-above-best", sum(_num_plans(entry) for _, _, entry, _ in queue))
        simulated = [(num_bytes, plan, simulate(plan).report) for num_bytes, plan in found]
        self.tally.simulated += len(simulated)
        simulated.sort(key=lambda entry: (entry[0], entry[2]["step_time_s"], complexity(entry[1])))
        self.tally.reject("slower", len(simulated[self.question.top :]))
        return [(plan, report) for _, plan, report in simulated[: self.question.top]]

    def _by_time(
        self, lost: Callable[[float, _Entry | None], bool], ranked: list[tuple[float, int, Plan, Any]]
    ) -> Iterator[None]:
        """Simulates into `ranked`, sorted by step, the plans that are not `lost`: (bound, entry) says so of one, and
        with None of all that have no lower bound. Yields after every step of the search."""
        queue, place, tally = self._queue, self._place, self.tally
        floors = WorkFloors(self._pricing_of, _sharing)
        queue.extend((floors.bound_s(family), next(place), _Unpriced(family)) for family in self._possible())
        heapq.heapify(queue)
        while queue:
            bound_s, number, entry = queue[0]
            if lost(bound_s, None):
                tally.reject("bound-above-best", _size(queue))
                break
            heapq.heappop(queue)
            if lost(bound_s, entry):
                tally.reject("beaten", _num_plans(entry))
            elif isinstance(entry, _Unpriced):
                priced_s = family_bound_s(entry.family, self._pricing_of(entry.family.plan))
                heapq.heappush(queue, (max(bound_s, priced_s), number, entry.family))
            elif isinstance(entry, Family):
                for cheap_s, cut in _bounded(entry, self._shared[_sharing(entry.plan)]):
                    heapq.heappush(queue, (max(bound_s, cheap_s), next(place), cut))
            elif isinstance(entry, Cut):
                for sharp_s, plan in _sharpened(entry, self._shared[_sharing(entry.plan)]):
                    heapq.heappush(queue, (max(bound_s, sharp_s), next(place), plan))
            elif (reason := self._misfit(entry)) is not None:
                tally.reject(reason)
            elif tally.simulated == MAX_SIMULATIONS:
                tally.reject("not-simulated", 1 + _size(queue))
                break
            else:
                tally.simulated += 1
                report = simulate(entry).report
                bisect.insort(ranked, (report["step_time_s"], next(place), entry, report))
            if self.question.watch is not None:
                best_s = ranked[0][0] if ranked else None
                self.question.watch(Progress(len(queue), tally.evaluated, bound_s, best_s))
            yield

    def _pricing_of(self, plan: Plan) -> Pricing:
        return Pricing(plan, shared=self._shared[_sharing(plan)])

    def _possible(self) -> Iterator[Family]:
        """The families with what may fit of them."""
        for space in self._spaces:
            for equals in siblings(families(space, self.tally, self.question.part)):
                plan = equals[0].plan  # what is usable and what is shared go by the degrees alone
                fitting = Fitting(self._floors[_sharing(plan)], self._usable_bytes(plan), self.tally)
                yield from filter(None, map(fitting.of, equals))

    def _usable_bytes(self, plan: Plan) -> int:
        usable, most = capacity_of(plan).usable_bytes, self.question.most_bytes
        return usable if most is None else min(usable, most)

    def _misfit(self, plan: Plan) -> str | None:
        """Why a plan cannot run: its worst rank holds too much, or its order needs more stages gathered at a
        time than are pinned."""
        try:
            heaviest = worst(_memories(plan))
        except ScheduleError:
            return "schedule-can-be-built"
        return "out-of-memory" if heaviest.peak_bytes > self._usable_bytes(plan) else None


def _sharing(plan: Plan) -> object:
    """Equal for plans that share prices and bytes: those of the same free keys, so all where none is freed."""
    return plan.precision, plan.runtime, plan.data_parallel, plan.layout.order


def _num_plans(entry: _Entry) -> int:
    return 1 if isinstance(entry, Plan) else entry.size


def _size(queue: list[tuple[float, int, _Entry]]) -> int:
    """Plans that are left."""
    return sum(_num_plans(entry) for _, _, entry in queue)


def _bounded(family: Family, shared: dict[tuple[object, ...], Any]) -> Iterator[tuple[float, Cut]]:
    """Every cut of a family with its cheap bound."""
    for same_cut in cuts(family):
        plan = same_cut[0].plan
        yield from zip(
            chain_bounds_s(plan, [cut.schedule for cut in same_cut], Pricing(plan, shared=shared)),
            same_cut,
            strict=True,
        )


def _sharpened(cut: Cut, shared: dict[tuple[object, ...], Any]) -> Iterator[tuple[float, Plan]]:
    """(sharp bound in seconds, plan) of every plan of a cut."""
    for plan in variants(cut):
        gathers_scheduled = plan.schedule.max_active_stages is not None
        yield lower_bound_s(plan, Pricing(plan, gathers_scheduled=gathers_scheduled, shared=shared)), plan


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


def candidate(plan: Plan, report: Mapping[str, Any]) -> dict[str, Any]:
    """A plan and its simulation's report as one of `candidates`."""
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
        **costs(plan.cluster, report["step_time_s"]),
    }
