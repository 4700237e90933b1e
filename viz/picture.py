"""A scene laid out on paper: rectangles, lines and texts in pixels, y downwards. SVG and PNG draw the same
marks in the same order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Literal

import numpy as np

from ..core.base.units import format_bytes
from ..core.schedule.action import Kind
from ..core.schedule.timeline import Timeline
from .scene import palette
from .scene.axis import format_time
from .scene.memory import MemoryPlot
from .scene.panels import Box, LegendEntry, Panel, Row, Scene, Track

LEFT = 84.0
RIGHT = 112.0
EDGE = 16.0
DIGIT = 0.637
"""Width of a digit over the font size in DejaVu Sans, the widest of the fonts in use, so nothing overlaps;
letters below likewise."""
NARROW, MIDDLE, WIDE = 0.36, 0.61, 0.9
SMALLEST_LABEL = 6.0
LARGEST_LABEL = 11.0
HAIR = 0.7
"""Paper between neighbouring boxes, at most a fifth of the box."""
LABEL_MARGIN = HAIR + 1.1
SHORTEST_MESSAGE = 1.2
"""Least width of a box in a thin lane: a message of microseconds is still seen."""
WIDTHS = (1200, 1600)
"""Least and largest width that `fitting_width` chooses."""

Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True, slots=True)
class Rect:
    """A filled rectangle. `title` is shown when one points at it; `crisp` ones touch their neighbours
    and are not smoothed."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    title: str = ""
    crisp: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """One line of text; `y` is its baseline."""

    x: float
    y: float
    text: str
    size: float
    fill: str = palette.INK
    anchor: Anchor = "start"
    bold: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """A polyline; with `fill` its area is filled and it has no stroke."""

    points: tuple[tuple[float, float], ...]
    stroke: str
    width: float = 1.0
    dashed: bool = False
    fill: str = ""


Mark = Rect | Text | Line


@dataclass(frozen=True, slots=True)
class Picture:
    """Marks in drawing order on paper of `width` x `height` pixels, which a file shows `scale` times as large."""

    width: float
    height: float
    marks: tuple[Mark, ...]
    title: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Style:
    """Heights in pixels that depend on how many rows there are."""

    track: float
    thin: float
    gap: float
    lane_names: bool


def enlarged(lay_out_on: Callable[[float], Picture], width: float, power: float = 1.0) -> Picture:
    """A picture of `width` pixels whose type can be read also where that is more than the largest of `WIDTHS`: from
    there on all of it grows as the width to that `power`, and what is left is room for detail.

    >>> found = enlarged(lambda wide: Picture(wide, 10.0, (), ""), 3200.0)
    >>> found.width, found.scale
    (1600.0, 2.0)
    """
    scale = max(1.0, width / WIDTHS[1]) ** power
    return replace(lay_out_on(width / scale), scale=scale)


def plot_width(width: float) -> float:
    """Pixels that the time axis has on paper of this width."""
    return width - LEFT - RIGHT


def lay_out(scene: Scene, width: float = 1200.0) -> Picture:
    """The picture of a scene; its height follows from the rows."""
    marks: list[Mark] = [Text(EDGE, 30.0, scene.title, 16.0, bold=True)]
    bottom = _legend(marks, scene, width, 50.0)
    for panel in scene.panels:
        bottom = _panel(marks, scene, panel, width, bottom + 12.0)
    return Picture(width, round(bottom + 10.0), tuple(marks), scene.title)


def text_width(text: str, size: float) -> float:
    """An upper estimate of the width of a line of text."""
    return size * sum(
        NARROW if c in "ijl,. ft'r" else WIDE if c in "mwMW%" else DIGIT if c.isdigit() else MIDDLE for c in text
    )


def fitting_width(timeline: Timeline) -> int:
    """The width at which microbatch numbers fit their typical forward box, within `WIDTHS`; the least
    where no width would do."""
    spans = timeline.spans
    forward = spans.actions.kind == Kind.F
    if not forward.any():
        return WIDTHS[0]
    typical_s = float(np.median((spans.end_s - spans.start_s)[forward]))
    needed = SMALLEST_LABEL * DIGIT * len(str(int(spans.actions.microbatch.max()))) + LABEL_MARGIN
    width = math.ceil(needed * timeline.makespan_s / max(typical_s, 1e-12) + LEFT + RIGHT)
    return max(WIDTHS[0], width) if width <= WIDTHS[1] else WIDTHS[0]


