"""The event engine: a lowered schedule and durations in, start and end of every action out.

The order on every lane is fixed by the schedule, so no event queue is needed: each action starts at the latest end of
what it waits for (a longest path). Ranks are walked in turn, each as far as its inputs are known, forwards then
backwards over the ranks because activations flow up and gradients down. Same input, same output, to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from ...core.base.errors import ScheduleError
from ...core.schedule.action import RECEIVES, SENDS, Kind
from ...core.schedule.schedule import Schedule
from ...core.schedule.timeline import Spans, Timeline
from . import kernel
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
        """The spans by (rank, lane, start). `global_ranks` names each pipeline rank; by default the
        pipeline rank itself."""
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

    Durations are seconds, one number or one per stage (of the sending stage, the forward's stage for `overlap_s`); B
    takes `backward_input_s + backward_weight_s`, OVERLAP_F_B by default its forward plus its backward. A compute-only
    schedule is lowered first. `sends="rendezvous"` lets a send wait for its receive. Raises `ScheduleError` for a
    schedule that cannot run.
    """
    if not schedule.is_lowered and not _has_messages(schedule):
        from ...core.schedule import lower

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
    if len(pairs) and overlap is not None and not _fits_float64(overlap, len(actions)):
        duration = duration.astype(object)
    for i, s, t in zip(pairs.tolist(), actions.stage[pairs].tolist(), actions.pair_stage[pairs].tolist(), strict=True):
        duration[i] = forward[s] + backward[t] if overlap is None else overlap[s]
    run = execute(build_graph(schedule, sends=sends, recv_buffers=recv_buffers), duration)
    return run.timeline(title=schedule.name)


def execute(
    graph: Graph,
    duration_s: Sequence[float] | np.ndarray,
    *,
    lead_s: Sequence[float] | np.ndarray | None = None,
    tail_s: Sequence[float] | np.ndarray | None = None,
) -> Run:
    """Times of every action, given its duration; durations of receives are not read, they last as long as their send.

    An action may start `lead_s` before its wait 1 ends (but not before that starts) and ends no earlier than `tail_s`
    after it: a reduction whose first buckets are full runs under the last backward. For a reduction of a stage with two
    replicas both hold for the other replica's last backward (its wait 3) too. Both are read for UNSHARD, RESHARD,
    REDUCE_GRAD and STEP only.

    Any number type works (int and Fraction stay exact until the result is stored). Raises `ScheduleError` when actions
    wait for each other in a circle, naming the first stuck action of each rank.
    """
    duration = _column(duration_s)
    lead, tail = (None if column is None else _column(column) for column in (lead_s, tail_s))
    times = kernel.settle(graph, duration, lead, tail)
    return Run(graph, *times) if times else plain_run(graph, duration, lead_s=lead, tail_s=tail)


def plain_run(
    graph: Graph, duration_s: np.ndarray, *, lead_s: np.ndarray | None = None, tail_s: np.ndarray | None = None
) -> Run:
    """`execute` without compiled loops: their oracle, and the words for a circle."""
    evaluated = graph.evaluated
    size = len(graph.rank)
    can_lead = graph.can_lead[evaluated]
    leads, tails = (
        [0] * len(evaluated) if column is None else np.where(can_lead, column[evaluated], 0).tolist()
        for column in (lead_s, tail_s)
    )
    starts, ends = _settle(graph, duration_s[evaluated].tolist(), leads, tails)
    start_s, end_s = np.zeros(size), np.zeros(size + 1)
    start_s[evaluated] = np.array(starts, dtype=np.float64)
    end_s[evaluated] = np.array(ends, dtype=np.float64)
    receives = np.flatnonzero(graph.is_receive)
    sends = graph.partner[receives]
    # posted_after == -1 reads the extra last entry, which stays zero.
    posted_s = end_s[graph.posted_after[receives]]
    start_s[receives] = np.maximum(start_s[sends], posted_s)
    end_s[receives] = np.maximum(end_s[sends], posted_s)
    return Run(graph, start_s, end_s[:size])


