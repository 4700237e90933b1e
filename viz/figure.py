"""A picture as PNG, drawn by matplotlib's Agg canvas; matplotlib is loaded only when this is called."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

from .picture import Line, Picture, Rect, Text
from .scene import palette

FONT = "DejaVu Sans"  # comes with matplotlib, so the same everywhere
POINTS_PER_PIXEL = 0.72  # at 100 layout pixels per inch


def to_png(picture: Picture, pixels_per_unit: float = 2.0) -> bytes:
    """PNG bytes of `width x height` layout pixels times the picture's scale and `pixels_per_unit`. The same bytes for
    the same picture and matplotlib."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    dpi = 100 * pixels_per_unit * picture.scale
    # The user's matplotlibrc must not change the picture.
    with matplotlib.rc_context(
        {"text.usetex": False, "path.simplify": False, "text.antialiased": True, "text.parse_math": False}
    ):
        figure = Figure(figsize=(picture.width / 100, picture.height / 100), dpi=dpi, facecolor=palette.PAPER)
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, picture.width), ylim=(picture.height, 0))
        axes.set_axis_off()
        for order, run in enumerate(_runs(picture)):
            _draw(axes, run, order)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=dpi, metadata={"Software": None})
    return out.getvalue()


def _runs(picture: Picture) -> Iterable[list[Any]]:
    """Marks in drawing order, neighbours of one type and smoothness together: a collection draws much
    faster than single artists."""
    run: list[Any] = []
    for mark in picture.marks:
        if run and (type(mark) is not type(run[0]) or getattr(mark, "crisp", None) != getattr(run[0], "crisp", None)):
            yield run
            run = []
        run.append(mark)
    if run:
        yield run


def _draw(axes: Any, run: list[Any], order: int) -> None:
    from matplotlib.collections import PolyCollection

    if isinstance(run[0], Rect):
        corners = [
            ((r.x, r.y), (r.x + r.width, r.y), (r.x + r.width, r.y + r.height), (r.x, r.y + r.height)) for r in run
        ]
        colors = [r.fill for r in run]
        axes.add_collection(
            PolyCollection(corners, facecolors=colors, edgecolors="none", antialiaseds=not run[0].crisp, zorder=order)
        )
    elif isinstance(run[0], Text):
        for mark in run:
            _text(axes, mark, order)
    else:
        for mark in run:
            _line(axes, mark, order)


def _text(axes: Any, mark: Text, order: int) -> None:
    align = {"start": "left", "middle": "center", "end": "right"}[mark.anchor]
    axes.text(
        mark.x,
        mark.y,
        mark.text,
        color=mark.fill,
        fontfamily=FONT,
        fontsize=mark.size * POINTS_PER_PIXEL,
        fontweight="bold" if mark.bold else "normal",
        ha=align,
        va="baseline",
        zorder=order,
    )


def _line(axes: Any, mark: Line, order: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Polygon

    if mark.fill:
        axes.add_patch(Polygon(mark.points, closed=True, facecolor=mark.fill, edgecolor="none", zorder=order))
        return
    xs, ys = zip(*mark.points, strict=True)
    style: Any = (0, (4, 3)) if mark.dashed else "-"
    line = Line2D(xs, ys, color=mark.stroke, linewidth=mark.width * POINTS_PER_PIXEL, linestyle=style, zorder=order)
    line.set_solid_joinstyle("miter")
    axes.add_line(line)