def _legend(marks: list[Mark], scene: Scene, width: float, top: float) -> float:
    """Swatches and names from left to right, as many lines as needed; returns the y below them."""
    x, y = EDGE, top
    for entry in scene.legend:
        needed = 18.0 + text_width(entry.name, 10.5) + 14.0
        if x + needed > width - EDGE and x > EDGE:
            x, y = EDGE, y + 17.0
        fills = _swatch(entry, scene.num_chunks)
        for index, fill in enumerate(fills):
            marks.append(Rect(x + index * 12.0 / len(fills), y - 9.0, 12.0 / len(fills), 11.0, fill, crisp=True))
        marks.append(Text(x + 17.0, y, entry.name, 10.5, palette.INK))
        x += needed
    return y + 8.0


def _swatch(entry: LegendEntry, num_chunks: int) -> list[str]:
    if entry.kind is None:
        return [palette.IDLE]
    return [palette.fill(entry.kind, chunk, num_chunks) for chunk in range(entry.num_chunks)]


def _panel(marks: list[Mark], scene: Scene, panel: Panel, width: float, top: float) -> float:
    """Heading, rows, memory and time axis; returns the y below them."""
    marks.append(Text(EDGE, top + 12.0, panel.heading, 12.0, bold=True))
    if panel.notes:
        marks.append(Text(width - EDGE, top + 12.0, "; ".join(panel.notes), 10.0, palette.MUTED, "end"))
    style = _style(sum(track.role == "compute" for row in panel.rows for track in row.tracks))
    first = y = top + 24.0
    scale = plot_width(width) / panel.axis.end
    body: list[Mark] = []
    boxes = [box for row in panel.rows for track in row.tracks if track.role == "compute" for box in track.boxes]
    sizes = _label_sizes(boxes, style.track, scale)
    for row in panel.rows:
        y = _row(body, scene, row, style, sizes, scale, width, y)
    if panel.memory is not None:
        y = _memory(body, panel, panel.memory, scale, width, y + 6.0)
    _grid(marks, panel, scale, first, y)
    marks += body
    if panel.makespan_s < panel.axis.end * 0.999:
        x = LEFT + panel.makespan_s * scale
        marks.append(Line(((x, first - 4.0), (x, y)), palette.MUTED, 1.0, dashed=True))
    return _time_axis(marks, panel, scale, width, y)


def _style(num_rows: int) -> Style:
    """Tall rows with named lanes for a few ranks, a strip each for many."""
    if num_rows <= 8:
        return Style(26.0, 7.0, 8.0, True)
    if num_rows <= 16:
        return Style(20.0, 4.0, 6.0, False)
    return Style(16.0, 3.0, 4.0, False) if num_rows <= 32 else Style(10.0, 3.0, 2.0, False)


def _row(
    marks: list[Mark],
    scene: Scene,
    row: Row,
    style: Style,
    sizes: dict[Kind, float],
    scale: float,
    width: float,
    top: float,
) -> float:
    """One rank: its name, its tracks from compute down to the thin lanes, its idle share; returns the y below."""
    labels: list[Mark] = []
    y = top
    for track, before in zip(row.tracks, (None, *row.tracks), strict=False):
        is_compute, is_second = track.role == "compute", before is not None and before.name == track.name
        height = style.track if is_compute else style.thin
        if is_compute:
            marks += _names(row, track, style, width, y, is_second)
            marks.append(Rect(LEFT, y, track.end_s * scale, height, palette.IDLE, crisp=True))
        elif style.lane_names and not is_second:
            name = track.name.replace(">", "\u2192").replace("<", "\u2190")
            marks.append(Text(LEFT - 5.0, y + height - 0.8, name, 7.5, palette.MUTED, "end"))
        for box in track.boxes:
            rect = _rect(scene, row, track, box, (y, height), scale)
            marks.append(rect)
            if is_compute:
                labels += _label(box, rect, sizes)
        y += height + (3.0 if is_second else 1.0)
    marks += labels
    return y - 1.0 + style.gap


