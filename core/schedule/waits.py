"""What every span of a timeline waited for, and why ranks idled, by the actions' meaning alone: so of predictions,
measurements and other people's recordings in the same way. The engine knows the waits of its own runs without them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from .action import SENDS, Action, Kind
from .dependencies import waits
from .timeline import COMPUTE_LANE, Spans, Timeline, holds_parts

Cause = Literal["warm-up", "waiting", "message", "dp-sync", "norm", "replicas", "end"]
"""As `simulator.engine.bubbles` names them."""


@dataclass(frozen=True, eq=False)
class Waits:
    """Span i waited for the spans `sources[offsets[i]:offsets[i + 1]]`: that before it in its lane, what made its
    inputs, the message that brought them."""

    offsets: np.ndarray
    sources: np.ndarray

    def of(self, span: int) -> list[int]:
        """The spans that one waited for."""
        return self.sources[self.offsets[span] : self.offsets[span + 1]].tolist()


class Gap(NamedTuple):
    """Idle time of a rank's compute lane with one cause; `span` is what was waited for, -1 for nothing."""

    global_rank: int
    start_s: float
    end_s: float
    cause: Cause
    span: int


def waits_of(timeline: Timeline) -> Waits:
    """What each span waited for. Ranks that are replicas of each other wait among themselves; what was not recorded is
    a wait less."""
    spans = timeline.spans
    pairs = [_lane_pairs(spans)]
    actions = list(spans.actions)
    rows = _rows(spans)
    for ranks in _replicas(spans, rows, actions):
        places = [rows[rank] for rank in ranks]
        found = waits([[actions[i] for i in row] for row in places], num_stages=_num_stages(spans))
        named = [(places[rank][at], places[other][before]) for (rank, at), (other, before), _ in found]
        pairs.append(np.array(named, dtype=np.int64).reshape(-1, 2))
    both = np.unique(np.concatenate(pairs), axis=0)
    offsets = np.searchsorted(both[:, 0], np.arange(len(spans) + 1))
    return Waits(offsets.astype(np.int32), both[:, 1].astype(np.int32))


def gaps_of(timeline: Timeline, known: Waits) -> Iterator[Gap]:
    """The idle time of every rank's compute lane, rank by rank in order of time; with the busy time it is the step."""
    spans, step_s = timeline.spans, timeline.makespan_s
    last = int(spans.end_s.argmax()) if len(spans) else -1
    for rank in timeline.global_ranks:
        free_s, is_first = 0.0, True
        for i in _lane(spans, rank, COMPUTE_LANE):
            start_s = float(spans.start_s[i])
            if start_s > free_s:
                parts = list(_parts(spans, known, rank, i, free_s, start_s))
                yield from [Gap(rank, free_s, start_s, "warm-up", parts[0].span)] if is_first else parts
            free_s, is_first = max(free_s, float(spans.end_s[i])), False
        if step_s > free_s:
            yield Gap(rank, free_s, step_s, "end", last)


def _parts(spans: Spans, known: Waits, rank: int, span: int, free_s: float, start_s: float) -> Iterator[Gap]:
    """The gap before a span: until what it waited for last began, while that lasted, and what no wait explains."""
    waited = [_sent(spans, known, each) for each in known.of(span)]
    last = max(waited, key=lambda each: (spans.end_s[each], each), default=-1)
    began_s, ended_s = free_s, free_s
    if waited:
        began_s, ended_s = (min(max(float(time[last]), free_s), start_s) for time in (spans.start_s, spans.end_s))
        kind = Kind(int(spans.actions.kind[last]))
        if kind in SENDS:
            made = next((each for each in known.of(last) if spans.actions.kind[each] not in SENDS), last)
            parts: list[Gap] = [
                Gap(rank, free_s, began_s, "waiting", made),
                Gap(rank, began_s, ended_s, "message", last),
            ]
        else:
            cause: Cause = "dp-sync" if kind in (Kind.REDUCE_GRAD, Kind.UNSHARD) else "waiting"
            parts = [Gap(rank, free_s, ended_s, cause, last)]
        yield from (part for part in parts if part.end_s > part.start_s)
    if start_s > ended_s:
        is_step = spans.actions.kind[span] == Kind.STEP
        yield Gap(rank, ended_s, start_s, "norm" if is_step else "replicas", -1)


def _sent(spans: Spans, known: Waits, span: int) -> int:
    """The span, or of a receive the send that it received."""
    kinds = spans.actions.kind
    if kinds[span] not in (Kind.RECV_F, Kind.RECV_B):
        return span
    return next((each for each in known.of(span) if Kind(int(kinds[each])) in SENDS), span)


def _lane(spans: Spans, global_rank: int, lane: str) -> list[int]:
    """The spans of a rank's lane by time."""
    if lane not in spans.lanes:
        return []
    found = np.flatnonzero((spans.global_rank == global_rank) & (spans.lane == spans.lanes.index(lane)))
    return found[np.lexsort((spans.end_s[found], spans.start_s[found]))].tolist()


def _lane_pairs(spans: Spans) -> np.ndarray:
    """[pairs, 2]: a span, and that before it in its lane."""
    order = np.lexsort((spans.end_s, spans.start_s, spans.lane, spans.global_rank))
    rank, lane = spans.global_rank[order], spans.lane[order]
    same = np.flatnonzero((rank[1:] == rank[:-1]) & (lane[1:] == lane[:-1]))
    return np.stack([order[same + 1], order[same]], axis=1)


def _rows(spans: Spans) -> dict[int, list[int]]:
    """By rank its spans in the order in which they began, without lanes that show parts of others."""
    whole = np.array([not holds_parts(lane) for lane in spans.lanes], dtype=bool)
    order = np.lexsort((spans.end_s, spans.start_s, spans.global_rank))
    rows: dict[int, list[int]] = defaultdict(list)
    for i in order[whole[spans.lane[order]]].tolist():
        rows[int(spans.global_rank[i])].append(i)
    return dict(rows)


def _num_stages(spans: Spans) -> int:
    return int(max(spans.actions.stage.max(initial=0), spans.actions.pair_stage.max(initial=0))) + 1


def _replicas(spans: Spans, rows: dict[int, list[int]], actions: list[Action]) -> list[list[int]]:
    """Ranks that exchange messages, together: of each set of ranks that do the same the first, the second, ..."""
    same: dict[object, list[int]] = defaultdict(list)
    for rank, row in rows.items():
        first: dict[int, int] = {}
        for part in (part for i in row for part in actions[i].parts if part.kind is Kind.F):
            known = first.get(part.stage)
            first[part.stage] = part.microbatch or 0 if known is None else min(known, part.microbatch or 0)
        same[tuple(sorted(first.items()))].append(rank)
    most = max(map(len, same.values()), default=0)
    return [sorted(ranks[k] for ranks in same.values() if k < len(ranks)) for k in range(most)]