def _column(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Seconds of every action as an array: float64 where that holds every sum of them exactly or they are
    floats, else objects."""
    if isinstance(values, np.ndarray) and values.dtype == np.float64:
        return values
    return np.asarray(values, dtype=np.float64 if _fits_float64(values, len(values)) else object)


def _fits_float64(values: Iterable[Any], count: int) -> bool:
    """Whether sums of up to `count` of these numbers come out as they would in the numbers' own arithmetic."""
    return all(isinstance(value, float) or (isinstance(value, int) and abs(value) * count < 2**53) for value in values)


def _settle(graph: Graph, durations: list[Any], leads: list[Any], tails: list[Any]) -> tuple[list[Any], list[Any]]:
    """Starts and ends of the evaluated actions."""
    waits0, waits1, waits2, waits3 = graph.evaluated_waits
    is_reduction = (graph.schedule.actions.kind[graph.evaluated] == Kind.REDUCE_GRAD).tolist()
    bounds = graph.row_bounds
    ranks = range(graph.schedule.num_ranks)
    cursor, stops = bounds[:-1], bounds[1:]
    begin: list[Any] = [_UNKNOWN] * len(durations)
    end: list[Any] = [_UNKNOWN] * len(durations)
    begin.append(0)  # read through index -1: nothing to wait for
    end.append(0)
    remaining, unknown, upward = len(durations), _UNKNOWN, True
    while remaining:
        before = remaining
        for rank in ranks if upward else reversed(ranks):
            i, stop = cursor[rank], stops[rank]
            while i < stop:
                start, fed = end[waits0[i]], end[waits1[i]]
                if (other := end[waits2[i]]) > start:
                    start = other
                if (other := end[waits3[i]]) > start and not is_reduction[i]:
                    start = other
                elif other > fed and is_reduction[i]:
                    fed = other
                if start == unknown or fed == unknown:
                    break
                if leads[i]:
                    begun = max(begin[waits1[i]], begin[waits3[i]]) if is_reduction[i] else begin[waits1[i]]
                    start = max(start, fed - leads[i], begun)
                elif fed > start:
                    start = fed
                begin[i] = start
                end[i] = max(start + durations[i], fed + tails[i])
                i += 1
            remaining -= i - cursor[rank]
            cursor[rank] = i
        if remaining == before:
            raise ScheduleError(_stuck(graph, cursor, stops))
        upward = not upward
    return begin[:-1], end[:-1]


def _stuck(graph: Graph, cursor: list[int], stops: list[int]) -> str:
    waiting = [
        f"rank {rank} at {graph.schedule.actions[int(graph.evaluated[i])]}"
        for rank, (i, stop) in enumerate(zip(cursor, stops, strict=True))
        if i < stop
    ]
    shown = ", ".join(waiting[:8]) + (", ..." if len(waiting) > 8 else "")
    return (
        f"schedule {graph.schedule.name!r} deadlocks with {graph.sends} sends: its ranks wait for each other in a "
        f"circle ({shown}). "
        "`shardproof verify` prints the circle."
    )


def per_stage(name: str, value: Durations, num_stages: int) -> list[Any]:
    """A duration for every stage. Raises `ScheduleError` for a negative one or a wrong count."""
    values: list[Any] = [value] * num_stages if isinstance(value, Real) else list(value)  # type: ignore[arg-type]
    if len(values) != num_stages:
        raise ScheduleError(
            f"{name} has {len(values)} values for {num_stages} stages. Give one number, or one per stage."
        )
    if any(not 0 <= item < _UNKNOWN for item in values):
        raise ScheduleError(f"{name} has a value that is no duration: {values}. Use finite seconds of at least 0.")
    return values


def _by_kind_and_stage(schedule: Schedule, prices: dict[Kind, list[Any]]) -> np.ndarray:
    """One duration per action from a table; object dtype where float64 would not keep exact numbers exact."""
    fits = _fits_float64((price for row in prices.values() for price in row), len(schedule))
    table = np.zeros((len(Kind), schedule.num_stages), dtype=np.float64 if fits else object)
    for kind, row in prices.items():
        table[kind] = row
    return table[schedule.actions.kind, schedule.actions.stage]


def _has_messages(schedule: Schedule) -> bool:
    return bool(np.isin(schedule.actions.kind, [int(kind) for kind in SENDS | RECEIVES]).any())
