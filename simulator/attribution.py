"""Where a step goes: busy and idle seconds of a rank's compute lane by cause, summing exactly to the step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..core.action import SENDS, Kind
from ..core.schedule import Schedule
from .engine import Run
from .pricing import COMPONENTS, Seconds

TIME_KEYS = ("compute", "recompute", "tp_comm", "cp_comm", "ep_comm", "pp_comm", "dp_comm", "optimizer", "bubble", "other")
"""Keys of `time_s` in the reports. `cp_comm` and `ep_comm` are zero for the layouts that plans allow so far."""


def busy_s(run: Run) -> np.ndarray:
    """[pipeline ranks] seconds in which the compute lane is occupied."""
    mask = run.graph.is_compute
    return np.bincount(run.graph.rank[mask], weights=(run.end_s - run.start_s)[mask], minlength=run.graph.schedule.num_ranks)


def critical_pp_rank(run: Run) -> int:
    """The pipeline rank that finishes last; of several the lowest."""
    ends = np.zeros(run.graph.schedule.num_ranks)
    np.maximum.at(ends, run.graph.rank, run.end_s)
    return int(ends.argmax())


def attribute(run: Run, pp_rank: int, price: Callable[[Kind, int, int], Seconds]) -> dict[str, float]:
    """Seconds of the step by cause on one pipeline rank's compute lane; `price(kind, stage, replica)` is that of an action.

    An action's time splits as its price does. Idle time before an action is `pp_comm` while the message it waits for is in flight,
    `dp_comm` while the reduction or gather it waits for runs, else `bubble`. What passes between a rank's last action and the end of
    the step is `bubble` too. All times lie on the grid of `pricing`, so the parts sum to the step exactly.
    """
    graph = run.graph
    lo, hi = graph.schedule.offsets[pp_rank : pp_rank + 2].tolist()
    lane = lo + np.flatnonzero(graph.is_compute[lo:hi])
    totals = dict.fromkeys(TIME_KEYS, 0.0)
    for (kind, stage), count in _counts(graph.schedule, lane).items():
        seconds = price(kind, stage, graph.schedule.placement.replica_of(stage, pp_rank))
        for name in COMPONENTS:
            totals[name] += getattr(seconds, name) * count
    ends = np.r_[0.0, run.end_s[lane][:-1]]
    for i, idle_from in zip(lane.tolist(), ends.tolist(), strict=True):
        idle_until = float(run.start_s[i])
        if idle_until > idle_from:
            cause, awaited_s = _awaited(run, i, idle_from, idle_until)
            totals[cause] += awaited_s
            totals["bubble"] += idle_until - idle_from - awaited_s
    totals["bubble"] += float(run.end_s.max()) - float(run.end_s[lane[-1]])
    return totals


def _counts(schedule: Schedule, index: np.ndarray) -> dict[tuple[Kind, int], int]:
    """(kind, stage) -> how often among the given actions; an overlapped pair counts as its forward and its backward."""
    actions = schedule.actions.take(index)
    pair = actions.kind == Kind.OVERLAP_F_B
    kinds = np.concatenate([np.where(pair, Kind.F, actions.kind), np.full(int(pair.sum()), Kind.B)])
    stages = np.concatenate([actions.stage, actions.pair_stage[pair]])
    pairs, counts = np.unique(np.column_stack([kinds, stages]), axis=0, return_counts=True)
    return {(Kind(kind), stage): count for (kind, stage), count in zip(pairs.tolist(), counts.tolist(), strict=True)}


def _awaited(run: Run, index: int, idle_from: float, idle_until: float) -> tuple[str, float]:
    """What held an action up last, and for how much of the idle interval it was under way."""
    graph = run.graph
    waits = [int(i) for i in graph.waits[:, index] if i >= 0]
    last = max(waits, key=lambda i: (float(run.end_s[i]), i))
    kind = Kind(int(graph.schedule.actions.kind[last]))
    if kind in SENDS:
        cause = "pp_comm"
    elif kind in (Kind.REDUCE_GRAD, Kind.UNSHARD):
        cause = "dp_comm"
    else:
        return "bubble", 0.0
    return cause, max(0.0, min(idle_until, float(run.end_s[last])) - max(idle_from, float(run.start_s[last])))
