"""Predicted against published steps on paper: all of them over both times, and the error of each by its source."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..core.base.files import write_text
from .picture import EDGE, Line, Mark, Picture, Rect, Text
from .plot import Plot
from .scene import palette
from .scene.axis import Tick, ticks_between
from .svg import to_svg

WIDTH, TOP, SQUARE, LINE = 1280.0, 92.0, 400.0, 17.0
NAMES, COUNT = 250.0, 40.0
"""Pixels of the sources' names, and of their counts."""

MOST_ERROR = 0.5
"""Errors of the right picture lie between these; what lies outside is at its edge."""

DOT = 3.0
DOTS, SPREAD, MIDDLE = "#8fb0d6", "#3b74b4", palette.INK
BAND = "#f3e7cf"


class Step(NamedTuple):
    """One published step and its prediction."""

    source: str
    published_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Above zero: predicted too slow."""
        return self.predicted_s / self.published_s - 1


def draw_validation(steps: Sequence[tuple[str, float, float]], path: str | Path) -> None:
    """Writes the picture of steps `(source, published, predicted)`, in seconds, as SVG."""
    write_text(path, to_svg(lay_out_validation([Step(*each) for each in steps])))


def lay_out_validation(steps: Sequence[Step]) -> Picture:
    """The picture of at least one step."""
    title = f"Predicted and published: {len(steps):,} training steps"
    error = statistics.fmean(abs(each.error) for each in steps)
    by_source: defaultdict[str, list[float]] = defaultdict(list)
    for each in steps:
        by_source[each.source].append(each.error)
    marks: list[Mark] = [Text(EDGE, 30.0, title, 16.0, bold=True)]
    said = f"mean absolute error {error:.1%} of the published step; the band is 10% to either side"
    marks.append(Text(EDGE, 50.0, said, 11.0, palette.MUTED))
    marks += _both_times(steps)
    marks += _by_source(by_source)
    height = TOP + max(SQUARE + 30.0, LINE * len(by_source) + 30.0) + 20.0
    return Picture(WIDTH, round(height), tuple(marks), title)


def _both_times(steps: Sequence[Step]) -> Iterator[Mark]:
    """Published time across, predicted time up, both by factors of ten."""
    values = [math.log10(value) for each in steps for value in each[1:]]
    low, high = min(values) - 0.1, max(values) + 0.1
    plot = Plot(EDGE + 48.0, TOP, SQUARE, SQUARE, (low, high), (low, high))
    ticks = [Tick(float(power), f"{10.0**power:g}") for power in range(math.ceil(low), math.floor(high) + 1)]
    band = math.log10(1.1)
    corners = ((low, low + band), (high - band, high), (high, high), (high, high - band), (low + band, low), (low, low))
    yield Line(tuple(plot.place(*corner) for corner in corners), "", fill=BAND)
    yield from plot.axes(ticks, ticks)
    yield Line((plot.place(low, low), plot.place(high, high)), palette.MUTED, 1.0)
    for each in steps:
        x, y = plot.place(math.log10(each.published_s), math.log10(each.predicted_s))
        yield Rect(x - DOT / 2, y - DOT / 2, DOT, DOT, SPREAD, crisp=True)
    yield Text(EDGE, TOP - 12.0, "predicted step (s)", 10.5, palette.INK)
    yield Text(plot.left + SQUARE, plot.base + 34.0, "published step (s)", 10.5, palette.INK, "end")


def _by_source(by_source: Mapping[str, Sequence[float]]) -> Iterator[Mark]:
    """A line for each source: every error, the middle half of them, and the middle."""
    left = EDGE + 48.0 + SQUARE + 36.0 + NAMES + COUNT
    plot = Plot(left, TOP, WIDTH - left - EDGE - 8.0, LINE * len(by_source), (-MOST_ERROR, MOST_ERROR), (0.0, 1.0))
    band = [plot.place(-0.1, 0.0)[0], plot.place(0.1, 0.0)[0]]
    yield Rect(band[0], TOP, band[1] - band[0], plot.height, BAND, crisp=True)
    ticks = [Tick(tick.value, f"{tick.value:+.0%}" if tick.value else "0") for tick in ticks_between(*plot.x, 5)[0]]
    yield from plot.axes(ticks, ())
    yield Text(plot.left - COUNT - 8.0, TOP - 12.0, "source", 10.5, palette.MUTED, "end")
    yield Text(plot.left - 8.0, TOP - 12.0, "steps", 10.5, palette.MUTED, "end")
    yield Text(plot.left, TOP - 12.0, _said(by_source), 10.5, palette.INK)
    yield Text(plot.left + plot.width, plot.base + 34.0, "predicted over published, less 1", 10.5, palette.INK, "end")
    for row, source in enumerate(sorted(by_source, key=str.lower)):
        yield from _strip(plot, TOP + LINE * (row + 0.5), source, sorted(by_source[source]))


def _said(by_source: Mapping[str, Sequence[float]]) -> str:
    """What the right picture shows, and how much of it lies outside of its axis."""
    beyond = sum(abs(error) > MOST_ERROR for errors in by_source.values() for error in errors)
    edge = f"; {beyond:,} beyond {MOST_ERROR:.0%} at the edge" if beyond else ""
    return f"error of each, its middle half, and the median{edge}"


def _strip(plot: Plot, y: float, source: str, errors: Sequence[float]) -> Iterator[Mark]:
    yield Text(plot.left - COUNT - 8.0, y + 3.6, source, 10.0, palette.INK, "end")
    yield Text(plot.left - 8.0, y + 3.6, f"{len(errors):,}", 10.0, palette.MUTED, "end")
    for error in errors:
        yield Rect(_across(plot, error) - DOT / 2, y - DOT / 2, DOT, DOT, DOTS, crisp=True)
    quarters = statistics.quantiles(errors, n=4, method="inclusive") if len(errors) > 1 else [errors[0]] * 3
    low, middle, high = (_across(plot, value) for value in quarters)
    yield Rect(low, y - 1.5, max(high - low, 1.0), 3.0, SPREAD, crisp=True)
    yield Rect(middle - 1.0, y - 5.5, 2.0, 11.0, MIDDLE, crisp=True)


def _across(plot: Plot, error: float) -> float:
    return plot.place(min(max(error, -MOST_ERROR), MOST_ERROR), 0.0)[0]
