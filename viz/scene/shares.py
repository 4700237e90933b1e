"""How much of each bucket of time is taken by what: exact sums over spans, without looking at one span at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

LEVELS = 16
"""Shares are drawn in sixteenths of a track: finer steps are not seen in a row of ten pixels, and equal
neighbours become one box."""


@dataclass(frozen=True)
class Column:
    """The share (0 to 1) of every bucket that one kind and chunk takes."""

    kind: int
    chunk: int
    shares: np.ndarray


def bucket_shares(start_s: np.ndarray, end_s: np.ndarray, weight: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The weighted part of each bucket that is covered by the spans, which may overlap each
    other; one number per bucket.

    Covered seconds up to t are sum of w (t - start) over starts before t less the same over ends: two
    searches and prefix sums.
    """
    covered = _ramp(start_s, weight, edges) - _ramp(end_s, weight, edges)
    return np.clip(np.diff(covered) / np.diff(edges), 0.0, 1.0)


def _ramp(knots: np.ndarray, weight: np.ndarray, at: np.ndarray) -> np.ndarray:
    order = np.argsort(knots, kind="stable")
    weights = np.concatenate([[0.0], np.cumsum(weight[order])])
    moments = np.concatenate([[0.0], np.cumsum(weight[order] * knots[order])])
    count = np.searchsorted(knots[order], at)
    return weights[count] * at - moments[count]


def stack(columns: Sequence[Column], edges: np.ndarray) -> Iterator[tuple[float, float, int, int, float, float]]:
    """Boxes `(start_s, end_s, kind, chunk, low, high)` that pile the columns up, rounded to `LEVELS`; equal
    neighbours are one box."""
    if not columns:
        return
    tops = np.round(np.cumsum([column.shares for column in columns], axis=0) * LEVELS).astype(int)
    bottoms = np.vstack([np.zeros_like(tops[:1]), tops[:-1]])
    for column, low, high in zip(columns, bottoms, tops, strict=True):
        changes = np.flatnonzero((np.diff(low) != 0) | (np.diff(high) != 0)) + 1
        starts = np.concatenate([[0], changes])
        ends = np.concatenate([changes, [len(low)]])
        for first, last in zip(starts.tolist(), ends.tolist(), strict=True):
            if high[first] > low[first]:
                yield (
                    float(edges[first]),
                    float(edges[last]),
                    column.kind,
                    column.chunk,
                    low[first] / LEVELS,
                    high[first] / LEVELS,
                )