def _names(row: Row, track: Track, style: Style, width: float, top: float, is_second: bool) -> Iterator[Text]:
    """The rank next to its compute lane, of two timelines which one that is, and the idle share."""
    middle = top + style.track / 2
    size = 11.0 if style.track >= 16 else 8.5
    lift = size * 0.45 if track.source and not is_second else 0.0
    if not is_second:
        yield Text(EDGE, middle + size * 0.36 - lift, row.name, size, palette.INK)
    if track.source:
        yield Text(EDGE, middle + size * 0.36 + lift, track.source, size - 2.5, palette.MUTED)
    yield Text(width - RIGHT + 8.0, middle + size * 0.36, f"{track.idle_fraction:.1%} idle", size - 1.0, palette.MUTED)


def _rect(scene: Scene, row: Row, track: Track, box: Box, band: tuple[float, float], scale: float) -> Rect:
    """The rectangle of a box in the band `(top, height)`, with a hair of paper after it when it is
    an action of its own."""
    top, height = band
    x, length = LEFT + box.start_s * scale, (box.end_s - box.start_s) * scale
    y, tall = top + (1.0 - box.high) * height, (box.high - box.low) * height
    fill = palette.fill(box.kind, box.chunk, scene.num_chunks)
    if not box.action:
        return Rect(x, y, length, tall, fill, crisp=True)
    shortest = 0.0 if track.role == "compute" else SHORTEST_MESSAGE
    return Rect(x, y, max(length - min(HAIR, 0.2 * length), shortest), tall, fill, _hover(scene, row, track, box))


def _label(box: Box, rect: Rect, sizes: dict[Kind, float]) -> Iterator[Text]:
    """The label in the middle of its rectangle, if it fits there."""
    size = min(sizes.get(box.kind, 0.0), rect.height * 0.8)
    if box.label and size >= SMALLEST_LABEL - 0.05 and text_width(box.label, size) <= rect.width - 1.0:
        place = (rect.x + rect.width / 2, rect.y + rect.height / 2 + size * 0.36)
        yield Text(*place, box.label, size, palette.text_on(rect.fill), "middle")


def _hover(scene: Scene, row: Row, track: Track, box: Box) -> str:
    start, end, length = (
        format_time(value, scene.time_unit) for value in (box.start_s, box.end_s, box.end_s - box.start_s)
    )
    source = f", {track.source}" if track.source else ""
    return f"{box.action} on {row.name}, {track.name}{source}: {start} to {end} ({length})"


