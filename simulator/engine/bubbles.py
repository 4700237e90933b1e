"""Why a rank idles: every idle second of its compute lane, by what the rank waited for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.schedule.action import SENDS, Kind
from .attribution import sorts_of
from .engine import Run
from .seconds import Seconds

CAUSES = {
    "warm-up": "warm-up: before its first action, for {longest}",
    "waiting": "waiting for {of} of other ranks, longest for {longest}",
    "message": "messages under way, longest that of {longest}",
    "sending": "its own messages leaving, longest {longest}",
    "dp-sync": "DP sync: gradients or weights of other replicas, longest {longest}",
    "norm": "DP sync: the last rank's gradients, before the step",
    "replicas": "other replicas at the same action, longest {longest}",
    "sharing": "its own actions lasting longer, as ranks share cores, most {longest}",
    "end": "after its step, until the last rank ends",
}
"""Cause -> what people read. `waiting` is divided by the kind and stage of what is waited for."""


@dataclass(frozen=True)
class Idle:
    """Idle seconds of one cause: in how many gaps, and what the longest part waited for. `of` is
    kind and stage, as `4F`."""

    cause: str
    of: str
    seconds: float
    count: int
    longest: str
    longest_s: float

    def report(self) -> dict[str, Any]:
        """The JSON keys."""
        return {
            "cause": self.cause,
            "of": self.of,
            "seconds": self.seconds,
            "count": self.count,
            "longest": self.longest,
            "longest_s": self.longest_s,
        }

    def __str__(self) -> str:
        return CAUSES[self.cause].format(of=self.of, longest=self.longest)


def idle_of(run: Run, pp_rank: int, prices: Sequence[Seconds] | None = None) -> tuple[Idle, ...]:
    """The idle seconds of a pipeline rank's compute lane, longest first; together the step less
    the rank's busy seconds.

    With the prices of the graph's sorts of action also what actions last beyond their price.
    """
    parts: dict[tuple[str, str], list[tuple[float, str]]] = {}
    longer = _sharing(run, pp_rank, prices) if prices is not None else ()
    for cause, of, seconds, token in (*_parts(run, pp_rank), *longer):
        if seconds > 0:
            parts.setdefault((cause, of), []).append((seconds, token))
    found = []
    for (cause, of), gaps in parts.items():
        longest_s, longest = max(gaps, key=lambda gap: gap[0])
        found.append(Idle(cause, of, sum(seconds for seconds, _ in gaps), len(gaps), longest, longest_s))
    return tuple(sorted(found, key=lambda idle: (-idle.seconds, idle.cause, idle.of)))


def _parts(run: Run, pp_rank: int) -> Iterator[tuple[str, str, float, str]]:
    """Cause, kind and stage, seconds and token of every part of every gap."""
    graph, lane = run.graph, compute_lane(run, pp_rank)
    free_s = 0.0
    for place, i in enumerate(lane.tolist()):
        start_s = float(run.start_s[i])
        if start_s > free_s:
            found = list(_gap(run, i, free_s, start_s))
            yield from found if place else (("warm-up", "", start_s - free_s, found[0][3]),)
        free_s = float(run.end_s[i])
    step_s = float(run.end_s.max())
    yield "end", "", step_s - free_s, str(graph.schedule.actions[int(run.end_s.argmax())])


def _sharing(run: Run, pp_rank: int, prices: Sequence[Seconds]) -> Iterator[tuple[str, str, float, str]]:
    """What actions last longer than they take alone."""
    lane, sorts = compute_lane(run, pp_rank), sorts_of(run.graph)
    longer_s = (run.end_s - run.start_s)[lane] - np.array([seconds.total_s for seconds in prices])[
        sorts.of_action[lane]
    ]
    for i in np.flatnonzero(longer_s > 0).tolist():
        yield "sharing", "", float(longer_s[i]), str(run.graph.schedule.actions[int(lane[i])])


def compute_lane(run: Run, pp_rank: int) -> np.ndarray:
    """The actions of a pipeline rank's compute lane, in order."""
    lo, hi = run.graph.schedule.offsets[pp_rank : pp_rank + 2].tolist()
    return lo + np.flatnonzero(run.graph.is_compute[lo:hi])


def _gap(run: Run, i: int, free_s: float, start_s: float) -> Iterator[tuple[str, str, float, str]]:
    """The parts of the gap before action i: until what it waited for last began, while that lasted, and
    what no wait explains."""
    graph = run.graph
    waits = [wait for wait in graph.waits[:, i].tolist() if wait >= 0]
    last = max(waits, key=lambda wait: (run.end_s[wait], wait), default=-1)
    began_s, ended_s = (
        (min(max(float(t), free_s), start_s) for t in (run.start_s[last], run.end_s[last]))
        if waits
        else (free_s, free_s)
    )
    if waits:
        yield from _awaited(run, i, last, began_s - free_s, ended_s - began_s)
    kind, token = Kind(int(graph.schedule.actions.kind[i])), str(graph.schedule.actions[i])
    yield ("norm" if kind is Kind.STEP else "replicas"), "", start_s - ended_s, token


def _awaited(run: Run, i: int, last: int, before_s: float, during_s: float) -> Iterator[tuple[str, str, float, str]]:
    """The part before what action i waited for began, and the part while it lasted."""
    graph = run.graph
    actions, kind = graph.schedule.actions, Kind(int(graph.schedule.actions.kind[last]))
    if kind in SENDS and graph.rank[last] == graph.rank[i]:
        yield "sending", "", before_s + during_s, str(actions[last])
    elif kind in SENDS:
        of, token = payload_of(run, last)
        yield "waiting", of, before_s, token
        yield "message", "", during_s, token
    elif kind in (Kind.REDUCE_GRAD, Kind.UNSHARD):
        yield "dp-sync", "", before_s + during_s, str(actions[last])
    else:  # an action of this rank's own lane, which ends when the gap begins
        yield "waiting", f"{int(actions.stage[last])}{kind.name}", before_s + during_s, str(actions[last])


def payload_of(run: Run, send: int) -> tuple[str, str]:
    """What makes the payload of a message: its kind and stage, and its token, such as `4F` and `4F7`."""
    actions = run.graph.schedule.actions
    stage, microbatch, kind = int(actions.stage[send]), int(actions.microbatch[send]), Kind(int(actions.kind[send]))
    made = int(run.graph.waits[1, send])
    letter = "F" if kind is Kind.SEND_F else "B"
    if (
        made >= 0
        and actions.stage[made] == stage
        and actions.microbatch[made] == microbatch
        and actions.kind[made] == Kind.I
    ):
        letter = "I"
    return f"{stage}{letter}", f"{stage}{letter}{microbatch}"
