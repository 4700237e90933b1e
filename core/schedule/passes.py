"""Passes over schedules: pure functions that add, merge or split actions and leave the order of all others alone.

`lower` strings them together. The one that adds messages has a module of its own, `messages`.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from ..base.errors import ScheduleError
from .action import RECEIVES, SENDS, ActionArray, Kind
from .messages import unit_times
from .schedule import Schedule

MAX_ACTIVE_STAGES = 3
"""Stages that torch.distributed.pipelining keeps gathered: one runs forward, one backward, one is on its way."""

_COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B)


def add_reductions(schedule: Schedule) -> Schedule:
    """REDUCE_GRAD of a stage right after the last action on its rank that adds to its weight gradients (B or W).

    So the reductions of a rank's chunks do not come together at the end of the step but one by one, each during the
    backwards of the chunks that are left, as in torch.distributed.pipelining and Megatron's interleaved schedule.
    Replicas of a stage reduce together and all ranks have to list such reductions in one order: see `_ready`.
    """
    last = _last_backwards(schedule)
    rank, stage = np.nonzero(last >= 0)
    before = last[rank, stage] + 1
    ready = before
    if any(len(owners) == 2 for owners in schedule.placement.ranks):
        ready, before = _ready(schedule, last, rank, stage)
    order = np.lexsort((stage, ready, rank))
    return _insert(schedule, before[order], stage[order], Kind.REDUCE_GRAD, pp_rank=rank[order])


def _ready(schedule: Schedule, last: np.ndarray, rank: np.ndarray, stage: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(a number that orders the reductions of `stage` on `rank`, the action each comes before)
    where stages have replicas.

    A reduction is listed where both replicas are ready, with unit costs. A list that has its messages already, whose
    order may be any, gets all of them at its end, by stage.
    """
    if np.isin(schedule.actions.kind, [int(kind) for kind in SENDS | RECEIVES]).any():
        ends = schedule.offsets[1:].copy()
        ends[schedule.pp_rank[schedule.actions.kind == Kind.STEP]] -= 1
        return np.zeros_like(stage), ends[rank]
    start, end = unit_times(schedule)
    ready = np.where(last >= 0, end[last], 0).max(axis=0)[stage]
    rows = [start[lo:hi] for lo, hi in pairwise(schedule.offsets.tolist())]
    places = [np.searchsorted(rows[each], when) for each, when in zip(rank.tolist(), ready.tolist(), strict=True)]
    return ready, schedule.offsets[rank] + np.array(places, dtype=np.int64)


def _last_backwards(schedule: Schedule) -> np.ndarray:
    """[ranks, stages] -> the last action of the rank that adds to the stage's weight gradients, -1 for none."""
    actions = schedule.actions
    index = np.flatnonzero(np.isin(actions.kind, (Kind.B, Kind.W, Kind.OVERLAP_F_B)))
    pair_stage = actions.pair_stage[index]
    stage = np.where(pair_stage >= 0, pair_stage, actions.stage[index])
    last = np.full((schedule.num_ranks, schedule.num_stages), -1)
    last[schedule.pp_rank[index], stage] = index  # of repeated cells the last assignment stays
    return last


def add_steps(schedule: Schedule) -> Schedule:
    """One STEP at the end of each rank that holds a stage, written with the lowest of its stages."""
    stages = np.full(schedule.num_ranks, -1)
    for stage in reversed(range(schedule.num_stages)):
        stages[list(schedule.placement.ranks[stage])] = stage
    ranks = np.flatnonzero(stages >= 0)
    return _insert(schedule, schedule.offsets[1:][ranks], stages[ranks], Kind.STEP, pp_rank=ranks)


def add_unshard(schedule: Schedule, max_active_stages: int = MAX_ACTIVE_STAGES) -> Schedule:
    """UNSHARD and RESHARD around the computation of each stage, for ZeRO-3 that gathers a stage's parameters at once.

    The stages that a rank computes next, at most `max_active_stages` of them, are gathered ahead; when another one
    comes within reach, the stage that is needed last is freed first. Every UNSHARD has its RESHARD. The rule is that of
    torch.distributed. pipelining (`_add_unshard_reshard`). Raises `ScheduleError` for less than one active stage, or
    one where pairs need two.

    >>> print(add_unshard(Schedule.from_csv("0F0,1F0,1B0,0B0"), 1).to_csv(), end="")
    0UNSHARD,0F0,0RESHARD,1UNSHARD,1F0,1B0,1RESHARD,0UNSHARD,0B0,0RESHARD
    """
    pairs_differ = bool(
        ((schedule.actions.pair_stage >= 0) & (schedule.actions.pair_stage != schedule.actions.stage)).any()
    )
    least = 2 if pairs_differ else 1
    if max_active_stages < least:
        why = "an overlapped pair computes on two stages" if pairs_differ else "a stage must be gathered to compute"
        raise ScheduleError(
            f"max_active_stages={max_active_stages} does not suffice for schedule {schedule.name}: {why}. Use {least}."
        )
    changes = [_gathers(schedule.row(rank), max_active_stages) for rank in range(schedule.num_ranks)]
    before = np.concatenate(
        [place + offset for (place, _, _), offset in zip(changes, schedule.offsets[:-1], strict=True)]
    )
    stage, kind = (np.concatenate([change[column] for change in changes]) for column in (1, 2))
    pp_rank = np.repeat(np.arange(schedule.num_ranks), [len(place) for place, _, _ in changes])
    return _insert(schedule, before, stage, kind, pp_rank=pp_rank)


