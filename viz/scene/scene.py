"""A timeline as a picture without pixels: rows, tracks, boxes, axes, memory curves and a legend, in seconds and bytes.

All renderers draw the same `Scene`. What can be seen depends on the resolution, so the scene gets how many
columns (pixels or characters) the time axis has: where actions would be thinner than a few of them, a track shows
*shares* instead: each bucket of time is filled from below with the part of it that each kind of action takes, and
what stays empty is idle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from ...core.base.errors import TimelineError
from ...core.schedule.action import COMPUTE, Kind
from ...core.schedule.timeline import COMPUTE_LANE, Spans, Timeline
from .axis import Axis, TimeUnit, format_time, time_axis
from .lanes import chunks_of, compare_lanes, order_note, role_of, side_by_side, sorted_lanes
from .memory import memory_plot
from .palette import NAMES
from .panels import Box, LegendEntry, Panel, Role, Row, Scene, Track
from .shares import Column, bucket_shares, stack

Scale = Literal["auto", "time", "own"]
"""How two timelines share the paper: one time scale, each on its own, or whichever reads better."""

OWN_SCALE_FROM = 3.0
"""With `auto`, makespans that differ by more than this factor are drawn each on its own scale: on one scale the shorter
one would have less than a third of the width, and its shape, which is what one compares then, would be lost."""


By = Literal["lane", "timeline"]
"""How a prediction and a measurement of the same actions are put together: every lane of one above the same
lane of the other, where actions can be seen and both have one time scale, or all of one above all of the other,
as all other pairs are."""

MOST_ROWS_BY_LANE = 16
"""More rows are drawn one timeline above the other."""


@dataclass(frozen=True, slots=True)
class Resolution:
    """What the paper can show.

    `columns`: pixels or characters of the time axis; with fewer than `min_columns` of them per median compute action a
    panel shows shares. Their buckets are at least `bucket_columns` and `bucket_actions` median actions long: enough
    actions show the mix of a steady state and not each other's edges. More than `max_rows` ranks share rows. With more
    rows than the other limits receives, which mirror sends, and then sends are left out.
    """

    columns: int
    min_columns: float = 3.0
    bucket_columns: int = 2
    bucket_actions: int = 12
    max_rows: int = 64
    max_rows_with_receives: int = 8
    max_rows_with_sends: int = 16
    num_ticks: int = 8

    def hidden_roles(self, num_rows: int, is_dense: bool) -> tuple[Role, ...]:
        """The lanes that are left out."""
        limits: dict[Role, int] = {"receive": self.max_rows_with_receives, "send": self.max_rows_with_sends}
        return tuple(role for role, limit in limits.items() if is_dense or num_rows > limit)


def build_scene(
    timeline: Timeline,
    resolution: Resolution,
    *,
    compare: Timeline | None = None,
    memory: bool = True,
    scale: Scale = "auto",
    by: By = "lane",
    time_unit: TimeUnit = "s",
) -> Scene:
    """The scene of one timeline, or of two, which share the paper as `scale` and `by` say. Raises `TimelineError` when
    there is nothing to draw."""
    given = [timeline] if compare is None else [timeline, compare]
    shown = _same_ranks(given)
    for each in shown:
        if each.makespan_s <= 0:
            raise TimelineError(f"a {each.source} timeline without any span of positive length cannot be drawn.")
    lengths_s = [each.makespan_s for each in shown]
    own = len(shown) > 1 and (scale == "own" or (scale == "auto" and max(lengths_s) > OWN_SCALE_FROM * min(lengths_s)))
    panels = []
    for whole, each in zip(given, shown, strict=True):
        axis = time_axis(each.makespan_s if own else max(lengths_s), time_unit, resolution.num_ticks)
        panel = _panel(each, axis, resolution, time_unit, memory)
        remarks = []
        if len(whole.global_ranks) > len(each.global_ranks):
            remarks.append(f"{len(each.global_ranks)} of {len(whole.global_ranks)} ranks shown")
        if own:
            remarks.append("own time scale")
        if each is not shown[0]:
            other = shown[0].source if shown[0].source != each.source else "the first"
            panel = replace(panel, heading=f"{panel.heading}, {each.makespan_s / lengths_s[0]:.3g} x {other}")
        panels.append(replace(panel, notes=(*remarks, *panel.notes)))
    if len(shown) > 1 and {each.source for each in shown} == {"predicted", "measured"}:
        lanes = compare_lanes(*shown)
        panels[1] = replace(panels[1], notes=(*panels[1].notes, order_note(lanes)))
        seen = not (own or any(panel.as_shares for panel in panels)) and len(panels[0].rows) <= MOST_ROWS_BY_LANE
        if by == "lane" and seen and all(lane.same_order for lane in lanes):
            panels = side_by_side(panels[0], panels[1], sources=(shown[0].source, shown[1].source))
    num_chunks = max((box.chunk + 1 for box in _boxes(panels)), default=1)
    return Scene(_title(shown), tuple(panels), _legend(panels), num_chunks, time_unit)


def _panel(timeline: Timeline, axis: Axis, resolution: Resolution, time_unit: TimeUnit, memory: bool) -> Panel:
    """One timeline on its axis, as actions or as shares."""
    table = _Table(timeline)
    column_s = axis.end / resolution.columns
    is_dense = table.median_compute_s < resolution.min_columns * column_s
    bucket_s = max(resolution.bucket_columns * column_s, resolution.bucket_actions * table.median_compute_s)
    groups = _groups(timeline.global_ranks, resolution.max_rows)
    hidden = resolution.hidden_roles(len(groups), is_dense)
    as_shares = is_dense or len(groups) < len(timeline.global_ranks)
    notes = [f"share of each kind per {format_time(bucket_s, time_unit)}, idle time on top"] if as_shares else []
    if any(role_of(lane) in hidden for lanes in table.lanes.values() for lane in lanes):
        notes.append("messages not drawn" if "send" in hidden else "receives not drawn")
    fractions = {rank: timeline.bubble_fraction(rank) for rank in timeline.global_ranks}
    bubble_rank = max(fractions, key=lambda rank: (round(fractions[rank], 9), -rank))  # rounding errors break no tie
    is_even = len(fractions) > 1 and max(fractions.values()) - min(fractions.values()) < 1e-9
    where = "every rank" if is_even else f"rank {bubble_rank}"
    bubble = f"bubble {fractions[bubble_rank]:.1%} on {where}"
    return Panel(
        heading=f"{timeline.source.capitalize()}: {format_time(timeline.makespan_s, time_unit)}, {bubble}",
        makespan_s=timeline.makespan_s,
        bubble_fraction=fractions[bubble_rank],
        bubble_rank=bubble_rank,
        axis=axis,
        rows=tuple(_row(timeline, table, group, bucket_s if as_shares else None, hidden) for group in groups),
        memory=memory_plot(timeline, resolution.columns) if memory else None,
        as_shares=as_shares,
        notes=tuple(notes),
    )


class _Table:
    """The columns of a timeline cut into one index array per rank and lane, and the chunk of every span."""

    def __init__(self, timeline: Timeline):
        self.spans: Spans = timeline.spans
        spans = self.spans
        order = np.lexsort((spans.end_s, spans.start_s, spans.lane, spans.global_rank))
        key = spans.global_rank[order].astype(np.int64) * max(len(spans.lanes), 1) + spans.lane[order]
        cuts = np.flatnonzero(np.diff(key)) + 1
        self.lanes: dict[int, dict[str, np.ndarray]] = {}
        for part in np.split(order, cuts):
            lane = spans.lanes[spans.lane[part[0]]]
            self.lanes.setdefault(int(spans.global_rank[part[0]]), {})[lane] = part
        self.chunk, self.pair_chunk = chunks_of(timeline)
        durations = spans.end_s - spans.start_s
        on_lane = (
            spans.lane == spans.lanes.index(COMPUTE_LANE)
            if COMPUTE_LANE in spans.lanes
            else np.zeros(len(spans), dtype=bool)
        )
        compute = durations[on_lane & np.isin(spans.actions.kind, [int(kind) for kind in COMPUTE])]
        self.median_compute_s = float(np.median(compute)) if len(compute) else float(durations.max())


def _row(
    timeline: Timeline, table: _Table, group: tuple[int, ...], bucket_s: float | None, hidden: Sequence[str]
) -> Row:
    """The row of one rank, or of several; with `bucket_s` as shares of buckets of that length."""
    idle = float(np.mean([timeline.bubble_fraction(rank) for rank in group]))
    name = f"rank {group[0]}" if len(group) == 1 else f"ranks {group[0]}-{group[-1]}"
    if bucket_s is not None:
        return Row(name, group, (_share_track(table, group, timeline.makespan_s, bucket_s, idle),))
    lanes = table.lanes[group[0]]
    compute = _action_track(
        table, COMPUTE_LANE, lanes.get(COMPUTE_LANE, np.zeros(0, dtype=np.int64)), timeline.makespan_s
    )
    tracks = [replace(compute, idle_fraction=idle)]
    for lane in sorted_lanes(lanes):
        if lane != COMPUTE_LANE and role_of(lane) not in hidden:
            track = _action_track(table, lane, lanes[lane], timeline.makespan_s)
            tracks += [track] if track.boxes else []
    return Row(name, group, tuple(tracks))


def _action_track(table: _Table, lane: str, part: np.ndarray, makespan_s: float) -> Track:
    """A track with one box per span of positive length; an overlapped pair is a forward above a backward."""
    spans = table.spans
    visible = part[spans.end_s[part] > spans.start_s[part]]
    boxes: list[Box] = []
    rows = zip(
        visible.tolist(),
        spans.actions.take(visible),
        spans.start_s[visible].tolist(),
        spans.end_s[visible].tolist(),
        strict=True,
    )
    for index, action, start_s, end_s in rows:
        chunks = (int(table.chunk[index]), int(table.pair_chunk[index]))
        halves = action.parts
        for half, (each, chunk) in enumerate(zip(halves, chunks, strict=False)):
            low, high = (0.0, 1.0) if len(halves) == 1 else ((0.5, 1.0), (0.0, 0.5))[half]
            boxes.append(
                Box(start_s, end_s, each.kind, chunk, _label(each.kind, each.microbatch), str(action), low, high)
            )
    return Track(lane, role_of(lane), tuple(boxes), makespan_s)


def _share_track(table: _Table, group: Sequence[int], makespan_s: float, bucket_s: float, idle: float) -> Track:
    """A compute track with the average share of each kind and chunk over the ranks of the group."""
    edges = np.linspace(0.0, makespan_s, max(1, math.ceil(makespan_s / bucket_s)) + 1)
    found = np.concatenate([table.lanes[rank].get(COMPUTE_LANE, np.zeros(0, dtype=np.int64)) for rank in group])
    columns = share_columns(table.spans, found, table.chunk, table.pair_chunk, edges, len(group))
    boxes = [
        Box(start, end, Kind(kind), chunk, low=low, high=high)
        for start, end, kind, chunk, low, high in stack(columns, edges)
    ]
    return Track(COMPUTE_LANE, "compute", tuple(boxes), makespan_s, idle)


def share_columns(
    spans: Spans, part: np.ndarray, chunk: np.ndarray, pair_chunk: np.ndarray, edges: np.ndarray, num_ranks: int
) -> list[Column]:
    """Per (kind, chunk) the share of each bucket between `edges`, averaged over `num_ranks`; a pair counts half
    forward, half backward."""
    kinds, is_pair = spans.actions.kind[part], spans.actions.kind[part] == Kind.OVERLAP_F_B
    pairs = part[is_pair]
    index = np.concatenate([part[~is_pair], pairs, pairs])
    kind = np.concatenate([kinds[~is_pair], np.full(len(pairs), Kind.F), np.full(len(pairs), Kind.B)])
    chunks = np.concatenate([chunk[part[~is_pair]], chunk[pairs], pair_chunk[pairs]])
    weight = np.concatenate([np.ones(len(part) - len(pairs)), np.full(2 * len(pairs), 0.5)]) / num_ranks
    columns = []
    for each_kind, each_chunk in sorted(set(zip(kind.tolist(), chunks.tolist(), strict=True))):
        chosen = (kind == each_kind) & (chunks == each_chunk)
        shares = bucket_shares(spans.start_s[index[chosen]], spans.end_s[index[chosen]], weight[chosen], edges)
        columns.append(Column(each_kind, each_chunk, shares))
    return columns


def _groups(ranks: Sequence[int], max_rows: int) -> list[tuple[int, ...]]:
    """Consecutive ranks, as few per row as `max_rows` allows."""
    size = math.ceil(len(ranks) / max_rows)
    return [tuple(ranks[i : i + size]) for i in range(0, len(ranks), size)]


def _same_ranks(given: Sequence[Timeline]) -> list[Timeline]:
    """The timelines; when the ranks of one are among those of the other, the other's further ranks are left out."""
    common = set.intersection(*(set(each.global_ranks) for each in given))
    if common and any(set(each.global_ranks) == common for each in given):
        return [_only(each, common) for each in given]
    return list(given)


