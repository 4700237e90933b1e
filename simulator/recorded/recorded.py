"""What actions took in a recorded step, to be run in the place of prices.

The duration of an action is what passed between the end of the last thing it waits for and its own end: what threads
and hosts lose before an action belongs to that action. So the engine, given the durations of one step, returns that
very step. Ranks that work on the same action together (tensor and context parallelism) count as one, which is ready
when its last member is and ends with it; so do the replicas in what they do together (`columns.couplings_of`). No
rank's STEP begins before all can, because it takes the loss and the norm of all. A thread may note the end of an action
late, when what waits for it has gone on; an action ends no later than the first of those.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import numpy as np

from ...core.base.errors import TimelineError
from ...core.plan.plan import Plan
from ...core.schedule import lower
from ...core.schedule.action import COMPUTE, RECEIVES, SENDS, Action, Kind
from ...core.schedule.placement import Placement
from ...core.schedule.schedule import Schedule
from ...core.schedule.timeline import COMPUTE_LANE, Timeline
from ..cost.pricing import Pricing
from ..engine.graph import Graph, build_graph
from ..stack.profiles import profile_of
from ..variation.columns import couplings_of


class Place(NamedTuple):
    """A data-parallel and a pipeline rank, whose tensor- and context-parallel ranks count as one."""

    dp_rank: int
    pp_rank: int


class Turn(NamedTuple):
    """An action of a rank's list, the `number`-th of those that read the same (UNSHARD of a stage
    comes several times)."""

    action: Action
    number: int


Durations = Mapping[Place, Mapping[Turn, float]]
"""Seconds of every action of a step."""


def recorded_durations_s(plan: Plan, graph: Graph, timeline: Timeline, pricing: Pricing) -> np.ndarray:
    """[actions of `graph`, data-parallel ranks] seconds of a plan's actions in a recorded step.

    An action that was not recorded takes the mean of its kind and stage on its rank, else on any rank; a backward what
    its halves took, halves their part of a whole one by `pricing`, a pair its forward and its backward; a microbatch
    that a replica does not have, where dp does not divide them, takes nothing there. Raises `TimelineError` for a step
    over other ranks or stages than the plan's, and for an action that is like no recorded one.
    """
    known = _Known(plan, _durations_s(plan, graph, timeline), pricing)
    found = np.zeros((len(graph.rank), plan.layout.dp))
    rows = [_turns(row) for row in graph.schedule.rows()]
    for i, turn in enumerate(turn for row in rows for turn in row):
        for dp_rank in range(plan.layout.dp) if turn.action.kind not in RECEIVES else ():
            if (turn.action.microbatch or 0) < plan.microbatches_of(dp_rank):
                found[i, dp_rank] = known.seconds(turn, Place(dp_rank, int(graph.rank[i])))
    return found


def _durations_s(plan: Plan, graph: Graph, timeline: Timeline) -> Durations:
    """The durations of the actions that were recorded."""
    rows, walk = _recorded(plan, timeline), _Walk(plan)
    for dp_rank in range(plan.layout.dp):
        pipeline = [rows[dp_rank, pp_rank] for pp_rank in range(plan.layout.pp)]
        walk.add(_graph_of(plan, graph, pipeline), [row.end_s for row in pipeline], dp_rank)
    return walk.durations_s()


@dataclass(frozen=True)
class _Row:
    """What one place did: its compute lane in order, and when each action ended on its last member."""

    compute: tuple[Action, ...]
    end_s: Mapping[Turn, float]


def _recorded(plan: Plan, timeline: Timeline) -> dict[tuple[int, int], _Row]:
    """The recorded rows by data-parallel and pipeline rank."""
    expected = tuple(range(plan.layout.world_size))
    if timeline.global_ranks != expected:
        raise TimelineError(
            f"the recorded step has {len(timeline.global_ranks)} ranks, the plan tp*cp*dp*pp = {len(expected)} of "
            "them. "
            "Record a step of this layout: `shardproof train PLAN -o run.timeline.json`."
        )
    if (found := int(timeline.spans.actions.stage.max()) + 1) != (stages := plan.placement.num_stages):
        raise TimelineError(
            f"the recorded step has {found} stages, the plan {stages}. Record a step with the same pp and vpp."
        )
    spans: dict[int, list[tuple[float, float, Action, bool]]] = defaultdict(list)
    for span in timeline.spans:
        computes = span.action.kind in COMPUTE or span.action.kind is Kind.STEP
        if span.lane == COMPUTE_LANE or not computes:
            spans[span.global_rank].append((span.start_s, span.end_s, span.action, computes))
    rows: dict[tuple[int, int], _Row] = {}
    for global_rank, found_here in spans.items():
        found_here.sort(key=lambda span: span[:2])
        at = plan.layout.coordinates(global_rank)
        ends = dict(zip(_turns(span[2] for span in found_here), (span[1] for span in found_here), strict=True))
        other = rows.get(place := (at["dp"], at["pp"]))
        if other is not None:
            ends = {turn: max(end_s, other.end_s.get(turn, end_s)) for turn, end_s in ends.items()}
        rows[place] = _Row(tuple(action for _, _, action, computes in found_here if computes), ends)
    return rows


def _turns(actions: Iterable[Action]) -> list[Turn]:
    seen: Counter[Action] = Counter()
    turns = []
    for action in actions:
        turns.append(Turn(action, seen[action]))
        seen[action] += 1
    return turns


def _graph_of(plan: Plan, graph: Graph, rows: Sequence[_Row]) -> Graph:
    """The waits of a recorded pipeline: the plan's own where it ran the plan's schedule, else those of the
    schedule that it shows."""
    computing = [
        tuple(action for action in row if action.kind in COMPUTE or action.kind is Kind.STEP)
        for row in graph.schedule.rows()
    ]
    if computing == [row.compute for row in rows]:
        return graph
    owners: dict[int, dict[int, int]] = defaultdict(dict)
    lists = [[action for action in row.compute if action.kind is not Kind.STEP] for row in rows]
    for pp_rank, row in enumerate(lists):
        for part in (part for action in row for part in action.parts if part.kind is Kind.F):
            assert part.microbatch is not None
            owners[part.stage][part.microbatch] = pp_rank
    ranks = tuple(
        tuple(dict.fromkeys(of_stage[microbatch] for microbatch in sorted(of_stage)))
        for _, of_stage in sorted(owners.items())
    )
    placement = Placement("explicit", len(rows), ranks, 1 + max(max(of_stage) for of_stage in owners.values()))
    schedule = lower(Schedule.from_rows("recorded", placement, lists))
    profile = profile_of(plan)
    return build_graph(schedule, sends=profile.send_rule, recv_buffers=profile.recv_buffers)


class _Walk:
    """What all pipelines did in a step: actions, or several that are done together, with their ends and
    what they waited for."""

    def __init__(self, plan: Plan):
        couplings, order = couplings_of(plan)
        groups: dict[Kind, int] = {kind: size for kind, size in couplings.items() if kind is not Kind.STEP}
        self._group_of: dict[Kind, dict[int, int]] = {
            kind: {int(dp_rank): at // size for at, dp_rank in enumerate(order)} for kind, size in groups.items()
        }
        self._members: dict[object, list[tuple[Place, Turn]]] = defaultdict(list)
        self._end_s: dict[object, float] = {}
        self._waits: dict[object, set[object]] = defaultdict(set)

    def _ready(self, place: Place, turn: Turn) -> object:
        """The same for all that do an action together."""
        group = self._group_of.get(turn.action.kind)
        return (turn, place.pp_rank, group[place.dp_rank]) if group else (turn, place)

    def add(self, graph: Graph, recorded: Sequence[Mapping[Turn, float]], dp_rank: int) -> None:
        """A pipeline with the recorded ends of its ranks' actions; a message ends when its receiver has it."""
        turns = [turn for row in graph.schedule.rows() for turn in _turns(row)]
        places = [Place(dp_rank, pp_rank) for pp_rank in graph.rank.tolist()]
        done = [self._ready(place, turn) for place, turn in zip(places, turns, strict=True)]
        for i, (place, turn, key) in enumerate(zip(places, turns, done, strict=True)):
            if turn.action.kind in RECEIVES:
                continue
            holder = int(graph.partner[i]) if turn.action.kind in SENDS else i
            end_s = recorded[places[holder].pp_rank].get(turns[holder])
            if end_s is None:
                missing = f"{turns[holder].action} on pipeline rank {places[holder].pp_rank}"
                raise TimelineError(f"the recorded step has no {missing}, so it is no whole step. Record it again.")
            self._members[key].append((place, turn))
            self._end_s[key] = max(self._end_s.get(key, 0.0), end_s)
            self._waits[key].update(done[wait] for wait in graph.waits[:, i].tolist() if wait >= 0)

    def durations_s(self) -> Durations:
        """Seconds from when all that an action waits for had ended to its own end; STEP waits for what
        that of any rank does."""
        steps = [key for key, members in self._members.items() if members[0][1].action.kind is Kind.STEP]
        self._waits |= dict.fromkeys(steps, set().union(*(self._waits[key] for key in steps)))
        self._let_none_end_after_what_waits_for_it()
        found: dict[Place, dict[Turn, float]] = defaultdict(dict)
        for key, end_s in self._end_s.items():
            seconds = end_s - max((self._end_s[wait] for wait in self._waits[key]), default=0.0)
            for place, turn in self._members[key]:
                found[place][turn] = seconds
        return found

    def _let_none_end_after_what_waits_for_it(self) -> None:
        late = True
        while late:
            late = False
            for key in sorted(self._end_s, key=self._end_s.__getitem__, reverse=True):
                for wait in self._waits[key]:
                    if self._end_s[wait] > self._end_s[key]:
                        self._end_s[wait], late = self._end_s[key], True