def _gathers(row: ActionArray, max_active_stages: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(place in the row before which it goes, stage, kind) of the UNSHARDs and RESHARDs of one rank, in order."""
    compute = np.flatnonzero(np.isin(row.kind, _COMPUTE))
    stages, next_use = _next_uses(row.take(compute))
    nearest = np.sort(next_use, axis=1)[:, :max_active_stages]
    gathered = (next_use <= nearest[:, -1:]) & (next_use < next_use[-1:])
    change = np.diff(gathered, axis=0, prepend=False)
    place, column = np.nonzero(change)
    unshard = gathered[place, column]
    # At one place first what is freed, then what is gathered, the one that is used first first.
    order = np.lexsort((np.where(unshard, next_use[place, column], column), unshard, place))
    steps = np.flatnonzero(row.kind == Kind.STEP)
    row_places = np.append(compute, steps[0] if len(steps) else len(row))
    kind = np.where(unshard, Kind.UNSHARD, Kind.RESHARD)
    return row_places[place[order]], stages[column[order]], kind[order]


def _next_uses(compute: ActionArray) -> tuple[np.ndarray, np.ndarray]:
    """A rank's stages, and [compute actions + 1, stages] -> where each is used next; a forward of a pair
    counts before its backward.

    The last row, and every stage that is not used again, hold a number larger than all places.
    """
    size = len(compute)
    used = np.concatenate([compute.stage, compute.pair_stage])
    stages = np.unique(used[used >= 0])
    next_use = np.full((size + 1, len(stages)), 2 * size, dtype=np.int64)
    place = 2 * np.arange(size)
    for column, stage in enumerate(stages.tolist()):
        uses = np.where(compute.stage == stage, place, np.where(compute.pair_stage == stage, place + 1, 2 * size))
        next_use[:size, column] = np.minimum.accumulate(uses[::-1])[::-1]
    return stages, next_use


def merge_backward(schedule: Schedule) -> Schedule:
    """Every I that its W follows directly becomes one B.

    >>> print(merge_backward(Schedule.from_csv("0F0,0F1,0I0,0W0,0I1,0F2,0W1,0I2,0W2")).to_csv(), end="")
    0F0,0F1,0B0,0I1,0F2,0W1,0B2
    """
    actions, rank = schedule.actions, schedule.pp_rank
    followed = (actions.kind[:-1] == Kind.I) & (actions.kind[1:] == Kind.W) & (rank[:-1] == rank[1:])
    followed &= (actions.stage[:-1] == actions.stage[1:]) & (actions.microbatch[:-1] == actions.microbatch[1:])
    first = np.flatnonzero(followed)
    kind = actions.kind.copy()
    kind[first] = Kind.B
    index = np.delete(np.arange(len(schedule)), first + 1)
    return _taken(schedule, index, kind[index])


def split_backward(schedule: Schedule) -> Schedule:
    """Every B becomes I and, directly behind it, W. The backward of an overlapped pair stays whole.

    >>> print(split_backward(Schedule.from_csv("0F0,0B0")).to_csv(), end="")
    0F0,0I0,0W0
    """
    full = schedule.actions.kind == Kind.B
    index = np.repeat(np.arange(len(schedule)), np.where(full, 2, 1))
    kind = np.where(full, np.int8(Kind.I), schedule.actions.kind)[index]
    kind[1:][full[index[1:]] & (index[1:] == index[:-1])] = Kind.W
    return _taken(schedule, index, kind)


def _taken(schedule: Schedule, index: np.ndarray, kind: np.ndarray) -> Schedule:
    """The actions at the ascending `index`, which may repeat, with other kinds."""
    stage, _, *others = schedule.actions.take(index).columns
    offsets = np.searchsorted(index, schedule.offsets)
    return Schedule(schedule.name, schedule.placement, ActionArray(stage, kind, *others), offsets)


def _insert(
    schedule: Schedule, before: np.ndarray, stage: np.ndarray, kind: Kind | np.ndarray, *, pp_rank: np.ndarray
) -> Schedule:
    """The schedule with actions without a microbatch inserted before the given (ascending)
    indices, in rows `pp_rank`."""
    columns = [
        np.insert(column, before, value)
        for column, value in zip(schedule.actions.columns, (stage, kind, -1, -1, -1), strict=True)
    ]
    added = np.bincount(pp_rank, minlength=schedule.num_ranks)
    offsets = schedule.offsets + np.concatenate([[0], np.cumsum(added)])
    return Schedule(schedule.name, schedule.placement, ActionArray(*columns), offsets)