def _only(timeline: Timeline, ranks: set[int]) -> Timeline:
    if ranks == set(timeline.global_ranks):
        return timeline
    spans = timeline.spans
    keep = np.flatnonzero(np.isin(spans.global_rank, sorted(ranks)))
    chosen = Spans(
        spans.global_rank[keep],
        spans.lane[keep],
        spans.lanes,
        spans.actions.take(keep),
        spans.start_s[keep],
        spans.end_s[keep],
    )
    return replace(
        timeline, spans=chosen, memory=tuple(sample for sample in timeline.memory if sample.global_rank in ranks)
    )


def _label(kind: Kind, microbatch: int | None) -> str:
    if kind in COMPUTE:
        return str(microbatch)
    return {Kind.STEP: "step", Kind.REDUCE_GRAD: "reduce"}.get(kind, "")


def _title(shown: Sequence[Timeline]) -> str:
    titles = list(dict.fromkeys(each.title for each in shown if each.title))
    if titles:
        return " / ".join(titles)
    microbatches = int(max(each.spans.actions.microbatch.max() for each in shown)) + 1
    count = len(shown[0].global_ranks)
    return f"{count} rank{'s' if count > 1 else ''}, {microbatches} microbatch{'es' if microbatches != 1 else ''}"


def _boxes(panels: Iterable[Panel]) -> Iterable[Box]:
    return (box for panel in panels for row in panel.rows for track in row.tracks for box in track.boxes)


def _legend(panels: Sequence[Panel]) -> tuple[LegendEntry, ...]:
    chunks: dict[Kind, int] = {}
    for box in _boxes(panels):
        chunks[box.kind] = max(chunks.get(box.kind, 1), box.chunk + 1)
    entries = []
    for kind, name in NAMES.items():
        if kind in chunks:
            count = chunks[kind] if kind in COMPUTE else 1
            entries.append(LegendEntry(kind, name if count == 1 else f"{name}, chunks 0-{count - 1}", count))
    return (*entries, LegendEntry(None, "idle (bubble)"))
