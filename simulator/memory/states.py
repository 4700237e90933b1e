"""The distinct states of memory that a schedule goes through: which forward or backward runs, and what
earlier actions have left.

A row of thousands of actions has few of them: under 1F1B each rank holds one to p microbatches. They depend on the
schedule alone, so that the peak of a plan is a few products of these counts with the plan's sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from ...core.schedule.action import Kind
from ...core.schedule.schedule import Schedule

COMPUTES = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B, Kind.STEP, Kind.UNSHARD, Kind.REDUCE_GRAD)
"""Actions that can be at a peak; the others hold what is left by those before them."""

MOST_KEYS = 2**62
"""Above this many, keys of rows are numbered anew."""


@dataclass(frozen=True, eq=False)
class States:
    """State `i` of rank `r` for `offsets[r] <= i < offsets[r + 1]`; `num_stages` stands for no
    stage, and fills up `stages`.

    `action` is the first action of the schedule in that state. `forward` and `backward` are the stages that
    run, `split` the one whose input gradient, `weight` whose weight gradient runs, `reduce` whose gradients are
    reduced; `step` is true for the optimizer step. The others have one column per stage of the rank:
    microbatches `retained` and `deferred` (between input and weight gradient) by earlier actions, whether weights
    are `gathered`, and whether gradients are `summed`.
    """

    offsets: np.ndarray
    action: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    split: np.ndarray
    weight: np.ndarray
    reduce: np.ndarray
    step: np.ndarray
    stages: np.ndarray
    retained: np.ndarray
    deferred: np.ndarray
    gathered: np.ndarray
    summed: np.ndarray


class _Same:
    """A schedule as a key: equal only to itself."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule

    def __hash__(self) -> int:
        return id(self.schedule)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.schedule is self.schedule


def states_of(schedule: Schedule) -> States:
    """The states of every rank, found once per schedule."""
    return _states(_Same(schedule))


@lru_cache(maxsize=64)
def _states(same: _Same) -> States:
    schedule = same.schedule
    owned = schedule.placement.stages_of_ranks
    width = max(1, *map(len, owned))
    ranks = [
        _rank_states(schedule, lo, hi, owned[rank], width)
        for rank, (lo, hi) in enumerate(pairwise(schedule.offsets.tolist()))
    ]
    lengths = [len(columns[0]) for columns in ranks]
    parts = [np.concatenate(part) for part in zip(*ranks, strict=True)]
    return States(np.concatenate([[0], np.cumsum(lengths)]), *parts)


def _rank_states(schedule: Schedule, first: int, last: int, owned: Sequence[int], width: int) -> tuple[np.ndarray, ...]:
    actions, nowhere = schedule.actions, schedule.num_stages
    kind, stage = actions.kind[first:last], actions.stage[first:last]
    pair = np.where(kind == Kind.OVERLAP_F_B, actions.pair_stage[first:last], stage)
    forwards, backwards = np.isin(kind, (Kind.F, Kind.OVERLAP_F_B)), np.isin(kind, (Kind.B, Kind.I, Kind.OVERLAP_F_B))
    finishes = np.isin(kind, (Kind.B, Kind.W, Kind.OVERLAP_F_B))
    columns = [np.where(forwards, stage, nowhere), np.where(backwards & (kind != Kind.I), pair, nowhere)]
    columns += [np.where(kind == one, stage, nowhere) for one in (Kind.I, Kind.W, Kind.REDUCE_GRAD)]
    columns.append((kind == Kind.STEP).astype(np.int64))
    for own in owned:
        here, paired = stage == own, pair == own
        gathers = here & (kind == Kind.UNSHARD)
        columns += [
            _left_before((forwards & here).astype(np.int64) - (backwards & paired)),
            _left_before((here & (kind == Kind.I)).astype(np.int64) - (here & (kind == Kind.W))),
            _left_before(gathers.astype(np.int64) - (here & (kind == Kind.RESHARD))) + gathers,
            np.minimum(1, _left_before((finishes & paired).astype(np.int64))),
        ]
    seen = np.flatnonzero(np.isin(kind, COMPUTES))
    table = np.stack(columns, axis=1)[seen].astype(np.int64)
    distinct = np.sort(_first_of_each(table))
    table, index = table[distinct], first + seen[distinct]
    counts = np.zeros((4, len(table), width), dtype=np.int64)
    counts[:, :, : len(owned)] = (
        table[:, len(columns) - 4 * len(owned) :].reshape(len(table), len(owned), 4).transpose(2, 0, 1)
    )
    stages = np.full((len(table), width), nowhere)
    stages[:, : len(owned)] = owned
    return index, *table[:, :5].T, table[:, 5].astype(bool), stages, *counts


def _left_before(change: np.ndarray) -> np.ndarray:
    return np.cumsum(change) - change


def _first_of_each(table: np.ndarray) -> np.ndarray:
    """The index of the first of each distinct row."""
    key, size = np.zeros(len(table), dtype=np.int64), 1
    for column in table.T:
        lowest = int(column.min(initial=0))
        values = int(column.max(initial=0)) - lowest + 1
        if size * values > MOST_KEYS:  # as few numbers as there are different keys
            _, key = np.unique(key, return_inverse=True)
            size = int(key.max(initial=0)) + 1
        key, size = key * values + (column - lowest), size * values
    return np.unique(key, return_index=True)[1]
