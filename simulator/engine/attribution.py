"""Where a step goes: busy and idle seconds of a rank's compute lane by cause, summing exactly to the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...core.schedule.action import SENDS, Kind
from .engine import Run
from .graph import Graph
from .seconds import COMPONENTS, Seconds

TIME_KEYS = (
    "compute",
    "recompute",
    "tp_comm",
    "cp_comm",
    "ep_comm",
    "pp_comm",
    "dp_comm",
    "optimizer",
    "bubble",
    "other",
)
"""Keys of `time_s` in the reports."""


class Sort(NamedTuple):
    """A sort of action that has one price: kind, stage, the backward's stage of an overlapped pair
    (else -1), pipeline rank."""

    kind: Kind
    stage: int
    pair_stage: int
    pp_rank: int


@dataclass(frozen=True, eq=False)
class Sorts:
    """The sorts of action of a graph: `of_action` is an index into `sorts`; of each sort `counts` are its actions on
    the compute lane, and `pp_rank` is its pipeline rank."""

    sorts: tuple[Sort, ...]
    of_action: np.ndarray
    counts: np.ndarray
    pp_rank: np.ndarray


@lru_cache(maxsize=64)
def sorts_of(graph: Graph) -> Sorts:
    """The sorts of action of a graph."""
    schedule = graph.schedule
    actions, num_stages, num_ranks = schedule.actions, schedule.num_stages, schedule.num_ranks
    code = actions.pair_stage.astype(np.int64) + 1
    for column, size in ((actions.stage, num_stages), (actions.kind, len(Kind)), (graph.rank, num_ranks)):
        code = code * size + column
    found, of_action = np.unique(code, return_inverse=True)
    sorts = []
    for number in found.tolist():
        number, pp_rank = divmod(number, num_ranks)
        number, kind = divmod(number, len(Kind))
        pair, stage = divmod(number, num_stages)
        sorts.append(Sort(Kind(kind), stage, pair - 1, pp_rank))
    counts = np.bincount(of_action[graph.is_compute], minlength=len(found))
    return Sorts(tuple(sorts), of_action, counts, found % num_ranks)


def busy_s(graph: Graph, prices: Sequence[Seconds]) -> np.ndarray:
    """[pipeline ranks] seconds in which the compute lane is occupied."""
    sorts = sorts_of(graph)
    total_s = np.array([seconds.total_s for seconds in prices])
    return np.bincount(sorts.pp_rank, sorts.counts * total_s, minlength=graph.schedule.num_ranks)


def critical_pp_rank(run: Run) -> int:
    """The pipeline rank that finishes last; of several the lowest."""
    return int(np.maximum.reduceat(run.end_s, run.graph.schedule.offsets[:-1]).argmax())


def attribute(run: Run, pp_rank: int, prices: Sequence[Seconds]) -> dict[str, float]:
    """Seconds of the step by cause on one pipeline rank's compute lane; `prices` are those of the
    graph's sorts of action.

    An action's time splits as its price does; what it lasts beyond that, because ranks share cores, is `other`. Idle
    time before an action is `pp_comm` while the message it waits for is in flight, `dp_comm` while the reduction or
    gather it waits for runs, else `bubble`. What passes between a rank's last action and the end of the step is
    `bubble` too. All times lie on the grid of `seconds`, so the parts sum to the step exactly.
    """
    graph = run.graph
    lo, hi = graph.schedule.offsets[pp_rank : pp_rank + 2].tolist()
    lane = lo + np.flatnonzero(graph.is_compute[lo:hi])
    totals = dict.fromkeys(TIME_KEYS, 0.0)
    sorts = sorts_of(graph)
    for i in np.flatnonzero((sorts.pp_rank == pp_rank) & (sorts.counts > 0)).tolist():
        for name in COMPONENTS:
            totals[name] += getattr(prices[i], name) * int(sorts.counts[i])
    totals["other"] += float((run.end_s[lane] - run.start_s[lane]).sum()) - sum(totals.values())
    idle_from, idle_until = np.append(0.0, run.end_s[lane][:-1]), run.start_s[lane]
    idle = idle_until > idle_from
    for cause, seconds in _causes(run, lane[idle], idle_from[idle], idle_until[idle]).items():
        totals[cause] += seconds
    totals["bubble"] += float(run.end_s.max()) - float(run.end_s[lane[-1]])
    return totals


def _causes(run: Run, index: np.ndarray, idle_from: np.ndarray, idle_until: np.ndarray) -> dict[str, float]:
    """Idle seconds before the given actions, by what held each up last and was under way meanwhile."""
    graph, waits = run.graph, run.graph.waits[:, index]
    ends = np.where(waits >= 0, run.end_s[waits], -1.0)
    last = np.where(ends == ends.max(axis=0), waits, -1).max(axis=0)
    kind = graph.schedule.actions.kind[last]
    awaited = np.maximum(0.0, np.minimum(idle_until, run.end_s[last]) - np.maximum(idle_from, run.start_s[last]))
    message = np.isin(kind, [int(each) for each in SENDS])
    reduction = (kind == Kind.REDUCE_GRAD) | (kind == Kind.UNSHARD)
    found = {"pp_comm": float(awaited[message].sum()), "dp_comm": float(awaited[reduction].sum())}
    return {**found, "bubble": float((idle_until - idle_from).sum()) - found["pp_comm"] - found["dp_comm"]}
