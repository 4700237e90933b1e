"""The critical path of a run: the chain of actions, each waiting for the one before, that makes the
step as long as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...core.schedule.action import SENDS, Kind
from .attribution import TIME_KEYS, sorts_of
from .engine import Run
from .seconds import COMPONENTS, Seconds


class Segment(NamedTuple):
    """A part of the path: an action of the graph from `start_s` to `end_s`; -1 is another replica,
    which is not simulated here."""

    action: int
    start_s: float
    end_s: float


@dataclass(frozen=True, eq=False)
class CriticalPath:
    """`segments` in order of time, without gaps, from 0 to the end of the step."""

    run: Run
    prices: Sequence[Seconds]
    segments: tuple[Segment, ...]

    @property
    def time_s(self) -> dict[str, float]:
        """Seconds of the path by the keys of `time_s` of the report; an action's part splits as its price does."""
        totals = dict.fromkeys(TIME_KEYS, 0.0)
        sorts = sorts_of(self.run.graph)
        for action, start_s, end_s in self.segments:
            if action < 0:
                totals["bubble"] += end_s - start_s
                continue
            kind = Kind(int(self.run.graph.schedule.actions.kind[action]))
            price = self.prices[int(sorts.of_action[action])]
            if kind in SENDS or kind in (Kind.REDUCE_GRAD, Kind.UNSHARD) or not price.total_s:
                totals["pp_comm" if kind in SENDS else "dp_comm"] += end_s - start_s
            else:
                share = (end_s - start_s) / price.total_s
                for name in COMPONENTS:
                    totals[name] += getattr(price, name) * share
        return totals

    def by_action(self) -> list[dict[str, Any]]:
        """Seconds and number of segments by pipeline rank, kind and stage, longest first."""
        actions, ranks = self.run.graph.schedule.actions, self.run.graph.rank
        found: dict[tuple[int, str], list[float]] = {}
        for action, start_s, end_s in self.segments:
            kind, stage = Kind(int(actions.kind[action])), int(actions.stage[action])
            name = "other replica" if action < 0 else kind.name if kind is Kind.STEP else f"{stage}{kind.name}"
            found.setdefault((-1 if action < 0 else int(ranks[action]), name), []).append(end_s - start_s)
        rows = [
            {"pp_rank": rank, "of": name, "seconds": sum(parts), "count": len(parts)}
            for (rank, name), parts in found.items()
        ]
        return sorted(rows, key=lambda row: (-float(row["seconds"]), row["pp_rank"], row["of"]))

    def report(self) -> dict[str, Any]:
        """The JSON keys."""
        return {"num_actions": len(self.segments), "time_s": self.time_s, "by_action": self.by_action()}


def critical_path(run: Run, prices: Sequence[Seconds]) -> CriticalPath:
    """The path that ends with the last action to end; of several predecessors that end at once the first."""
    sorts = sorts_of(run.graph)
    index = _evaluated(run, int(run.end_s.argmax()))
    end_s, segments = float(run.end_s[index]), []
    while index >= 0 and end_s > 0:
        start_s = float(run.start_s[index])
        before = _before(run, index, start_s)
        lasts_s = prices[int(sorts.of_action[index])].total_s
        if before >= 0 and start_s < run.end_s[before] <= end_s and end_s > start_s + lasts_s:
            start_s = float(run.end_s[before])  # it began during that, but it is what follows that which ends last
        if end_s > start_s:
            segments.append(Segment(index, start_s, end_s))
        index, end_s = before, start_s
    if end_s > 0:
        segments.append(Segment(-1, 0.0, end_s))
    return CriticalPath(run, prices, tuple(reversed(segments)))


def _before(run: Run, index: int, start_s: float) -> int:
    """The action that an action waited for until it started: one that ended then, or during which it
    started early; -1 for none."""
    graph = run.graph
    waits = [wait for wait in graph.waits[:, index].tolist() if wait >= 0]
    for wait in waits:
        if run.end_s[wait] == start_s:
            return wait
    if graph.schedule.actions.kind[index] == Kind.STEP:  # all ranks step together: some rank's last action ended then
        ended = np.flatnonzero((run.end_s == start_s) & (graph.schedule.actions.kind != Kind.STEP))
        return _evaluated(run, int(ended[0])) if len(ended) else -1
    overlapping = [wait for wait in waits if run.start_s[wait] <= start_s < run.end_s[wait]]
    return max(overlapping, key=lambda wait: run.end_s[wait], default=-1)


def _evaluated(run: Run, index: int) -> int:
    """The action itself, or of a receive its send."""
    return int(run.graph.partner[index]) if run.graph.is_receive[index] else index
