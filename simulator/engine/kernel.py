"""The compiled loops (`csrc`), where they were built: arrays in, arrays out, or None when the plain
loops have to do the work.

The extension is optional. Without it everything works, some forty times slower; with it every number is the same to the
last bit. A schedule that cannot run is left to the plain loops too, because they know the words for what is wrong.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from ...core.schedule.schedule import Schedule

_VERSION = 6
"""Version of the compiled functions' arguments that this file knows; a build of another one is as good as none."""

try:
    from . import _kernel
except ImportError:
    _kernel = None  # type: ignore[assignment]
else:
    if _kernel.VERSION != _VERSION:
        _kernel = None  # type: ignore[assignment]

IS_COMPILED = _kernel is not None
"""Whether the compiled loops were built with this installation."""

_MOST_ACTIONS = 2**31 - 1
"""Actions are numbered by int32 in the compiled loops."""


class Waits(Protocol):
    """What the loops read of a `graph.Graph`."""

    @property
    def schedule(self) -> Schedule: ...
    @property
    def rank(self) -> np.ndarray: ...
    @property
    def partner(self) -> np.ndarray: ...
    @property
    def posted_after(self) -> np.ndarray: ...
    @property
    def waits(self) -> np.ndarray: ...


class Times(Protocol):
    """What the loops read of an `engine.Run`."""

    @property
    def graph(self) -> Waits: ...
    @property
    def start_s(self) -> np.ndarray: ...
    @property
    def end_s(self) -> np.ndarray: ...


class Resolved(NamedTuple):
    """The arrays of a `Graph`."""

    rank: np.ndarray
    waits: np.ndarray
    partner: np.ndarray
    posted_after: np.ndarray


def resolve(schedule: Schedule, *, rendezvous: bool, blocking: bool, recv_buffers: int) -> Resolved | None:
    """What each action of a lowered schedule waits for; None when there is no kernel or the
    schedule lacks something."""
    size = len(schedule)
    if _kernel is None or size > _MOST_ACTIONS:
        return None
    actions, owners = schedule.actions, schedule.placement.ranks
    pairs = np.array([ranks if len(ranks) == 2 else (-1, -1) for ranks in owners], dtype=np.int32)
    offsets = np.ascontiguousarray(schedule.offsets, dtype=np.int64)
    longest_row = int(np.diff(offsets).max(initial=0))
    rank, partner, posted_after = (np.empty(size, dtype=np.int32) for _ in range(3))
    waits = np.empty((size, 4), dtype=np.int32)
    failed = _kernel.resolve(
        actions.kind,
        actions.stage,
        actions.microbatch,
        actions.pair_stage,
        actions.pair_microbatch,
        offsets,
        pairs,
        schedule.num_microbatches,
        min(recv_buffers, longest_row),
        rendezvous,
        blocking,
        rank,
        partner,
        posted_after,
        waits,
    )
    return None if failed else Resolved(rank, waits.T, partner, posted_after)


def settle(
    graph: Waits, duration_s: np.ndarray, lead_s: np.ndarray | None, tail_s: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray] | None:
    """Start and end of every action; None when there is no kernel, times are not float64, or
    actions wait in a circle."""
    size = len(graph.rank)
    columns = [column for column in (duration_s, lead_s, tail_s) if column is not None]
    if _kernel is None or size > _MOST_ACTIONS or any(column.dtype != np.float64 for column in columns):
        return None
    is_led = len(columns) > 1
    lead, tail = (_seconds(column, size) if is_led else None for column in (lead_s, tail_s))
    start_s, end_s = np.empty(size), np.empty(size + 1)
    end_s[0] = 0.0  # read through index -1: nothing to wait for
    failed = _kernel.settle(*_graph_columns(graph), _seconds(duration_s, size), lead, tail, start_s, end_s)
    return None if failed else (start_s, end_s[1:])


def settle_columns(
    graph: Waits, duration_s: np.ndarray, lead_s: np.ndarray | None, tail_s: np.ndarray | None, group: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Start and end of every action in every column of `duration_s` [actions, columns]; None as in `settle`.

    `group[kind]` neighbouring columns start and end an action of that kind together.
    """
    size, width = duration_s.shape
    if _kernel is None or size > _MOST_ACTIONS or not width:
        return None
    is_led = lead_s is not None or tail_s is not None
    lead, tail = (_seconds(column, size) if is_led else None for column in (lead_s, tail_s))
    start_s, end_s = np.empty((size, width)), np.empty((size + 1, width))
    end_s[0] = 0.0
    duration = np.ascontiguousarray(duration_s, dtype=np.float64)
    groups = np.ascontiguousarray(group, dtype=np.int32)
    failed = _kernel.settle_columns(*_graph_columns(graph), duration, lead, tail, groups, width, start_s, end_s)
    return None if failed else (start_s, end_s[1:])


def uncontended_until(run: Times, traffic: Columns, slack: float) -> float | None:
    """Seconds before which no link of a run is too full (`contention.Traffic.columns`), infinite when none ever
    is; None without kernel.

    May be too early, never too late.
    """
    if _kernel is None:
        return None
    kind, start_s, end_s = (
        run.graph.schedule.actions.kind,
        np.ascontiguousarray(run.start_s),
        np.ascontiguousarray(run.end_s),
    )
    until_s = _kernel.uncontended_until(kind, start_s, end_s, *traffic, slack)
    return until_s if until_s >= 0 else None


def settle_shared(
    alone: Times,
    duration_s: np.ndarray,
    lead_s: np.ndarray | None,
    tail_s: np.ndarray | None,
    traffic: Columns,
    *,
    slack: float,
    grid: float,
    since_s: float,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Start and end of every action where transfers share links, given the run in which none do until
    `since_s`; None as in `settle`.

    The times of the run given are overwritten.
    """
    graph = alone.graph
    size = len(graph.rank)
    if _kernel is None or 4 * size > _MOST_ACTIONS:
        return None
    is_led = lead_s is not None or tail_s is not None
    lead, tail = (_seconds(column, size) if is_led else None for column in (lead_s, tail_s))
    start_s, end_s = alone.start_s, alone.end_s
    numbers = (slack, grid, since_s)
    failed = _kernel.settle_shared(
        *_graph_columns(graph), _seconds(duration_s, size), lead, tail, *traffic, *numbers, start_s, end_s
    )
    return None if failed else (start_s, end_s)


Columns: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _graph_columns(graph: Waits) -> Columns:
    """Kind, rank, partner, posted_after, waits and offsets in the types of the kernel (which are those
    of a compiled graph)."""
    kind, offsets = graph.schedule.actions.kind, np.ascontiguousarray(graph.schedule.offsets, dtype=np.int64)
    return kind, _int32(graph.rank), _int32(graph.partner), _int32(graph.posted_after), _int32(graph.waits.T), offsets


def _int32(column: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(column, dtype=np.int32)


def _seconds(column: np.ndarray | None, size: int) -> np.ndarray:
    """A contiguous column of one number per action; None stands for zeros."""
    if column is None:
        return np.zeros(size)
    if column.shape != (size,):
        raise ValueError(f"seconds of shape {column.shape} for {size} actions. Give one number per action.")
    return np.ascontiguousarray(column)
