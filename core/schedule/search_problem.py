"""What `search_schedule` searches over: stage times, a placement and memory limits, and the
evaluation of an order of actions.

Inside the search an action is a *code*, `kind * N + stage * m + microbatch` for F, B, I, W (`Kind` 0 to 3), with N =
stages x microbatches, and a candidate is one list of codes per rank. Its times follow the simulator's execution rule
with buffered sends: a rank runs its list in order, each action as soon as its input has arrived; values for one
neighbour and one direction are sent one after the other. The tests hold the two to the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .action import Action, ActionArray, Kind
from .placement import Placement
from .schedule import Schedule

Rows = list[list[int]]
"""Codes in order, one list per pipeline rank."""


@dataclass(frozen=True)
class Problem:
    """Seconds per stage (of the sending stage for `send_s`), activation units per stage that one microbatch holds from
    the start of its F to the end of its B or W, and the units each pipeline rank has room for (may be infinite). Units
    are whole, so that sums are exact."""

    placement: Placement
    forward_s: tuple[float, ...]
    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]
    send_s: tuple[float, ...]
    activation: tuple[int, ...]
    capacity: tuple[float, ...]

    @cached_property
    def routes(self) -> tuple[Route, ...]:
        """Which ranks microbatches pass through: one route, or two with replicated stages."""
        p, m = self.placement, self.placement.num_microbatches
        path: dict[tuple[int, ...], list[int]] = {}
        for microbatch in range(m):
            path.setdefault(tuple(p.rank_of(stage, microbatch) for stage in range(p.num_stages)), []).append(microbatch)
        return tuple(Route(ranks, tuple(microbatches)) for ranks, microbatches in path.items())

    @cached_property
    def smallest_capacity(self) -> tuple[int, ...]:
        """Per rank the least room in which any schedule runs.

        When a microbatch runs the forward of the last of its stages on a rank it still holds all of them, so less is
        too little; and one microbatch after the other, each from first forward to last W, needs no more.
        """
        need = [0] * self.placement.num_ranks
        for route in self.routes:
            for rank in set(route.ranks):
                need[rank] = max(need[rank], sum(self.activation[stage] for stage in route.stages_on(rank)))
        return tuple(need)

    @cached_property
    def busiest_s(self) -> float:
        """Work of the rank that has most of it."""
        work_s = [0.0] * self.placement.num_ranks
        of_stage = [
            sum(times) for times in zip(self.forward_s, self.backward_input_s, self.backward_weight_s, strict=True)
        ]
        for route in self.routes:
            for stage, rank in enumerate(route.ranks):
                work_s[rank] += len(route.microbatches) * of_stage[stage]
        return max(work_s)

    @cached_property
    def codes(self) -> Codes:
        """The tables of all single actions."""
        return _codes(self)


@dataclass(frozen=True)
class Route:
    """The rank of every stage, for the microbatches that take this way."""

    ranks: tuple[int, ...]
    microbatches: tuple[int, ...]

    def stages_on(self, pp_rank: int) -> list[int]:
        """The stages this route runs on a rank, ascending."""
        return [stage for stage, rank in enumerate(self.ranks) if rank == pp_rank]


@dataclass(frozen=True)
class Codes:
    """Tables indexed by code. `need` and `out` are arrival slots, one per value that a stage hands to its neighbour;
    slot `nothing` has always arrived. `lane` is -1 where the value stays on its rank. `change` is what the action adds
    to the memory of its rank (at its start) or, negative, frees (at its end)."""

    num_cells: int  # stages x microbatches
    num_lanes: int
    rank: list[int]
    stage: list[int]
    microbatch: list[int]
    duration_s: list[float]
    send_s: list[float]
    need: list[int]
    out: list[int]
    lane: list[int]
    change: list[int]

    @property
    def nothing(self) -> int:
        """The slot of inputs that are there from the start."""
        return 2 * self.num_cells

    def before(self, first: int, second: int) -> bool:
        """Whether one rank has to run `first` before `second`, because they are F, I (or B) and W of one
        stage and microbatch."""
        return first < second and (second - first) % self.num_cells == 0


def _codes(problem: Problem) -> Codes:
    placement = problem.placement
    num_stages, m = placement.num_stages, placement.num_microbatches
    N = num_stages * m
    owner = [placement.rank_of(stage, microbatch) for stage in range(num_stages) for microbatch in range(m)]
    lanes: dict[tuple[int, int, bool], int] = {}
    columns: dict[str, list] = {
        "rank": owner * 4,
        "stage": [c // m for c in range(N)] * 4,
        "microbatch": [c % m for c in range(N)] * 4,
    }
    columns |= {name: [] for name in ("duration_s", "send_s", "need", "out", "lane", "change")}
    for kind in (Kind.F, Kind.B, Kind.I, Kind.W):
        forward, step = kind is Kind.F, {Kind.F: 1, Kind.W: 0}.get(kind, -1)
        for cell in range(N):
            stage, target = cell // m, cell + step * m
            needs, gives = (step != 0 and 0 <= neighbour < num_stages for neighbour in (stage - step, stage + step))
            crosses = gives and owner[target] != owner[cell]
            columns["need"].append((cell if forward else N + cell) if needs else 2 * N)
            columns["out"].append((target if forward else N + target) if gives else -1)
            columns["lane"].append(
                lanes.setdefault((owner[cell], owner[target], forward), len(lanes)) if crosses else -1
            )
            columns["send_s"].append(problem.send_s[stage] if crosses else 0)
            columns["duration_s"].append(_duration_s(problem, kind, stage))
            columns["change"].append(problem.activation[stage] * {Kind.F: 1, Kind.I: 0}.get(kind, -1))
    return Codes(N, len(lanes), **columns)


def _duration_s(problem: Problem, kind: Kind, stage: int) -> float:
    if kind is Kind.F:
        return problem.forward_s[stage]
    backward_input_s, backward_weight_s = problem.backward_input_s[stage], problem.backward_weight_s[stage]
    return {Kind.B: backward_input_s + backward_weight_s, Kind.I: backward_input_s, Kind.W: backward_weight_s}[kind]


@dataclass(frozen=True)
class Times:
    """When every action of a candidate ends, by code. `makespan_s` is infinite for an order that can never run."""

    makespan_s: float
    total_s: float  # sum over ranks of the end of their last action: the second criterion, where makespans are equal
    end_s: list[float]


def evaluate(codes: Codes, rows: Rows) -> Times:
    """The times of an order of actions. Every rank is run until it waits; the arrival of what it waits for wakes it."""
    need, out, lane, send_s, duration_s = codes.need, codes.out, codes.lane, codes.send_s, codes.duration_s
    arrival_s: list[float] = [-1] * (2 * codes.num_cells + 1)
    arrival_s[codes.nothing] = 0
    waiting = [-1] * len(arrival_s)
    lane_free_s: list[float] = [0] * codes.num_lanes
    cursor, free_s = [0] * len(rows), [0.0] * len(rows)
    end_s = [0.0] * len(need)
    awake = list(range(len(rows) - 1, -1, -1))
    while awake:
        rank = awake.pop()
        row, now = rows[rank], free_s[rank]
        for position in range(cursor[rank], len(row)):
            code = row[position]
            arrived = arrival_s[need[code]]
            if arrived < 0:
                waiting[need[code]] = rank
                cursor[rank] = position
                break
            now = (now if now > arrived else arrived) + duration_s[code]
            end_s[code] = now
            slot = out[code]
            if slot >= 0:
                then, way = now, lane[code]
                if way >= 0:
                    if lane_free_s[way] > then:
                        then = lane_free_s[way]
                    then += send_s[code]
                    lane_free_s[way] = then
                arrival_s[slot] = then
                if waiting[slot] >= 0:
                    awake.append(waiting[slot])
                    waiting[slot] = -1
        else:
            cursor[rank] = len(row)
        free_s[rank] = now
    stuck = any(position < len(row) for position, row in zip(cursor, rows, strict=True))
    return Times(math.inf if stuck else max(free_s), sum(free_s), end_s)


def peak_held(codes: Codes, row: Sequence[int]) -> int:
    """The most activation units a rank holds when it runs `row`."""
    change = codes.change
    held = peak = 0
    for code in row:
        held += change[code]
        if held > peak:
            peak = held
    return peak


def fits(problem: Problem, rows: Rows) -> bool:
    """Whether every rank has room for what it holds."""
    return all(peak_held(problem.codes, row) <= capacity for row, capacity in zip(rows, problem.capacity, strict=True))


def split_rows(schedule: Schedule) -> Rows:
    """The codes of a schedule with every B cut into I and W, and every overlapped pair into F, I and W.

    Never later than the schedule itself and with the same peaks: each part starts no later than in the whole, I gives
    its gradient away before its W, and what is freed is freed at the end of the whole.
    """
    m, N = schedule.num_microbatches, schedule.num_stages * schedule.num_microbatches
    rows: Rows = []
    for row in schedule.rows():
        codes: list[int] = []
        for action in row:
            for part in action.parts:
                assert part.microbatch is not None
                cell = part.stage * m + part.microbatch
                codes += [2 * N + cell, 3 * N + cell] if part.kind is Kind.B else [part.kind * N + cell]
        rows.append(codes)
    return rows


def whole_rows(problem: Problem, schedule: Schedule) -> tuple[Codes, Rows]:
    """The codes of a schedule as it is, with tables that have three more codes for each pair of a forward and a
    backward: one that waits for the forward's input, one that waits for the gradient and takes the time of both, one
    that hands on the forward's output."""
    plain, N, m = problem.codes, problem.codes.num_cells, schedule.num_microbatches
    names = ("rank", "stage", "microbatch", "duration_s", "send_s", "need", "out", "lane", "change")
    columns: dict[str, list] = {name: list(getattr(plain, name)) for name in names}

    def add(code: int, **fields: float) -> int:
        for name, column in columns.items():
            column.append(fields.get(name, column[code]))
        return len(columns["need"]) - 1

    def of_pair(pair: Action) -> list[int]:
        forward, backward = (part.kind * N + part.stage * m + (part.microbatch or 0) for part in pair.parts)
        both_s = plain.duration_s[forward] + plain.duration_s[backward]
        return [
            add(forward, duration_s=0, out=-1),
            add(backward, duration_s=both_s),
            add(forward, duration_s=0, need=plain.nothing, change=0),
        ]

    rows: Rows = []
    for row in schedule.rows():
        codes: list[int] = []
        for action in row:
            paired = action.kind is Kind.OVERLAP_F_B
            codes += of_pair(action) if paired else [action.kind * N + action.stage * m + (action.microbatch or 0)]
        rows.append(codes)
    return Codes(N, plain.num_lanes, **columns), rows


def to_schedule(problem: Problem, name: str, rows: Rows) -> Schedule:
    """The schedule of a candidate."""
    placement, N = problem.placement, problem.codes.num_cells
    codes = np.concatenate([np.array(row, dtype=np.int64) for row in rows])
    kind, cell = np.divmod(codes, N)
    stage, microbatch = np.divmod(cell, placement.num_microbatches)
    none = np.full(len(codes), -1)
    offsets = np.cumsum([0, *(len(row) for row in rows)])
    return Schedule(name, placement, ActionArray(stage, kind, microbatch, none, none), offsets)