def _label_sizes(boxes: list[Box], height: float, scale: float) -> dict[Kind, float]:
    """A font size per kind whose labels fit its median box, within a factor of 1.4 of each other; others have none.

    Measured durations scatter, so the size goes down for the narrower boxes as far as `SMALLEST_LABEL` allows.
    """
    largest = min(LARGEST_LABEL, height * 0.55)
    lengths: dict[Kind, list[float]] = {}
    letters: dict[Kind, int] = {}
    for box in boxes:
        if box.label:
            lengths.setdefault(box.kind, []).append((box.end_s - box.start_s) * scale)
            letters[box.kind] = max(letters.get(box.kind, 0), len(box.label))

    def fit(kind: Kind, length: float) -> float:
        return (length - LABEL_MARGIN) / (DIGIT * letters[kind])

    shown: dict[Kind, float] = {}
    for kind, found in lengths.items():
        if fit(kind, median(found)) >= SMALLEST_LABEL - 0.05:
            narrow = sorted(found)[len(found) // 10]
            shown[kind] = min(largest, max(fit(kind, narrow), SMALLEST_LABEL))
    least = min((size for kind, size in shown.items() if kind is not Kind.STEP), default=largest)
    return {kind: min(1.4 * least, size) for kind, size in shown.items()}


def _grid(marks: list[Mark], panel: Panel, scale: float, top: float, bottom: float) -> None:
    for tick in panel.axis.ticks:
        x = LEFT + tick.value * scale
        marks.append(Line(((x, top - 4.0), (x, bottom)), palette.GRID, 1.0))


def _time_axis(marks: list[Mark], panel: Panel, scale: float, width: float, y: float) -> float:
    marks.append(Line(((LEFT, y), (LEFT + plot_width(width), y)), palette.RULE, 1.0))
    for tick in panel.axis.ticks:
        x = LEFT + tick.value * scale
        marks.append(Line(((x, y), (x, y + 4.0)), palette.RULE, 1.0))
        marks.append(Text(x, y + 15.0, tick.label, 10.0, palette.MUTED, "middle"))
    marks.append(Text(width - RIGHT + 22.0, y + 15.0, f"time ({panel.axis.unit})", 10.0, palette.MUTED))
    return y + 22.0


def _memory(marks: list[Mark], panel: Panel, memory: MemoryPlot, scale: float, width: float, top: float) -> float:
    """Step curves over a zero line, their peaks named at the right; returns the y below."""
    labels = len(memory.curves) + (memory.span is not None)
    height = max(64.0, 12.5 * labels)
    marks.append(Text(EDGE, top + 11.0, "memory", 11.0, palette.INK))
    top += 18.0
    base = top + height
    per_byte = height / memory.axis.end
    for tick in memory.axis.ticks:
        y = base - tick.value * per_byte
        marks.append(Line(((LEFT, y), (LEFT + plot_width(width), y)), palette.GRID, 1.0))
        marks.append(
            Text(
                LEFT - 5.0,
                y + 3.0,
                f"{tick.label} {memory.axis.unit}" if tick.value else "0",
                8.5,
                palette.MUTED,
                "end",
            )
        )
    limit = LEFT + plot_width(width)
    if memory.span is not None:
        upper = _steps(memory.span.times_s, memory.span.high_bytes, scale, per_byte, base, limit)
        lower = _steps(memory.span.times_s, memory.span.low_bytes, scale, per_byte, base, limit)
        marks.append(Line((*upper, *reversed(list(lower))), "", fill=palette.mix(palette.CURVES[2], 0.75)))
    lines: list[tuple[tuple[float, float], ...]] = []
    drawn: list[int] = []  # of every curve its line
    for curve in memory.curves:
        points = tuple(_steps(curve.times_s, curve.num_bytes, scale, per_byte, base, limit))
        drawn.append(next((i for i, line in enumerate(lines) if _is_seen_as(points, line)), len(lines)))
        lines += [points] if drawn[-1] == len(lines) else []
    marks += (Line(points, palette.curve(index, len(lines)), 1.4) for index, points in enumerate(lines))
    for index in range(labels):
        is_span = index == len(memory.curves)
        color = palette.mix(palette.CURVES[2], 0.75) if is_span else palette.curve(drawn[index], len(lines))
        text = "range of all ranks" if is_span else _peak(memory, index)
        y = top + 12.5 * index + 9.0
        marks.append(Rect(width - RIGHT + 8.0, y - 5.0, 8.0, 3.0, color, crisp=True))
        marks.append(Text(width - RIGHT + 20.0, y, text, 8.5, palette.MUTED))
    return base


def _is_seen_as(points: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> bool:
    """Whether a line would hide another: none of their corners is half a pixel apart."""
    return len(points) == len(others) and all(
        abs(x - other_x) < 0.5 and abs(y - other_y) < 0.5
        for (x, y), (other_x, other_y) in zip(points, others, strict=True)
    )


def _peak(memory: MemoryPlot, index: int) -> str:
    curve = memory.curves[index]
    return f"rank {curve.global_rank}, {format_bytes(curve.peak_bytes)}"


def _steps(
    times_s: tuple[float, ...], values: tuple[float, ...], scale: float, per_byte: float, base: float, limit: float
) -> Iterator[tuple[float, float]]:
    """Corners of a step curve in pixels; runs of equal values are one step."""
    previous = None
    for (start, end), value in zip(pairwise(times_s), values, strict=True):
        y = base - value * per_byte
        if previous is None or y != previous[1]:
            if previous is not None:
                yield previous
            yield LEFT + start * scale, y
        previous = (min(LEFT + end * scale, limit), y)
    if previous is not None:
        yield previous
