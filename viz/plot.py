"""Points over two axes of numbers: places on paper, ticks and discs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .picture import Line, Mark, Text
from .scene import palette
from .scene.axis import Tick

RADIUS = 3.6


@dataclass(frozen=True)
class Plot:
    """A rectangle of paper, in pixels, over `x` and `y` from the least to the most."""

    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]

    @property
    def base(self) -> float:
        """The y of the horizontal axis."""
        return self.top + self.height

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Where a point lies on paper."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + across * self.width, self.base - up * self.height

    def axes(self, xs: Sequence[Tick], ys: Sequence[Tick]) -> Iterator[Mark]:
        """Both axes with their ticks, and a line of the grid for each."""
        right = self.left + self.width
        for tick in ys:
            _, y = self.place(self.x[0], tick.value)
            yield Line(((self.left, y), (right, y)), palette.GRID, 1.0)
            yield Text(self.left - 8.0, y + 3.6, tick.label, 10.0, palette.MUTED, "end")
        for tick in xs:
            x, _ = self.place(tick.value, self.y[0])
            yield Line(((x, self.top), (x, self.base + 4.0)), palette.GRID, 1.0)
            yield Text(x, self.base + 16.0, tick.label, 10.0, palette.MUTED, "middle")
        yield Line(((self.left, self.top), (self.left, self.base), (right, self.base)), palette.RULE, 1.0)


def point(centre: tuple[float, float], color: str, radius: float = RADIUS) -> list[Mark]:
    """A disc with a ring of paper, so that it stands out from what is below it."""
    return [Line(disc(centre, radius + 1.4), "", fill=palette.PAPER), Line(disc(centre, radius), "", fill=color)]


def disc(centre: tuple[float, float], radius: float) -> tuple[tuple[float, float], ...]:
    """The corners of a circle."""
    x, y = centre
    angles = [2 * math.pi * i / 20 for i in range(20)]
    return tuple((x + radius * math.cos(angle), y + radius * math.sin(angle)) for angle in angles)
