"""What each action of a schedule waits for, as a graph to ask questions of: for notebooks, pictures and messages about
circles. The engine (`simulator.engine.graph`) resolves the same waits into arrays, which is fast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from .action import COMPUTE, Action, Kind
from .placement import Placement

if TYPE_CHECKING:
    import networkx

Place = tuple[int, int]
"""Pipeline rank, and place in its list."""

Why = Literal["list", "input", "message", "forward", "weights", "gradients"]
"""Why an action waits: another is before it in the list of its lane; it makes its input; its message brings it; the
backward follows its own forward, and weight gradients their input gradients; UNSHARD brings its weights; its gradients
are complete, or reduced."""

_DATA_PARALLEL = {Kind.REDUCE_GRAD, Kind.UNSHARD, Kind.RESHARD}
_PEERS = {Kind.SEND_F: (Kind.RECV_F, 1), Kind.SEND_B: (Kind.RECV_B, -1)}


def dependency_graph(rows: Sequence[Sequence[Action]], placement: Placement) -> networkx.DiGraph:
    """Nodes are places, with their `action`, `kind`, `stage`, `microbatch` and `lane`; an edge goes from what has to
    end to what waits for it and knows `why`. Sends end by themselves.

    What a schedule lacks (messages before it is lowered, an input that nobody makes) is an edge less, never an error.
    """
    import networkx

    found = _Places(rows, placement.num_stages)
    graph: networkx.DiGraph = networkx.DiGraph()
    for place, action in found.all():
        number = -1 if action.microbatch is None else action.microbatch
        lane = found.lane(place, action)
        graph.add_node(
            place, action=str(action), kind=action.kind.name, stage=action.stage, microbatch=number, lane=lane
        )
    for place, source, why in found.all_waits():
        if not graph.has_edge(source, place):
            graph.add_edge(source, place, why=why)
    for rank, row in enumerate(rows):
        lanes: dict[str, list[Place]] = {}
        for at in range(len(row)):
            lanes.setdefault(graph.nodes[rank, at]["lane"], []).append((rank, at))
        steps = (step for lane in lanes.values() for step in pairwise(lane))
        graph.add_edges_from((step for step in steps if not graph.has_edge(*step)), why="list")
    for place, action in found.all():  # the reductions of a stage's replicas are one collective
        if action.kind is Kind.REDUCE_GRAD:
            for other in found.reductions(action.stage):
                graph.add_edges_from(((source, place) for source in [*graph.predecessors(other)]), why="gradients")
    return graph


def waits(rows: Sequence[Sequence[Action]], num_stages: int) -> Iterator[tuple[Place, Place, Why]]:
    """What waits, for what, and why, of every action of the ranks' lists; but for their order within their lanes."""
    return _Places(rows, num_stages).all_waits()


def circle_of(graph: networkx.DiGraph) -> list[Place]:
    """The places of a circle, each waiting for the one before it; () where there is none."""
    import networkx

    try:
        return [tail for tail, _ in networkx.find_cycle(graph)]
    except networkx.NetworkXNoCycle:
        return []


