"""Loss curves in characters: a mark for each column's mean, a capital O for held-out losses."""

from __future__ import annotations

import numpy as np

from .curves import Curve, CurvesScene

MARKS = ("*", "+", "x", "#", "%", "@")
"""Of the first runs; then they come again."""
ANSI = (67, 178, 36, 168, 97, 240)
"""Their colours among the terminal's 256, near those of a picture."""
HELD_OUT = "O"
ROWS = 16


def curves_text(scene: CurvesScene, *, width: int = 100, color: bool = False) -> str:
    """The curves in lines of at most `width` characters."""
    margin = max(len(tick.label) for tick in scene.losses) + 2
    columns = max(width, 40) - margin - 1
    cells: list[list[tuple[str, int]]] = [[(" ", -1)] * columns for _ in range(ROWS)]

    def put(step: float, loss: float, mark: str, run: int) -> None:
        column = min(int(step / scene.last_step * (columns - 1) + 0.5), columns - 1)
        cells[_row(scene, loss)][column] = mark, run

    for run, curve in enumerate(scene.curves):
        for step, loss in _means(curve, scene.last_step, columns):
            put(step, loss, MARKS[run % len(MARKS)], run)
    for run, curve in enumerate(scene.curves):
        for step, loss in curve.validations.tolist():
            put(step, loss, HELD_OUT, run)
    labels = {_row(scene, tick.value): tick.label for tick in scene.losses}
    body = [
        f"{labels.get(row, ''):>{margin - 2}} {'+' if row in labels else '|'}{_painted(line, color)}"
        for row, line in enumerate(cells)
    ]
    legend = [
        f"{_painted([(MARKS[run % len(MARKS)], run)], color)} {each.caption}" for run, each in enumerate(scene.curves)
    ]
    if any(len(curve.validations) for curve in scene.curves):
        legend.append(f"{HELD_OUT} held-out loss")
    return "\n".join([scene.title, *legend, "", *body, *_axis(scene, margin, columns)]) + "\n"


def _row(scene: CurvesScene, loss: float) -> int:
    """The line of a loss, from above."""
    return min(max(round((scene.high - loss) / (scene.high - scene.low) * (ROWS - 1)), 0), ROWS - 1)


def _means(curve: Curve, last_step: float, columns: int) -> list[tuple[float, float]]:
    """The mean loss of each column that has steps."""
    at = np.minimum((curve.losses[:, 0] / last_step * (columns - 1) + 0.5).astype(int), columns - 1)
    found = []
    for column in np.unique(at).tolist():
        here = curve.losses[at == column]
        found.append((float(here[:, 0].mean()), float(here[:, 1].mean())))
    return found


def _painted(cells: list[tuple[str, int]], color: bool) -> str:
    text = "".join(mark for mark, _ in cells)
    if not color:
        return text.rstrip()
    return "".join(
        mark if run < 0 else f"\x1b[38;5;{ANSI[run % len(ANSI)]}m{mark}\x1b[0m" for mark, run in cells
    ).rstrip()


def _axis(scene: CurvesScene, margin: int, columns: int) -> list[str]:
    """Marks of the steps with their labels below."""
    marks, labels = ["-"] * columns, ""
    for tick in scene.steps:
        column = min(int(tick.value / scene.last_step * (columns - 1) + 0.5), columns - 1)
        if len(labels) <= column and column + len(tick.label) <= columns:
            marks[column] = "'"
            labels = f"{labels:<{column}}{tick.label} "
    edge = " " * (margin - 1)
    return [f"{edge}+{''.join(marks)}"[: margin + columns], f"{edge} {labels.rstrip()} steps".rstrip()]
