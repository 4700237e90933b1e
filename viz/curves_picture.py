"""Loss curves on paper: each step's loss lightly, the smoothed curve over it, held-out losses as points."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .curves import CurvesScene
from .picture import EDGE, Line, Mark, Picture, Rect, Text
from .plot import point
from .scene import palette

COLORS = ("#3b74b4", "#dda13a", "#22b877", "#ac90a4", "#5b4a61", "#061546")
"""Of the first runs; then they come again. They are apart for everybody, which hues alone are not."""

HEIGHT, LEFT, RIGHT, BOTTOM = 460.0, 64.0, 24.0, 44.0
LEGEND_LINE = 17.0
LOSS = "loss (nats per token)"

Place = Callable[[float, float], tuple[float, float]]
"""Step and loss to pixels."""


def color_of(index: int) -> str:
    """The colour of a run."""
    return COLORS[index % len(COLORS)]


def lay_out_curves(scene: CurvesScene, width: float = 960.0) -> Picture:
    """The picture of loss curves."""
    marks: list[Mark] = [Text(EDGE, 30.0, scene.title, 16.0, bold=True)]
    top = 52.0
    for index, curve in enumerate(scene.curves):
        marks.append(Rect(EDGE, top - 7.0, 14.0, 4.0, color_of(index), crisp=True))
        marks.append(Text(EDGE + 22.0, top, curve.caption, 11.0, palette.INK))
        top += LEGEND_LINE
    if any(len(curve.validations) for curve in scene.curves):
        marks += point((EDGE + 7.0, top - 4.0), palette.MUTED)
        marks.append(Text(EDGE + 22.0, top, "held-out loss", 11.0, palette.MUTED))
        top += LEGEND_LINE
    marks.append(Text(EDGE, top + 6.0, LOSS, 10.0, palette.MUTED))
    top += LEGEND_LINE
    base = top + HEIGHT - BOTTOM - 52.0
    across, up = (width - LEFT - RIGHT) / scene.last_step, (base - top) / (scene.high - scene.low)

    def place(step: float, loss: float) -> tuple[float, float]:
        return LEFT + step * across, base - (loss - scene.low) * up

    _axes(marks, scene, place, width, base)
    columns = int(width - LEFT - RIGHT)
    for index, curve in enumerate(scene.curves):  # below the curves of all runs
        if curve.smoothed is not curve.losses:
            marks += _lines(_thinned(curve.losses, columns), palette.mix(color_of(index), 0.68), 0.9, place)
    for index, curve in enumerate(scene.curves):
        marks += _lines(_thinned(curve.smoothed, columns), color_of(index), 1.9, place)
    for index, curve in enumerate(scene.curves):
        for step, loss in curve.validations.tolist():
            marks += point(place(step, loss), color_of(index))
    return Picture(width, round(base + BOTTOM), tuple(marks), scene.title)


def _axes(marks: list[Mark], scene: CurvesScene, place: Place, width: float, base: float) -> None:
    for tick in scene.losses:
        _, y = place(0.0, tick.value)
        marks.append(Line(((LEFT, y), (width - RIGHT, y)), palette.GRID, 1.0))
        marks.append(Text(LEFT - 8.0, y + 3.6, tick.label, 10.0, palette.MUTED, "end"))
    marks.append(Line(((LEFT, base), (width - RIGHT, base)), palette.RULE, 1.0))
    for tick in scene.steps:
        x, _ = place(tick.value, scene.low)
        marks.append(Line(((x, base), (x, base + 4.0)), palette.RULE, 1.0))
        marks.append(Text(x, base + 16.0, tick.label, 10.0, palette.MUTED, "middle"))
    marks.append(Text(width - RIGHT, base + 32.0, "step", 10.0, palette.MUTED, "end"))


def _lines(points: np.ndarray, color: str, width: float, place: Place) -> list[Mark]:
    if len(points) < 2:
        x, y = place(*points[0].tolist())
        return [Rect(x - 1.5, y - 1.5, 3.0, 3.0, color, crisp=True)]
    return [Line(tuple(place(step, loss) for step, loss in points.tolist()), color, width)]


def _thinned(points: np.ndarray, columns: int) -> np.ndarray:
    """Points as many as can be seen: of each column of pixels the least and the most, so that no spike is lost."""
    if len(points) <= 2 * columns:
        return points
    parts = np.array_split(np.arange(len(points)), columns)
    chosen = sorted({int(part[at]) for part in parts for at in (points[part, 1].argmin(), points[part, 1].argmax())})
    return points[chosen]