class _Places:
    """Where actions lie."""

    def __init__(self, rows: Sequence[Sequence[Action]], num_stages: int):
        self.rows, self._num_stages = rows, num_stages
        self.at: dict[tuple[Kind, int, int | None], Place] = {}
        self._reductions: dict[int, list[Place]] = {}
        for place, action in self.all():
            for part in action.parts:
                kind = Kind.B if part.kind is Kind.I else part.kind
                self.at.setdefault((kind, part.stage, part.microbatch), place)
            if action.kind is Kind.REDUCE_GRAD:
                self._reductions.setdefault(action.stage, []).append(place)

    def all(self) -> Iterator[tuple[Place, Action]]:
        """Every action."""
        for rank, row in enumerate(self.rows):
            for at, action in enumerate(row):
                yield (rank, at), action

    def reductions(self, stage: int) -> list[Place]:
        """Those of all replicas of a stage."""
        return self._reductions[stage]

    def lane(self, place: Place, action: Action) -> str:
        """`compute`, `dp`, or messages by kind and peer."""
        if action.kind in COMPUTE or action.kind is Kind.STEP:
            return "compute"
        if action.kind in _DATA_PARALLEL:
            return "dp"
        other = self.partner(action)
        return f"{action.kind.name} {'?' if other is None else other[0]}"

    def partner(self, action: Action) -> Place | None:
        """The receive of a send, the send of a receive."""
        for send, (receive, step) in _PEERS.items():
            if action.kind is send:
                return self.at.get((receive, action.stage + step, action.microbatch))
            if action.kind is receive:
                return self.at.get((send, action.stage - step, action.microbatch))
        return None

    def all_waits(self) -> Iterator[tuple[Place, Place, Why]]:
        """What waits, for what besides its lane, and why."""
        for rank, row in enumerate(self.rows):
            before: Before = {}
            for at, action in enumerate(row):
                yield from (((rank, at), source, why) for source, why in self._waits((rank, at), action, before))
                before |= _as_before((rank, at), action)

    def _waits(self, place: Place, action: Action, before: Before) -> Iterator[tuple[Place, Why]]:
        """What an action waits for besides its lane, `before` it on its rank and elsewhere."""
        for part in action.parts:
            yield from self._inputs(place, part, alone=len(action.parts) == 1)
            if part.kind in COMPUTE:
                yield from _found(before.get(("weights", part.stage)), "weights")
        match action.kind:
            case Kind.RECV_F | Kind.RECV_B:
                yield from _found(self.partner(action), "message")
            case Kind.REDUCE_GRAD | Kind.RESHARD:
                yield from _found(before.get(("compute", action.stage)), "gradients")
            case Kind.UNSHARD:
                yield from _found(before.get(("compute", None)), "list")
            case Kind.STEP:
                yield from _found(before.get(("dp", None)), "gradients")

    def _inputs(self, place: Place, part: Action, *, alone: bool) -> Iterator[tuple[Place, Why]]:
        stage, microbatch = part.stage, part.microbatch
        match part.kind:
            case Kind.F if stage > 0:
                yield from self._input(place, (Kind.RECV_F, stage, microbatch), (Kind.F, stage - 1, microbatch))
            case Kind.B | Kind.I:
                if stage < self._num_stages - 1:
                    yield from self._input(place, (Kind.RECV_B, stage, microbatch), (Kind.B, stage + 1, microbatch))
                if alone:  # that of an overlapped pair is long done: its lane says so
                    yield from _found(self.at.get((Kind.F, stage, microbatch)), "forward")
            case Kind.W:
                yield from _found(self.at.get((Kind.B, stage, microbatch)), "forward")
            case Kind.SEND_F | Kind.SEND_B:
                kind = Kind.F if part.kind is Kind.SEND_F else Kind.B
                yield from _found(self.at.get((kind, stage, microbatch)), "input")

    def _input(
        self, place: Place, received: tuple[Kind, int, int | None], made: tuple[Kind, int, int | None]
    ) -> Iterator[tuple[Place, Why]]:
        """The message that brings an input, or what makes it on this rank."""
        if received in self.at:
            yield self.at[received], "message"
        elif made in self.at and self.at[made][0] == place[0]:
            yield self.at[made], "input"


Before = dict[tuple[Literal["compute", "weights", "dp"], int | None], Place]
"""The last action before a place in its list: one that computes (with a stage, of any), that brings the weights of a
stage, that moves weights or gradients."""


def _as_before(place: Place, action: Action) -> Before:
    """What an action is to those after it."""
    if action.kind in COMPUTE or action.kind is Kind.STEP:
        return {("compute", None): place, **{("compute", part.stage): place for part in action.parts}}
    if action.kind not in _DATA_PARALLEL:
        return {}
    weights: Before = {("weights", action.stage): place} if action.kind is Kind.UNSHARD else {}
    return {("dp", None): place, **weights}


def _found(place: Place | None, why: Why) -> Iterator[tuple[Place, Why]]:
    if place is not None:
        yield place, why
