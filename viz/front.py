"""The answer of `plan` on paper: step time by memory of the worst rank, darker for the plainer, and what each layout
is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..core.base.errors import PlanError, UnknownNameError
from ..core.base.files import write_bytes
from ..core.base.units import format_bytes, format_s
from .picture import EDGE, Line, Mark, Picture, Rect, Text, text_width
from .picture_file import picture_bytes
from .plot import Plot, point
from .scene import palette
from .scene.axis import ticks_between

SUFFIXES = (".svg", ".png")
LEFT, TOP, HEIGHT, LINE = 60.0, 84.0, 440.0, 18.0
TABLE_SHARE = 0.45
"""Of the width, for the table at the right."""

DISC, NUMBER = 5.0, 10.5
GIB = 2.0**30
_PLAINNESS = "things to set up besides data parallelism:"

Candidate = Mapping[str, Any]
"""One of `candidates` in the JSON of `plan`."""


def draw_front(report: Mapping[str, Any], path: str | Path, width: float = 1280.0) -> None:
    """Writes the picture of what `plan --json` prints: its `candidates`, and in `picture` the `title` and how many
    `mechanisms` each layout takes besides data parallelism. Raises `UnknownNameError` for a suffix other than
    `SUFFIXES`, `PlanError` where no layout fits."""
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise UnknownNameError("picture suffix", suffix or str(path), SUFFIXES)
    candidates, about = report["candidates"], report["picture"]
    if not candidates:
        raise PlanError(f"no layout fits, so there is nothing to draw in {path}.")
    title = f"Layouts by time and memory: {about['title']}"
    picture = lay_out_front(candidates, about["mechanisms"], title, width)
    write_bytes(path, picture_bytes(picture, suffix))


def lay_out_front(
    candidates: Sequence[Candidate], mechanisms: Sequence[int], title: str, width: float = 1280.0
) -> Picture:
    """The picture of ranked layouts, whose places are those of the table of `plan`."""
    times = [each["step_time_s"] for each in candidates]
    memory = [each["peak_memory_bytes"] / GIB for each in candidates]
    plot = Plot(LEFT, TOP, width * (1 - TABLE_SHARE) - LEFT - EDGE, HEIGHT, _range(times), _range(memory))
    marks: list[Mark] = [Text(EDGE, 30.0, title, 16.0, bold=True)]
    colors = _colors(mechanisms)
    marks += _legend(colors)
    marks += plot.axes(ticks_between(*plot.x, 6)[0], ticks_between(*plot.y, 6)[0])
    marks.append(Text(EDGE, TOP - 12.0, "peak memory of the worst rank (GiB)", 10.5, palette.INK))
    marks.append(Text(LEFT + plot.width, plot.base + 34.0, "step time (s)", 10.5, palette.INK, "end"))
    marks += _stairs(plot, times, memory)
    places = [plot.place(*each) for each in zip(times, memory, strict=True)]
    for place, count in zip(places, mechanisms, strict=True):
        marks += point(place, colors[count], DISC)
    marks += _numbers(places, plot)
    marks += _table(candidates, width * (1 - TABLE_SHARE) + EDGE)
    height = max(plot.base + 50.0, TOP + LINE * (len(candidates) + 1))
    return Picture(width, round(height), tuple(marks), title)


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = 0.08 * (high - low) or 0.05 * high
    return low - margin, high + margin


def _colors(mechanisms: Sequence[int]) -> dict[int, str]:
    """The colour of each number of mechanisms, ascending."""
    low, high = min(mechanisms), max(mechanisms)
    return {count: palette.ramp((count - low) / max(high - low, 1)) for count in sorted(set(mechanisms))}


def _legend(colors: Mapping[int, str]) -> Iterator[Mark]:
    """The colours of how plain a layout is."""
    yield Text(EDGE, 52.0, _PLAINNESS, 10.5, palette.MUTED)
    x = EDGE + text_width(_PLAINNESS, 10.5) + 4.0
    for count, color in colors.items():
        yield from point((x + 5.0, 48.4), color, DISC)
        yield Text(x + 14.0, 52.0, str(count), 10.5, palette.MUTED)
        x += 34.0
    yield Text(x + 10.0, 52.0, "dashed: no layout is faster and holds less", 10.5, palette.MUTED)


def _stairs(plot: Plot, times: Sequence[float], memory: Sequence[float]) -> Iterator[Mark]:
    """The front of time and memory alone: what lies above it is there for being plainer."""
    ordered = sorted(zip(times, memory, strict=True))
    front = [ordered[0]]
    for step_s, held in ordered[1:]:
        if held < front[-1][1]:
            front.append((step_s, held))
    corners = [front[0]]
    for (_, before), (step_s, held) in pairwise(front):
        corners += [(step_s, before), (step_s, held)]
    if len(corners) > 1:
        yield Line(tuple(plot.place(*corner) for corner in corners), palette.MUTED, 1.2, dashed=True)


def _numbers(places: Sequence[tuple[float, float]], plot: Plot) -> Iterator[Mark]:
    """The place of each layout next to its disc, where it covers neither a disc nor another number."""
    taken = [(x - DISC - 1, y - DISC - 1, x + DISC + 1, y + DISC + 1) for x, y in places]
    for number, (x, y) in enumerate(places, start=1):
        wide = text_width(str(number), NUMBER)
        options = [
            (x + across * (wide / 2 + DISC + 3) - wide / 2, y + up * (NUMBER * 0.4 + DISC + 3) - NUMBER * 0.4)
            for across, up in ((0.9, -0.9), (-0.9, 0.9), (-0.9, -0.9), (0.9, 0.9), (1, 0), (-1, 0), (2.2, 0), (-2.2, 0))
        ]
        boxes = [(left, top, left + wide, top + NUMBER * 0.8) for left, top in options]
        free = (each for each in boxes if not any(_meet(each, other) for other in taken))
        box = next(free, boxes[0])
        taken.append(box)
        yield Text(box[0], box[3], str(number), NUMBER, palette.INK)


def _meet(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _table(candidates: Sequence[Candidate], left: float) -> Iterator[Mark]:
    """Place, step, peak and layout of each."""
    columns: tuple[tuple[float, Any], ...] = ((18.0, "end"), (84.0, "end"), (156.0, "end"), (172.0, "start"))
    rows = [("", "step", "peak", "layout")]
    for number, each in enumerate(candidates, start=1):
        rows.append(
            (str(number), format_s(each["step_time_s"]), format_bytes(each["peak_memory_bytes"]), layout_text(each))
        )
    for row, cells in enumerate(rows):
        for (x, anchor), cell in zip(columns, cells, strict=True):
            color = palette.INK if row else palette.MUTED
            yield Text(left + x, TOP - 12.0 + LINE * row, cell, 10.5, color, anchor)
    yield Rect(left, TOP - 6.0, 520.0, 1.0, palette.RULE, crisp=True)


def layout_text(candidate: Candidate) -> str:
    """A layout's choices that are not the plainest: `tp4 pp4 vpp7 dp2 zero1 micro2, full`."""
    layout, batch = candidate["layout"], candidate["batch"]
    degrees = [f"{name}{layout[name]}" for name in ("tp", "cp", "ep", "pp", "vpp", "dp") if layout[name] > 1]
    degrees += [f"etp{layout['etp']}"] if layout["etp"] != layout["tp"] else []
    degrees += ["sp"] if layout["sequence_parallel"] else []
    degrees += [f"zero{layout['zero']}"] if layout["zero"] else []
    degrees += [f"micro{batch['micro']}"] if batch["micro"] > 1 else []
    others = [f"recompute {candidate['recompute']}"] if candidate["recompute"] != "none" else []
    others += [candidate["schedule"]] if candidate["schedule"] not in ("1F1B", "Interleaved1F1B") else []
    others += [f"{key}={value}" for key, value in candidate.get("free", {}).items() if value is not None]
    return ", ".join([" ".join(degrees) or "one device", *others])
