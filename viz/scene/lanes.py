"""Two timelines lane by lane: whether they did the same actions in the same order, how long each was busy,
and one above the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...core.schedule.timeline import COMPUTE_LANE, Timeline, holds_parts
from .panels import Panel, Role, Row, Track


@dataclass(frozen=True, slots=True)
class LaneComparison:
    """One lane of one rank in both timelines: how many actions it has, whether they are the same in the same
    order, and busy seconds."""

    global_rank: int
    lane: str
    num_actions: tuple[int, int]
    same_order: bool
    busy_s: tuple[float, float]

    def report(self) -> dict[str, Any]:
        """The JSON keys."""
        return {
            "global_rank": self.global_rank,
            "lane": self.lane,
            "num_actions": list(self.num_actions),
            "same_order": self.same_order,
            "busy_s": list(self.busy_s),
        }


def compare_lanes(first: Timeline, second: Timeline) -> tuple[LaneComparison, ...]:
    """Every lane of whole actions that the ranks of both timelines have in either, by rank, the compute lane first."""
    ranks = sorted(set(first.global_ranks) & set(second.global_ranks))
    names = {lane for lane in (*first.spans.lanes, *second.spans.lanes) if not holds_parts(lane)}
    lanes = sorted(names, key=lambda lane: (lane != COMPUTE_LANE, lane))
    found = []
    for rank in ranks:
        for lane in lanes:
            spans = [each.select(rank, lane) for each in (first, second)]
            if any(spans):
                actions = [[span.action for span in of_one] for of_one in spans]
                busy_s = [float(np.sum([span.duration_s for span in of_one])) for of_one in spans]
                counts = (len(actions[0]), len(actions[1]))
                found.append(LaneComparison(rank, lane, counts, actions[0] == actions[1], (busy_s[0], busy_s[1])))
    return tuple(found)


def order_note(lanes: Sequence[LaneComparison]) -> str:
    """In a few words whether two timelines did the same."""
    if different := [lane for lane in lanes if not lane.same_order]:
        first = different[0]
        others = f" and {len(different) - 1} other lanes" if len(different) > 1 else ""
        return f"other actions or another order on rank {first.global_rank}, lane {first.lane}{others}"
    return f"the same {sum(lane.num_actions[0] for lane in lanes)} actions in the same order on all {len(lanes)} lanes"


def side_by_side(first: Panel, second: Panel, sources: tuple[str, str]) -> list[Panel]:
    """One panel in which every lane of the first has the same lane of the second below it, and one for the
    memory of each that has some.

    Both have the same ranks in their rows, and one time axis.
    """
    rows = tuple(_interleaved(*pair, sources) for pair in zip(first.rows, second.rows, strict=True))
    heading = f"{first.heading}; {second.heading[0].lower()}{second.heading[1:]}"
    notes = tuple(dict.fromkeys((*first.notes, *second.notes)))
    merged = replace(
        first, heading=heading, makespan_s=max(first.makespan_s, second.makespan_s), rows=rows, memory=None, notes=notes
    )
    memories = [
        replace(panel, heading=f"Memory, {source}", rows=(), notes=())
        for panel, source in zip((first, second), sources, strict=True)
        if panel.memory is not None
    ]
    return [merged, *memories]


def _interleaved(first: Row, second: Row, sources: tuple[str, str]) -> Row:
    tables = [
        {track.name: replace(track, source=source) for track in row.tracks}
        for row, source in zip((first, second), sources, strict=True)
    ]
    names = dict.fromkeys(name for table in tables for name in table)
    tracks: list[Track] = [table[name] for name in names for table in tables if name in table]
    return replace(first, tracks=tuple(tracks))


def role_of(lane: str) -> Role:
    """What a lane is for.

    >>> role_of("compute"), role_of("F>1"), role_of("B<0"), role_of("dp")
    ('compute', 'send', 'receive', 'collective')
    """
    if lane == COMPUTE_LANE:
        return "compute"
    return {"F>": "send", "B>": "send", "F<": "receive", "B<": "receive"}.get(lane[:2], "collective")  # type: ignore[return-value]


def sorted_lanes(lanes: Iterable[str]) -> list[str]:
    """Compute first, then messages: forward before backward, receives before sends, by peer; collectives last."""
    return sorted(lanes, key=_lane_order)


def _lane_order(lane: str) -> tuple[int, bool, bool, int, str]:
    if lane == COMPUTE_LANE:
        return -1, False, False, 0, lane
    if role_of(lane) == "collective":
        return 1, False, False, 0, lane
    return 0, lane[0] == "B", lane[1] == ">", int(lane[2:]) if lane[2:].isdigit() else 0, lane


def chunks_of(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """The chunk of every span, and that of the backward of a pair: stages of one rank in ascending order are its chunks
    0, 1, ..."""
    spans, actions = timeline.spans, timeline.spans.actions
    chunk, pair_chunk = np.zeros(len(spans), dtype=np.int32), np.zeros(len(spans), dtype=np.int32)
    computes = spans.lane == (spans.lanes.index(COMPUTE_LANE) if COMPUTE_LANE in spans.lanes else -1)
    for rank in timeline.global_ranks:
        own = spans.global_rank == rank
        stages = np.unique(np.concatenate([actions.stage[own & computes], actions.pair_stage[own & computes]]))
        stages = stages[stages >= 0]
        chunk[own] = np.searchsorted(stages, actions.stage[own])
        pair_chunk[own] = np.maximum(np.searchsorted(stages, actions.pair_stage[own]), 0)
    return chunk, pair_chunk
