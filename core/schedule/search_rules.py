"""List scheduling: orders made by running the pipeline once, every rank choosing by a rule whenever it is free.

This generalises the automatic schedule of Qi et al. 2023 ("Zero Bubble Pipeline Parallelism", section 3): forwards up
to a limit, then forwards and backwards, and W where there is nothing else to do or no room left. Each rule gives one
order; `rules` is the family.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from .action import Kind
from .search_problem import Problem, Rows


@dataclass(frozen=True)
class Rule:
    """How a free rank chooses.

    `prefer`: what runs when F and I are both ready: one kind, the two in turn, or whichever belongs to the older
    microbatch. `chunk`: which of a rank's stages goes first, the one nearer to or farther from the end of its
    microbatch, or what came first, or the older microbatch. A W runs when neither F nor I can, and with `patience` only
    when nothing is known to arrive within that part of its time. `pace`: microbatches enter that part of the busiest
    rank's time per microbatch apart, which keeps activations short-lived.
    """

    prefer: Literal["I", "turns", "oldest"]
    chunk: Literal["deep", "shallow", "first come", "oldest"]
    patience: float
    pace: float = 0.0


def rules(problem: Problem) -> Iterator[Rule]:
    """The family: 72 rules, 90 where ranks hold several stages. Forwards first, W right after I, and limits below the
    capacity are left out: over 200 random problems they were rarely the best."""
    several = any(len(route.stages_on(rank)) > 1 for route in problem.routes for rank in route.ranks)
    chunks: tuple[Any, ...] = ("deep", "shallow", "first come") if several else ("first come",)
    orders: list[tuple[Any, float]] = [(chunk, 0.0) for chunk in chunks]
    orders += [("oldest", pace) for pace in (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25)]
    prefers: tuple[Any, ...] = ("turns", "oldest", "I")
    yield from (
        Rule(prefer, chunk, patience, pace)
        for chunk, pace in orders
        for prefer in prefers
        for patience in (0.5, 0.0, 1.0)
    )


def dispatch(problem: Problem, rule: Rule) -> Rows:
    """The order that a rule makes. It never gets stuck: see `_Memory`."""
    return _Dispatch(problem, rule).rows()


class _Dispatch:
    """One simulated step. `forwards[rank]` and `inputs[rank]` map a stage and a route to the F and I whose input was
    sent there: (arrival, code). Where two routes meet on a stage, memory may admit one and not the other."""

    def __init__(self, problem: Problem, rule: Rule):
        codes, num_ranks = problem.codes, problem.placement.num_ranks
        self.codes, self.rule = codes, rule
        self.memory = _Memory(problem)
        self.events: list[tuple[float, int]] = []
        self.forwards: list[dict[tuple[int, int], deque[tuple[float, int]]]] = [{} for _ in range(num_ranks)]
        self.inputs: list[dict[tuple[int, int], deque[tuple[float, int]]]] = [{} for _ in range(num_ranks)]
        self.route_of = {
            microbatch: number for number, route in enumerate(problem.routes) for microbatch in route.microbatches
        }
        for number, route in enumerate(problem.routes):
            for stage, rank in enumerate(route.ranks):
                self.forwards[rank][stage, number] = deque()
                self.inputs[rank][stage, number] = deque()
            period_s = rule.pace * problem.busiest_s / len(route.microbatches)
            entries = [(period_s * place, microbatch) for place, microbatch in enumerate(route.microbatches)]
            self.forwards[route.ranks[0]][0, number].extend(entries)
            self.events.extend((entry_s, route.ranks[0]) for entry_s, _ in entries)
        heapq.heapify(self.events)
        self.weights: list[deque[int]] = [deque() for _ in range(num_ranks)]
        self.last_was_forward = [False] * num_ranks
        self.free_s = [0.0] * num_ranks
        self.lane_free_s = [0.0] * codes.num_lanes

    def rows(self) -> Rows:
        """Runs until nothing is left."""
        rows: Rows = [[] for _ in self.free_s]
        while self.events:
            now, rank = heapq.heappop(self.events)
            if self.free_s[rank] <= now:
                code = self.choose(rank, now)
                if code is not None:
                    rows[rank].append(code)
                    self.start(rank, code, now)
        return rows

    def choose(self, rank: int, now: float) -> int | None:
        """What a free rank starts, or None to wait for the next arrival."""
        weights = self.weights[rank]
        forward, blocked, forward_next_s = self.forward(rank, now)
        backward, backward_next_s = self.backward(rank, now)
        if forward and (not backward or self.forward_first(rank, forward[0], backward[0])):
            return forward.popleft()[1]
        if backward:
            return backward.popleft()[1]
        if weights:
            patience_s = self.rule.patience * self.codes.duration_s[weights[0]]
            if blocked or min(forward_next_s, backward_next_s) - now >= patience_s:
                return weights.popleft()
        return None

    def forward_first(self, rank: int, forward: tuple[float, int], backward: tuple[float, int]) -> bool:
        """Whether of two actions that could start the forward does."""
        if self.rule.prefer == "oldest":
            return self.codes.microbatch[forward[1]] < self.codes.microbatch[backward[1]]
        return self.rule.prefer == "turns" and not self.last_was_forward[rank]

    def forward(self, rank: int, now: float) -> tuple[deque[tuple[float, int]] | None, bool, float]:
        """The queue whose forward may start, whether one is kept waiting by memory, and when the next one
        that is known of arrives."""
        ready, blocked, next_s = [], False, math.inf
        for (stage, route), queue in self.forwards[rank].items():
            if queue:
                arrival_s, code = queue[0]
                if not self.memory.admits(rank, code):
                    blocked |= arrival_s <= now
                elif arrival_s <= now:
                    ready.append((self.urgency(arrival_s, -stage, code), (stage, route)))
                else:
                    next_s = min(next_s, arrival_s)
        return (self.forwards[rank][min(ready)[1]] if ready else None), blocked, next_s

    def backward(self, rank: int, now: float) -> tuple[deque[tuple[float, int]] | None, float]:
        """The same for I, which memory never holds up."""
        ready, next_s = [], math.inf
        for (stage, route), queue in self.inputs[rank].items():
            if queue:
                arrival_s, code = queue[0]
                if arrival_s <= now:
                    ready.append((self.urgency(arrival_s, stage, code), (stage, route)))
                else:
                    next_s = min(next_s, arrival_s)
        return (self.inputs[rank][min(ready)[1]] if ready else None), next_s

    def urgency(self, arrival_s: float, distance: int, code: int) -> float:
        """Smaller goes first; `distance` is how far an action is from being the last of its
        microbatch's on the rank."""
        return {"deep": distance, "shallow": -distance, "first come": arrival_s, "oldest": self.codes.microbatch[code]}[
            self.rule.chunk
        ]

    def queue_of(self, code: int) -> tuple[int, int]:
        """Where an F or I waits."""
        return self.codes.stage[code], self.route_of[self.codes.microbatch[code]]

    def start(self, rank: int, code: int, now: float) -> None:
        """Occupies the rank and sends what the action makes."""
        codes, N = self.codes, self.codes.num_cells
        end_s = now + codes.duration_s[code]
        self.free_s[rank] = end_s
        heapq.heappush(self.events, (end_s, rank))
        kind = code // N
        self.memory.take(rank, code)
        self.last_was_forward[rank] = kind == Kind.F
        if kind == Kind.I:
            self.weights[rank].append(code + N)
        if kind == Kind.W:
            return
        slot = codes.out[code]
        if slot < 0:
            if kind == Kind.F:  # the last stage: the loss gives the gradient
                self.inputs[rank][self.queue_of(code)].append((end_s, code + 2 * N))
            return
        arrival_s, lane = end_s, codes.lane[code]
        if lane >= 0:
            arrival_s = self.lane_free_s[lane] = max(end_s, self.lane_free_s[lane]) + codes.send_s[code]
        target = slot if slot < N else slot + N  # arrival slots are the cell of an F, or N plus the cell of an I
        queues = self.forwards if slot < N else self.inputs
        queues[codes.rank[target]][self.queue_of(target)].append((arrival_s, target))
        heapq.heappush(self.events, (arrival_s, codes.rank[target]))


