"""`search_schedule`: an order of actions for given stage times and memory, at least as good as
every named one that fits.

Starts are all fitting builders of the catalog and the family of list-scheduling rules; the best of them are
improved by moves on the critical path, until a lower bound is met or the evaluations are used up. The answer says
how far from that bound it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import Any

from ..base.errors import ScheduleError
from .catalog import CATALOG, Builder, build
from .placement import Placement
from .schedule import Schedule
from .search_bounds import Bound, lower_bound
from .search_moves import improve
from .search_problem import Problem, Rows, evaluate, fits, peak_held, split_rows, to_schedule, whole_rows
from .search_rules import dispatch, rules

PerStage = float | Sequence[float]
"""One number, or one per stage."""

NUM_IMPROVED = 10
"""Starts that are improved, with equal shares of half of the evaluations; the other half goes to the
best of what comes out."""

ROUNDING = 1e-12
"""Relative difference below which a makespan and a bound, which add up the same numbers in
another order, are the same."""


@dataclass(frozen=True)
class SearchResult:
    """The best schedule found. `peak_activation` has one entry per rank, in the units that were given.

    No schedule over the placements that were searched ends before `lower_bound_s`; `bound_reason` says why
    (`search_bounds` has the proofs). `best_named` is the best catalog entry that fits (None and infinite seconds when
    none does); it is also what `schedule` is when nothing better was found. `evaluated` counts orders.
    """

    schedule: Schedule
    makespan_s: float
    peak_activation: tuple[float, ...]
    lower_bound_s: float
    bound_reason: str
    best_named: str | None
    best_named_s: float
    evaluated: int

    @property
    def gap(self) -> float:
        """How much longer than the lower bound, as a fraction of it: 0 proves that the schedule is optimal."""
        return self.makespan_s / self.lower_bound_s - 1 if self.lower_bound_s else 0.0

    def __str__(self) -> str:
        named = f"{self.best_named} {self.best_named_s:.6g} s" if self.best_named else "no named schedule fits"
        proof = "optimal" if self.gap == 0 else f"at most {self.gap:.2%} from optimal"
        return (
            f"{self.makespan_s:.6g} s, {proof} ({self.bound_reason}: {self.lower_bound_s:.6g} s); best named: {named}"
        )


def search_schedule(
    *,
    pp: int,
    num_microbatches: int,
    vpp: int = 1,
    forward_s: PerStage = 1,
    backward_input_s: PerStage = 1,
    backward_weight_s: PerStage = 1,
    send_s: PerStage = 0,
    activation: PerStage = 1,
    capacity: PerStage | None = None,
    replicas: bool = False,
    evaluations: int = 3000,
) -> SearchResult:
    """The best order of F, I and W found for `pp` ranks of `vpp` stages, with how far from a proven lower bound it is.

    Times are seconds, one number or one per stage (`send_s` of the sending stage; between stages of one rank nothing is
    sent). A microbatch holds `activation` units of a stage from the start of its F to the end of its B or W, and each
    rank has room for `capacity` units, one number or one per rank; None is no limit. Searched are interleaved
    placements, with vpp=2 also the vee, and with `replicas` two directions (which hold every stage twice, a cost that
    `capacity` does not see). Same arguments, same schedule.

    Raises `ScheduleError` for numbers that make no sense, and for a capacity in which no schedule runs, with
    the smallest that would do.

    >>> result = search_schedule(pp=4, num_microbatches=8, capacity=4)
    >>> result.makespan_s, result.gap, result.best_named
    (27.0, 0.0, 'ZBH1')
    """
    for name, value in {"pp": pp, "num_microbatches": num_microbatches, "vpp": vpp, "evaluations": evaluations}.items():
        if not isinstance(value, int) or value < 1:
            raise ScheduleError(f"{name}={value!r} must be a whole number of at least 1.")
    return search_placements(
        _placements(pp, num_microbatches, vpp, replicas),
        forward_s=forward_s,
        backward_input_s=backward_input_s,
        backward_weight_s=backward_weight_s,
        send_s=send_s,
        activation=activation,
        capacity=capacity,
        evaluations=evaluations,
    )


def search_placements(
    placements: Sequence[Placement],
    *,
    forward_s: PerStage,
    backward_input_s: PerStage,
    backward_weight_s: PerStage,
    send_s: PerStage,
    activation: PerStage,
    capacity: PerStage | None,
    evaluations: int = 3000,
) -> SearchResult:
    """`search_schedule` over given placements, which have as many ranks, stages and microbatches as each other."""
    num_ranks, num_stages = placements[0].num_ranks, placements[0].num_stages
    times = {
        "forward_s": forward_s,
        "backward_input_s": backward_input_s,
        "backward_weight_s": backward_weight_s,
        "send_s": send_s,
    }
    seconds = {name: _numbers(name, value, num_stages, "stages") for name, value in times.items()}
    units = _numbers("activation", activation, num_stages, "stages")
    rooms = _numbers("capacity", math.inf if capacity is None else capacity, num_ranks, "ranks")
    scale = math.lcm(*(_fraction(value).denominator for value in (*units, *rooms) if value < math.inf))
    whole_units, whole_rooms = (
        tuple(int(_fraction(v) * scale) if v < math.inf else v for v in values) for values in (units, rooms)
    )
    problems = [
        Problem(placement, **seconds, activation=whole_units, capacity=whole_rooms)  # type: ignore[arg-type]
        for placement in placements
    ]
    feasible = [problem for problem in problems if not _short(problem)]
    if not feasible:
        _refuse(problems, scale, one_number=isinstance(capacity, Real))
    return _Search(feasible, scale, evaluations).result()


@dataclass(frozen=True)
class _Candidate:
    """An order of actions. `named` is set for a schedule of the catalog as it is, which no longer
    is `rows`, its parts."""

    problem: Problem
    makespan_s: float
    total_s: float
    rows: Rows
    named: Schedule | None = None

    @property
    def key(self) -> tuple[float, float]:
        """What makes a candidate better: a smaller makespan, then less total time to the end of the ranks."""
        return self.makespan_s, self.total_s


class _Search:
    """One search: what it looks for, what it found, and how much it has used."""

    def __init__(self, problems: list[Problem], scale: int, evaluations: int):
        self.problems, self.scale, self.evaluations = problems, scale, evaluations
        self.bound: Bound = min((lower_bound(problem) for problem in problems), key=lambda bound: bound.seconds)
        self.target_s = self.bound.seconds * (1 + ROUNDING)
        self.named: list[_Candidate] = []
        self.found: list[_Candidate] = []
        self.evaluated = 0

    def result(self) -> SearchResult:
        """Runs the search."""
        self.add_named()
        self.add_rules()
        self.improve()
        # Of equal makespans the first wins, and named schedules come first.
        best = min([*self.named, *self.found], key=lambda candidate: candidate.makespan_s)
        best_named = min(self.named, key=lambda candidate: candidate.makespan_s, default=None)
        codes, rows = whole_rows(best.problem, best.named) if best.named else (best.problem.codes, best.rows)
        return SearchResult(
            schedule=best.named or to_schedule(best.problem, "search", best.rows),
            makespan_s=best.makespan_s,
            peak_activation=tuple(peak_held(codes, row) / self.scale for row in rows),
            lower_bound_s=best.makespan_s if best.makespan_s <= self.target_s else self.bound.seconds,
            bound_reason=self.bound.reason,
            best_named=best_named.named.name if best_named and best_named.named else None,
            best_named_s=best_named.makespan_s if best_named else math.inf,
            evaluated=self.evaluated,
        )

    @property
    def is_optimal(self) -> bool:
        """Whether a found schedule meets the lower bound."""
        return any(candidate.makespan_s <= self.target_s for candidate in (*self.named, *self.found))

    def add_named(self) -> None:
        """Every catalog schedule that fits, as it is and cut into F, I and W."""
        for problem in self.problems:
            for schedule in _named(problem):
                rows = split_rows(schedule)
                if fits(problem, rows):
                    times = evaluate(*whole_rows(problem, schedule))
                    self.named.append(_Candidate(problem, times.makespan_s, times.total_s, rows, schedule))
                    self.add(problem, rows)

    def add_rules(self) -> None:
        """The orders of all list-scheduling rules, with at most half of the evaluations."""
        for problem in self.problems:
            for rule in rules(problem):
                if self.is_optimal or (self.found and self.evaluated >= self.evaluations // 2):
                    return
                self.add(problem, dispatch(problem, rule))

    def add(self, problem: Problem, rows: Rows) -> None:
        times = evaluate(problem.codes, rows)
        self.evaluated += 1
        self.found.append(_Candidate(problem, times.makespan_s, times.total_s, rows))

    def improve(self) -> None:
        """Improves the best different starts of every placement a little, then the best of all once more."""
        starts: list[_Candidate] = []
        for problem in self.problems:
            different = {candidate.key: candidate for candidate in reversed(self.found) if candidate.problem is problem}
            starts += [different[key] for key in sorted(different)[: NUM_IMPROVED // len(self.problems)]]
        share = (self.evaluations - self.evaluated) // (2 * len(starts))
        for seed, start in enumerate(starts):
            self.improve_one(start, share, seed)
        self.improve_one(
            min(self.found, key=lambda candidate: candidate.key), self.evaluations - self.evaluated, len(starts)
        )

    def improve_one(self, start: _Candidate, evaluations: int, seed: int) -> None:
        """Adds what moves make of one candidate."""
        if evaluations > 1 and not self.is_optimal:
            rows, times, used = improve(
                start.problem, start.rows, evaluations=evaluations, target_s=self.target_s, seed=seed
            )
            self.evaluated += used
            self.found.append(_Candidate(start.problem, times.makespan_s, times.total_s, rows))


def _named(problem: Problem) -> Iterator[Schedule]:
    """What the catalog offers for the problem's placement; entries outside their published range are left out."""
    placement = problem.placement
    pp, m = placement.num_ranks, placement.num_microbatches
    for entry in CATALOG.values():
        for options in _options(entry, problem):
            try:
                schedule = build(entry.name, pp=pp, num_microbatches=m, vpp=placement.num_stages // pp, **options)
            except ScheduleError:
                continue
            if schedule.placement == placement:
                yield schedule


def _options(entry: Builder, problem: Problem) -> list[dict[str, Any]]:
    """The defaults, and what else an entry could be asked for: other group sizes, and these times and this memory."""
    pp, m = problem.placement.num_ranks, problem.placement.num_microbatches
    fitted: dict[str, Any] = {
        name: getattr(problem, name)
        for name in ("forward_s", "backward_input_s", "backward_weight_s", "send_s")
        if name in entry.options
    }
    if "memory_limit" in entry.options:
        slots = (
            room // units if units else m for room, units in zip(problem.capacity, problem.activation, strict=False)
        )
        fitted["memory_limit"] = int(min(m, 2 * pp - 1, *(count for count in slots if count < math.inf)))
    sizes = sorted({2 * pp, m}) if "microbatch_group_size" in entry.options else []
    return [{}, *([fitted] if fitted else []), *({"microbatch_group_size": size} for size in sizes)]


def _placements(pp: int, num_microbatches: int, vpp: int, replicas: bool) -> list[Placement]:
    placements = [Placement.loop(pp, pp * vpp, num_microbatches)]
    if vpp == 2:
        placements.append(Placement.vee(pp, num_microbatches))
    if replicas:
        if vpp != 1 or pp % 2:
            raise ScheduleError(
                f"replicas=True needs one stage per rank and an even pp, got vpp={vpp} and pp={pp}. Leave replicas out."
            )
        placements.append(Placement.replicated(pp, num_microbatches))
    return placements


def _numbers(name: str, value: PerStage, count: int, of_what: str) -> tuple[float, ...]:
    """One value for each stage or rank. Raises `ScheduleError` for negative ones, a wrong count, and infinite
    ones but for capacities."""
    values = tuple(float(item) for item in ([value] * count if isinstance(value, Real) else value))  # type: ignore[union-attr]
    if len(values) != count:
        raise ScheduleError(
            f"{name} has {len(values)} values for {count} {of_what}. Give one number, or one for each of the {of_what}."
        )
    if any(not 0 <= item < math.inf for item in values if not (name == "capacity" and item == math.inf)):
        raise ScheduleError(f"{name} has a value that cannot be: {values}. Use finite numbers of at least 0.")
    return values


def _fraction(value: float) -> Fraction:
    """The number as it is written: 1/10 for 0.1, so that ten of them fit into 1.0."""
    return Fraction(repr(value))


def _short(problem: Problem) -> list[int]:
    """The ranks whose capacity is too small for any schedule."""
    rooms = zip(problem.capacity, problem.smallest_capacity, strict=True)
    return [rank for rank, (room, least) in enumerate(rooms) if room < least]


def _refuse(problems: list[Problem], scale: int, *, one_number: bool) -> None:
    """Raises the error for a capacity that is too small, speaking of the placement that needs least: at
    most anywhere, or in sum."""
    problem = min(problems, key=lambda problem: (max if one_number else sum)(problem.smallest_capacity))
    least = [f"{units / scale:g}" for units in problem.smallest_capacity]
    rank = _short(problem)[0]
    smallest = f"{max(problem.smallest_capacity) / scale:g}" if one_number else f"({', '.join(least)})"
    raise ScheduleError(
        f"capacity={problem.capacity[rank] / scale:g} of rank {rank} is less than the {least[rank]} units that one "
        "microbatch holds there "
        f"(stages {', '.join(map(str, problem.placement.stages_of(rank)))}), so no schedule runs. The smallest "
        f"capacity is {smallest}."
    )