class _Known:
    """Seconds of recorded actions, and of those that are like them."""

    def __init__(self, plan: Plan, step: Durations, pricing: Pricing):
        self._pricing = pricing
        self._replica_of = plan.placement.replica_of
        self._exact = step
        self._of_class: dict[object, list[float]] = defaultdict(list)
        for place, of_place in step.items():
            for turn, seconds in of_place.items():
                for like in _classes_of(turn.action.kind, turn.action.stage, place):
                    self._of_class[like].append(seconds)

    def seconds(self, turn: Turn, place: Place) -> float:
        """Seconds of an action at a place."""
        if (exact := self._exact[place].get(turn)) is not None:
            return exact
        parts = [self._of_sort(part.kind, part.stage, place) for part in turn.action.parts]
        if any(part is None for part in parts):
            raise TimelineError(
                f"the recorded step says nothing about {turn.action}. Record a step of a schedule "
                "that has such actions."
            )
        return sum(part for part in parts if part is not None)

    def _of_sort(self, kind: Kind, stage: int, place: Place) -> float | None:
        """Mean seconds of actions of a kind and stage, of what they are made of, or their part of
        what they are part of."""
        if (found := self._mean(kind, stage, place)) is not None:
            return found
        whole, first, second = (self._mean(each, stage, place) for each in (Kind.B, Kind.I, Kind.W))
        if kind is Kind.B and first is not None and second is not None:
            return first + second
        if kind in (Kind.I, Kind.W) and whole is not None:
            replica = self._replica_of(stage, place.pp_rank)
            priced = {each: self._pricing.seconds(each, stage, replica).total_s for each in (Kind.I, Kind.W)}
            return whole * priced[kind] / sum(priced.values())
        return None

    def _mean(self, kind: Kind, stage: int, place: Place) -> float | None:
        like = next((each for each in _classes_of(kind, stage, place) if each in self._of_class), None)
        return None if like is None else fmean(self._of_class[like])


def _classes_of(kind: Kind, stage: int, place: Place) -> Iterator[object]:
    """What actions have in common that take about the same time, the most similar first. All messages of
    a plan have one size."""
    yield kind, stage, place
    yield kind, stage
    if kind in SENDS:
        yield "message"