class _Memory:
    """What every rank holds, and which forwards it may start without ever getting stuck.

    Where every rank holds one stage, room is enough: the last stage's rank can always finish what it holds, then the
    one before. Else earlier stages must leave room for later ones. Microbatches are numbered by when they entered the
    pipeline, and a forward is admitted when afterwards they could still finish one after the other in that order on
    this rank: each finds the room for its remaining stages in what is free and what those before it give back
    (Dijkstra's banker). As the order is the same on every rank, the oldest microbatch can always go on.
    """

    def __init__(self, problem: Problem):
        self.codes = problem.codes
        self.capacity = problem.capacity
        self.held = [0] * len(problem.capacity)
        several = any(len(route.stages_on(rank)) > 1 for route in problem.routes for rank in set(route.ranks))
        self.can_get_stuck = several or len(problem.routes) > 1
        self.demand = {
            (rank, microbatch): sum(problem.activation[stage] for stage in route.stages_on(rank))
            for route in problem.routes
            for rank in set(route.ranks)
            for microbatch in route.microbatches
        }
        # Per rank: microbatch -> [units held, units still to come], in order of entry, until both are 0.
        self.unfinished: list[dict[int, list[int]]] = [{} for _ in problem.capacity]
        self.route_of = {microbatch: route for route in problem.routes for microbatch in route.microbatches}

    def admits(self, rank: int, code: int) -> bool:
        """Whether the forward may start on its rank."""
        units = self.codes.change[code]
        free = self.capacity[rank] - self.held[rank] - units
        if free < 0:
            return False
        if not self.can_get_stuck:
            return True
        microbatch = self.codes.microbatch[code]
        entered = microbatch in self.unfinished[rank]
        for other, (held, missing) in self.unfinished[rank].items():
            if other == microbatch:
                held, missing = held + units, missing - units
            if missing > free:
                return False
            free += held
        return entered or self.demand[rank, microbatch] - units <= free

    def take(self, rank: int, code: int) -> None:
        """Accounts for an action that starts; what a W frees is free for the next action of its rank."""
        change, microbatch = self.codes.change[code], self.codes.microbatch[code]
        self.held[rank] += change
        if not self.can_get_stuck:
            return
        if code < self.codes.num_cells and self.codes.stage[code] == 0:
            for each in set(self.route_of[microbatch].ranks):
                self.unfinished[each][microbatch] = [0, self.demand[each, microbatch]]
        entry = self.unfinished[rank].get(microbatch)
        if entry is not None:
            entry[0] += change
            entry[1] -= max(0, change)
            if entry[0] == 0 and entry[1] == 0:
                del self.unfinished[rank][microbatch]
