"""Data-parallel replicas that differ: one pipeline each, coupled where they add gradients or gather parameters.

Equal replicas do the same at the same time, so `engine.execute` runs one for all. Where a device is slow, a
link is worse or times are drawn at random, every replica gets a column of durations, and one walk over the
graph settles all columns together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...core.base.errors import ScheduleError
from ...core.schedule.action import Kind
from . import kernel
from .engine import Run, execute
from .graph import Graph

GRADIENTS_AND_PARAMETERS = (Kind.REDUCE_GRAD, Kind.UNSHARD)
"""What data-parallel replicas do together."""


@dataclass(frozen=True, eq=False)
class ReplicaRun:
    """Start and end of every action in seconds, [actions, columns]; a column is one replica's pipeline."""

    graph: Graph
    start_s: np.ndarray
    end_s: np.ndarray

    @property
    def makespan_s(self) -> np.ndarray:
        """[columns] the end of each replica's last action."""
        return self.end_s.max(axis=0, initial=0.0)

    def run(self, column: int) -> Run:
        """One replica's times."""
        return Run(
            self.graph, np.ascontiguousarray(self.start_s[:, column]), np.ascontiguousarray(self.end_s[:, column])
        )


def all_coupled(num_columns: int) -> dict[Kind, int]:
    """Couplings of `num_columns` data-parallel replicas: all of them reduce and gather together."""
    return dict.fromkeys(GRADIENTS_AND_PARAMETERS, num_columns)


def execute_replicas(
    graph: Graph,
    duration_s: np.ndarray,
    couplings: Mapping[Kind, int],
    *,
    lead_s: np.ndarray | None = None,
    tail_s: np.ndarray | None = None,
) -> ReplicaRun:
    """Times of every action of every replica; `duration_s` is [actions, columns], `lead_s` and `tail_s` are
    [actions] as in `execute`.

    An action of a coupled kind is one collective of `couplings[kind]` neighbouring columns: it starts when the last of
    them is ready and takes as long as the longest of them asks. So columns can hold replicas of one run (REDUCE_GRAD
    coupled over all), replicas of many seeded runs side by side (coupled over the replicas of one run), or
    expert-parallel ranks (F and B coupled over their group). Raises `ScheduleError` when a group does not divide the
    columns, or when actions wait for each other in a circle.
    """
    if duration_s.ndim != 2 or len(duration_s) != len(graph.rank):
        raise ScheduleError(
            f"durations of shape {duration_s.shape} for {len(graph.rank)} actions. Give [actions, columns]."
        )
    group = np.ones(len(Kind), dtype=np.int32)
    for kind, size in couplings.items():
        if size < 1 or duration_s.shape[1] % size:
            raise ScheduleError(
                f"groups of {size} for {kind.name} do not divide {duration_s.shape[1]} columns. Use a divisor of that."
            )
        group[kind] = size
    times = kernel.settle_columns(graph, duration_s, lead_s, tail_s, group)
    return (
        ReplicaRun(graph, *times) if times else plain_replicas(graph, duration_s, group, lead_s=lead_s, tail_s=tail_s)
    )


def plain_replicas(
    graph: Graph,
    duration_s: np.ndarray,
    group: np.ndarray,
    *,
    lead_s: np.ndarray | None = None,
    tail_s: np.ndarray | None = None,
) -> ReplicaRun:
    """`execute_replicas` without compiled loops: one row of numpy work per action."""
    size, width = duration_s.shape
    kinds = graph.schedule.actions.kind.tolist()
    lead, tail = (
        np.zeros(size) if column is None else np.where(graph.can_lead, column, 0.0) for column in (lead_s, tail_s)
    )
    start_s, end_s = np.zeros((size + 1, width)), np.zeros((size + 1, width))

    def latest(row: np.ndarray, kind: int) -> np.ndarray:
        """The latest of each group, in all its columns."""
        return row if group[kind] == 1 else np.repeat(row.reshape(-1, group[kind]).max(axis=1), group[kind])

    for i in _runnable_order(graph):
        before, made, needed, gathered = end_s[graph.waits[:, i]]
        kind = kinds[i]
        is_reduction = kind == Kind.REDUCE_GRAD
        fed = np.maximum(made, gathered) if is_reduction else made
        start = np.maximum(np.maximum(before, needed), fed - lead[i])
        if not is_reduction:
            start = np.maximum(start, gathered)
        if lead[i]:
            start = np.maximum(start, start_s[graph.waits[[1, 3] if is_reduction else [1], i]].max(axis=0))
        start = latest(start, kind)
        start_s[i] = start
        end_s[i] = np.maximum(start + latest(duration_s[i], kind), latest(fed, kind) + tail[i])
    receives = np.flatnonzero(graph.is_receive)
    sends, posted_s = graph.partner[receives], end_s[graph.posted_after[receives]]
    start_s[receives] = np.maximum(start_s[sends], posted_s)
    end_s[receives] = np.maximum(end_s[sends], posted_s)
    return ReplicaRun(graph, start_s[:size], end_s[:size])


def _runnable_order(graph: Graph) -> list[int]:
    """The evaluated actions so that each comes after all its waits: by the ends of a run in which
    everything takes one second."""
    unit = execute(graph, np.ones(len(graph.rank)))
    return graph.evaluated[np.argsort(unit.end_s[graph.evaluated], kind="stable")].tolist()
