"""The peaks of a plan's pipeline ranks beside what each may use of its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.plan.plan import Plan
from ..memory.capacity import Capacity, capacities
from ..memory.memory import RankMemory, rank_memories
from ..stack.profiles import profile_of
from ..step.step import lowered_schedule


@dataclass(frozen=True)
class Spare:
    """`memories` and `capacities` of the pipeline ranks; `tightest` is the one with the least to spare,
    of several the lowest."""

    memories: Sequence[RankMemory]
    capacities: Sequence[Capacity]

    @property
    def tightest(self) -> int:
        """Index of that rank."""
        spare = [
            capacity.usable_bytes - memory.peak_bytes
            for memory, capacity in zip(self.memories, self.capacities, strict=True)
        ]
        return spare.index(min(spare))

    @property
    def fits(self) -> bool:
        """True when no rank's peak is above what it may use."""
        return self.memories[self.tightest].peak_bytes <= self.capacities[self.tightest].usable_bytes


def spare_of(plan: Plan) -> Spare:
    """The peaks of a plan under its schedule. Raises `ScheduleError` when that cannot be built."""
    return Spare(rank_memories(plan, lowered_schedule(plan), profile_of(plan).recv_buffers), capacities(plan))
