"""`Seconds`: how long something takes, split by cause, and the grid on which such times add up exactly."""

from __future__ import annotations

import math
from operator import add
from typing import NamedTuple

from ...core.base.errors import PlanError

GRID = 2.0**40
"""Prices are rounded to 1/GRID seconds (0.9 ps), so that sums of them are exact in float64 up to
8,192 s, in any order."""


made_of = tuple.__new__
"""Makes a named tuple of its values in order, without the call in Python that takes them by name."""


class Seconds(NamedTuple):
    """Seconds by the components of `time_s` of the report; of communication only what no compute hides.

    A tuple, because a search makes hundreds of thousands: it is made in a third of a frozen dataclass's time.

    `other` is what a device waits for its host to launch kernels, and for copies to and from the host's memory.
    """

    compute: float = 0.0
    recompute: float = 0.0
    tp_comm: float = 0.0
    cp_comm: float = 0.0
    ep_comm: float = 0.0
    pp_comm: float = 0.0
    dp_comm: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:  # type: ignore[override]
        return made_of(Seconds, map(add, self, other))

    def times(self, count: float) -> Seconds:
        """The same work `count` times."""
        return made_of(Seconds, [part * count for part in self])

    def on_grid(self) -> Seconds:
        """Every component rounded to the grid."""
        return made_of(Seconds, [on_grid(part) if part else 0.0 for part in self])

    def recomputed(self) -> Seconds:
        """The same work done a second time: what was compute counts as recompute."""
        return Seconds(
            0.0, self.compute + self.recompute, self.tp_comm, self.cp_comm, self.ep_comm, self.pp_comm, self.dp_comm
        )

    @property
    def total_s(self) -> float:
        """All components together."""
        one, two, three, four, five, six, seven, eight, nine = self
        return one + two + three + four + five + six + seven + eight + nine


COMPONENTS = Seconds._fields

NOTHING = Seconds()


def on_grid(seconds: float) -> float:
    """Seconds rounded to the grid on which sums are exact. Raises `PlanError` for a duration
    that is no finite number."""
    if not math.isfinite(seconds * GRID):
        raise PlanError(
            "an action takes longer than can be counted. Use larger rates in [cluster], or a smaller model and batch."
        )
    return round(seconds * GRID) / GRID
