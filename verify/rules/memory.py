"""The rule about activation memory, and how many microbatches a rank holds at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...core.action import Kind
from .rule import ActivationMemory, Rule, Violation
from .view import View


def held(view: View, stage_amount: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(index, amount held on its rank while it runs) of every forward, when a microbatch of stage s holds `stage_amount[s]` from the start
    of its F to the end of its B or W. Exact for in-order execution; a pair holds what its backward frees until it ends."""
    kind, stage, _, index = view.parts
    forward, frees = kind == Kind.F, np.isin(kind, (Kind.B, Kind.W))
    change = np.where(forward, stage_amount[stage], 0) - np.where(frees, stage_amount[stage], 0)
    total = np.cumsum(change)
    row_start = np.searchsorted(index, view.schedule.offsets[view.rank[index[forward]]])
    before = np.where(row_start > 0, total[row_start - 1], 0)
    return index[forward], total[forward] - before


def peak_in_flight(view: View) -> list[int]:
    """Per pipeline rank, the most (stage, microbatch) pairs whose activations are held at once."""
    index, amount = held(view, np.ones(view.schedule.num_stages, dtype=np.int64))
    peak = np.zeros(view.schedule.num_ranks, dtype=np.int64)
    np.maximum.at(peak, view.rank[index], amount)
    return peak.tolist()


def memory_over_capacity(view: View) -> Iterator[Violation]:
    """Per rank, the first forward at which its activations no longer fit."""
    if view.memory is None:
        return
    index, amount = held(view, np.array(view.memory.stage_bytes, dtype=np.int64))
    capacity = np.array(view.memory.capacity_bytes, dtype=np.int64)[view.rank[index]]
    over = amount > capacity
    ranks, first = np.unique(view.rank[index[over]], return_index=True)
    for rank, i in zip(ranks.tolist(), np.flatnonzero(over)[first].tolist(), strict=True):
        what = f"activations would take {amount[i]} bytes here, but the rank has {capacity[i]} bytes for them."
        yield Violation(int(index[i]), rank, what)


MEMORY_RULES = (
    Rule(
        "memory-over-capacity",
        "The activations a rank holds, from each forward to the end of its backward, fit its memory (checked when sizes are given).",
        "Start fewer forwards before backwards, recompute more, or use smaller microbatches.",
        "0F0,0F1,0B0,0B1\n",
        memory_over_capacity,
        ActivationMemory(stage_bytes=(8,), capacity_bytes=(15,)),
    ),
)
