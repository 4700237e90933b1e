"""How far the peak of every pipeline rank is below what its device has usable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.plan.plan import Plan
from ..memory.capacity import Capacity, capacities
from ..memory.memory import RankMemory, rank_memories
from ..stack.profiles import profile_of
from ..step.step import lowered_schedule


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


def margins_of(plan: Plan) -> Margins:
    """The peaks of a plan under its schedule. Raises `ScheduleError` when that cannot be built."""
    return Margins(rank_memories(plan, lowered_schedule(plan), profile_of(plan).recv_buffers), capacities(plan))
