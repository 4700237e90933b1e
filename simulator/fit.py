"""`fit`: does a plan fit into device memory, and which rank is the worst."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..core.findings import Finding
from ..core.plan import Plan
from ..core.units import format_bytes
from .columns import capacities_bytes
from .memory import rank_memories
from .profiles import profile_of
from .simulate import lowered_schedule, representatives

OUT_OF_MEMORY = "out-of-memory"
"""The finding of a plan that does not fit."""


@dataclass(frozen=True)
class Fit:
    """`report` has the JSON keys of the interface; `per_rank` holds one entry per pipeline rank."""

    report: dict[str, Any]

    @property
    def fits(self) -> bool:
        """True when every rank's peak is within the device's memory."""
        return bool(self.report["fits"])

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Nothing for a plan that fits, else what the worst rank needs."""
        if self.fits:
            return ()
        report = self.report
        peak, capacity = format_bytes(report["peak_memory_bytes"]), format_bytes(report["capacity_bytes"])
        parts = ", ".join(f"{name} {format_bytes(count)}" for name, count in report["memory_bytes"].items())
        where = ", ".join(filter(None, (f"rank {report['peak_memory_rank']}", report["peak_memory_action"])))
        hint = "Cut the model further, hold fewer microbatches, recompute activations, or use ZeRO."
        return (Finding(OUT_OF_MEMORY, "error", where, f"it needs {peak} and the device has {capacity}: {parts}.", hint),)


def fit(plan: Plan) -> Fit:
    """Peak memory of every pipeline rank against the capacity of the cluster's devices, of the smallest where it has several classes.

    A plan fits when the tensors of its worst rank do, the one with the least to spare: what the allocator holds beyond them it gives
    back when it must.
    """
    memory = rank_memories(plan, lowered_schedule(plan), profile_of(plan).recv_buffers)
    ranks, capacities = representatives(plan), capacities_bytes(plan)
    heaviest = max(memory, key=lambda rank: (rank.peak_bytes - capacities[rank.pp_rank], -rank.pp_rank))
    capacity = capacities[heaviest.pp_rank]
    return Fit(
        {
            "fits": heaviest.peak_bytes <= capacity,
            "capacity_bytes": capacity,
            "peak_memory_bytes": heaviest.peak_bytes,
            "peak_memory_rank": ranks[heaviest.pp_rank],
            "peak_memory_action": heaviest.peak_action,
            "reserved_memory_bytes": heaviest.reserved_bytes,
            "memory_bytes": heaviest.components(),
            "per_rank": [
                {
                    "pp_rank": rank.pp_rank,
                    "global_rank": ranks[rank.pp_rank],
                    "peak_memory_bytes": rank.peak_bytes,
                    "peak_memory_action": rank.peak_action,
                    "reserved_memory_bytes": rank.reserved_bytes,
                    "memory_bytes": rank.components(),
                }
                for rank in memory
            ],
        }
    )
