"""How far the peak of every pipeline rank is below what its device has usable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.plan.plan import AnyPlan
from ..memory.capacity import Capacity
from ..memory.memory import RankMemory
from ..step.step import lowered_schedule, peak_memories, plan_capacities


@dataclass(frozen=True)
class Margins:
    """`memories` and `capacities` of the pipeline ranks; `tightest` is the one with the least left,
    of several the lowest."""

    memories: Sequence[RankMemory]
    capacities: Sequence[Capacity]

    @property
    def tightest(self) -> int:
        """Index of that rank."""
        margins = [
            capacity.usable_bytes - memory.peak_bytes
            for memory, capacity in zip(self.memories, self.capacities, strict=True)
        ]
        return margins.index(min(margins))

    @property
    def fits(self) -> bool:
        """True when no rank's peak is above what it may use."""
        return self.memories[self.tightest].peak_bytes <= self.capacities[self.tightest].usable_bytes


def margins_of(plan: AnyPlan) -> Margins:
    """The peaks of a plan under its schedule. Raises `ScheduleError` when that cannot be built."""
    return Margins(peak_memories(plan, lowered_schedule(plan)), plan_capacities(plan))
