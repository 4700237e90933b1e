"""Memory samples as step curves with an axis, thinned to what can be seen."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from ...core.schedule.timeline import Timeline
from .axis import Axis, bytes_axis

MAX_CURVES = 8
"""More ranks than this are drawn as the range over all ranks and the curve of the rank with the highest peak."""


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Bytes of one rank: `num_bytes[i]` from `times_s[i]` to `times_s[i + 1]`; one time more than values."""

    global_rank: int
    times_s: tuple[float, ...]
    num_bytes: tuple[float, ...]

    @property
    def peak_bytes(self) -> float:
        """The largest value."""
        return max(self.num_bytes)


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """Least and most bytes over all ranks, in the form of a curve."""

    times_s: tuple[float, ...]
    low_bytes: tuple[float, ...]
    high_bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MemoryPlot:
    """Curves by rank over an axis in bytes that starts at zero; `peak_rank` has the highest peak
    (ties: the lowest rank)."""

    axis: Axis
    curves: tuple[MemoryCurve, ...]
    span: MemoryRange | None
    peak_rank: int
    peak_bytes: float


def memory_plot(timeline: Timeline, columns: int) -> MemoryPlot | None:
    """The memory of every rank up to the makespan; None without samples. With more samples than two per column, a curve
    shows the maximum of each column, so that no peak is lost."""
    samples: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for sample in timeline.memory:
        samples[sample.global_rank].append((sample.time_s, sample.num_bytes))
    if not samples:
        return None
    curves = [
        _curve(rank, sorted(samples[rank], key=lambda row: row[0]), timeline.makespan_s, columns)
        for rank in sorted(samples)
    ]
    worst = max(curves, key=lambda curve: (curve.peak_bytes, -curve.global_rank))
    axis = bytes_axis(max(worst.peak_bytes, 1.0), num_ticks=4)
    if len(curves) <= MAX_CURVES:
        return MemoryPlot(axis, tuple(curves), None, worst.global_rank, worst.peak_bytes)
    return MemoryPlot(axis, (worst,), _range(curves, timeline.makespan_s, columns), worst.global_rank, worst.peak_bytes)


def _curve(global_rank: int, rows: list[tuple[float, int]], end_s: float, columns: int) -> MemoryCurve:
    times = np.array([time for time, _ in rows])
    values = np.array([value for _, value in rows], dtype=np.float64)
    if len(rows) > 2 * columns:
        edges = np.linspace(0.0, end_s, columns + 1)
        return MemoryCurve(global_rank, tuple(edges.tolist()), tuple(_column_maxima(times, values, edges).tolist()))
    return MemoryCurve(global_rank, (*times.tolist(), max(end_s, float(times[-1]))), tuple(values.tolist()))


def _column_maxima(times: np.ndarray, values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The maximum of a step function in each column: its value on entry, and all samples inside."""
    before = np.searchsorted(times, edges[:-1], side="right") - 1
    maxima = np.where(before >= 0, values[np.maximum(before, 0)], 0.0)
    column = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, len(maxima) - 1)
    np.maximum.at(maxima, column, values)
    return maxima


def _range(curves: list[MemoryCurve], end_s: float, columns: int) -> MemoryRange:
    edges = np.linspace(0.0, end_s, columns + 1)
    table = np.stack(
        [_column_maxima(np.array(curve.times_s[:-1]), np.array(curve.num_bytes), edges) for curve in curves]
    )
    return MemoryRange(tuple(edges.tolist()), tuple(table.min(axis=0).tolist()), tuple(table.max(axis=0).tolist()))
