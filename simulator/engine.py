"""The event engine: a lowered schedule and durations in, start and end of every action out.

The order on every lane is fixed by the schedule, so no event queue is needed: each action starts at the latest end of what it waits
for (a longest path). Ranks are walked in turn, each as far as its inputs are known, forwards then backwards over the ranks because
activations flow up and gradients down. Same input, same output, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from ..core.action import RECEIVES, SENDS, Kind
from ..core.errors import ScheduleError
from ..core.schedule import Schedule
from ..core.timeline import Spans, Timeline
from .graph import Graph, Sends, build_graph

Durations = float | Sequence[float]
"""Seconds: one number, or one per stage."""

_UNKNOWN = float("inf")


@dataclass(frozen=True, eq=False)
class Run:
    """Start and end of every action in seconds, in the order of `graph.schedule.actions`."""

    graph: Graph
    start_s: np.ndarray
    end_s: np.ndarray

    def timeline(self, *, global_ranks: Sequence[int] | None = None, title: str = "") -> Timeline:
        """The spans by (rank, lane, start). `global_ranks` names each pipeline rank; by default the pipeline rank itself."""
        graph, order = self.graph, self.graph.lane_order
        ranks = graph.rank if global_ranks is None else np.asarray(global_ranks)[graph.rank]
        actions = graph.schedule.actions.take(order)
        spans = Spans(ranks[order], graph.lane[order], graph.lanes, actions, self.start_s[order], self.end_s[order])
        return Timeline(spans, "predicted", title=title)


def run_schedule(
    schedule: Schedule,
    forward_s: Durations = 1,
    backward_input_s: Durations = 1,
    backward_weight_s: Durations = 1,
    send_s: Durations = 0,
    overlap_s: Durations | None = None,
    *,
    reduce_s: Durations = 0,
    step_s: Durations = 0,
    sends: Sends = "buffered",
    recv_buffers: int = 2,
) -> Timeline:
    """The timeline of a schedule with given durations; `global_rank` of its spans is the pipeline rank.

    Durations are seconds, one number or one per stage (of the sending stage, the forward's stage for `overlap_s`); B takes
    `backward_input_s + backward_weight_s`, OVERLAP_F_B by default its forward plus its backward. A compute-only schedule is lowered
    first. `sends="rendezvous"` lets a send wait for its receive. Raises `ScheduleError` for a schedule that cannot run.
    """
    if not schedule.is_lowered and not _has_messages(schedule):
        from ..core.schedules import lower

        schedule = lower(schedule)
    actions, num_stages = schedule.actions, schedule.num_stages
    forward, backward_input, backward_weight, send, reduce, step = (
        per_stage(name, value, num_stages)
        for name, value in (
            ("forward_s", forward_s),
            ("backward_input_s", backward_input_s),
            ("backward_weight_s", backward_weight_s),
            ("send_s", send_s),
            ("reduce_s", reduce_s),
            ("step_s", step_s),
        )
    )
    backward = [a + b for a, b in zip(backward_input, backward_weight, strict=True)]
    prices: dict[Kind, list[Any]] = {
        Kind.F: forward,
        Kind.B: backward,
        Kind.I: backward_input,
        Kind.W: backward_weight,
        Kind.SEND_F: send,
        Kind.SEND_B: send,
        Kind.REDUCE_GRAD: reduce,
        Kind.STEP: step,
    }
    duration = _by_kind_and_stage(schedule, prices)
    pairs = np.flatnonzero(actions.kind == Kind.OVERLAP_F_B)
    overlap = None if overlap_s is None else per_stage("overlap_s", overlap_s, num_stages)
    for i, s, t in zip(pairs.tolist(), actions.stage[pairs].tolist(), actions.pair_stage[pairs].tolist(), strict=True):
        duration[i] = forward[s] + backward[t] if overlap is None else overlap[s]
    run = execute(build_graph(schedule, sends=sends, recv_buffers=recv_buffers), duration)
    return run.timeline(title=schedule.name)


def execute(graph: Graph, duration_s: Sequence[float] | np.ndarray) -> Run:
    """Times of every action, given its duration; durations of receives are not read, they last as long as their send.

    Any number type works (int and Fraction stay exact until the result is stored). Raises `ScheduleError` when actions wait for
    each other in a circle, naming the first stuck action of each rank.
    """
    evaluated = graph.evaluated
    durations = np.asarray(duration_s, dtype=object) if not isinstance(duration_s, np.ndarray) else duration_s
    ends = _settle(graph, durations[evaluated].tolist())
    size = len(graph.rank)
    end_s = np.zeros(size + 1)
    end_s[evaluated] = np.array(ends, dtype=np.float64)
    # waits == -1 reads the extra last entry, which stays zero.
    start_s = end_s[graph.waits].max(axis=0) if size else np.zeros(0)
    receives = np.flatnonzero(graph.is_receive)
    sends = graph.partner[receives]
    posted_s = end_s[graph.posted_after[receives]]
    start_s[receives] = np.maximum(start_s[sends], posted_s)
    end_s[receives] = np.maximum(end_s[sends], posted_s)
    return Run(graph, start_s, end_s[:size])


def _settle(graph: Graph, durations: list[Any]) -> list[Any]:
    """Ends of the evaluated actions."""
    waits0, waits1, waits2, waits3 = graph.evaluated_waits
    bounds = graph.row_bounds
    ranks = range(graph.schedule.num_ranks)
    cursor, stops = bounds[:-1], bounds[1:]
    end: list[Any] = [_UNKNOWN] * len(durations)
    end.append(0)  # read through index -1: nothing to wait for
    remaining, unknown, upward = len(durations), _UNKNOWN, True
    while remaining:
        before = remaining
        for rank in ranks if upward else reversed(ranks):
            i, stop = cursor[rank], stops[rank]
            while i < stop:
                start = end[waits0[i]]
                if (other := end[waits1[i]]) > start:
                    start = other
                if (other := end[waits2[i]]) > start:
                    start = other
                if (other := end[waits3[i]]) > start:
                    start = other
                if start == unknown:
                    break
                end[i] = start + durations[i]
                i += 1
            remaining -= i - cursor[rank]
            cursor[rank] = i
        if remaining == before:
            raise ScheduleError(_stuck(graph, cursor, stops))
        upward = not upward
    end.pop()
    return end


def _stuck(graph: Graph, cursor: list[int], stops: list[int]) -> str:
    waiting = [
        f"rank {rank} at {graph.schedule.actions[int(graph.evaluated[i])]}"
        for rank, (i, stop) in enumerate(zip(cursor, stops, strict=True))
        if i < stop
    ]
    shown = ", ".join(waiting[:8]) + (", ..." if len(waiting) > 8 else "")
    return (
        f"schedule {graph.schedule.name!r} deadlocks with {graph.sends} sends: its ranks wait for each other in a circle ({shown}). "
        "`shardproof verify` prints the circle."
    )


def per_stage(name: str, value: Durations, num_stages: int) -> list[Any]:
    """A duration for every stage. Raises `ScheduleError` for a negative one or a wrong count."""
    values: list[Any] = [value] * num_stages if isinstance(value, Real) else list(value)  # type: ignore[arg-type]
    if len(values) != num_stages:
        raise ScheduleError(f"{name} has {len(values)} values for {num_stages} stages. Give one number, or one per stage.")
    if any(not 0 <= item < _UNKNOWN for item in values):
        raise ScheduleError(f"{name} has a value that is no duration: {values}. Use finite seconds of at least 0.")
    return values


def _by_kind_and_stage(schedule: Schedule, prices: dict[Kind, list[Any]]) -> np.ndarray:
    """One duration per action from a table; object dtype where a price is not a float, so that exact numbers stay exact."""
    exact = any(not isinstance(price, float) for row in prices.values() for price in row)
    table = np.zeros((len(Kind), schedule.num_stages), dtype=object if exact else np.float64)
    for kind, row in prices.items():
        table[kind] = row
    return table[schedule.actions.kind, schedule.actions.stage]


def _has_messages(schedule: Schedule) -> bool:
    return bool(np.isin(schedule.actions.kind, [int(kind) for kind in SENDS | RECEIVES]).any())
