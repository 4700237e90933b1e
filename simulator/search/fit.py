"""`fit`: does a plan fit into device memory, and which rank is the worst."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...core.base.findings import Finding, Where
from ...core.base.units import format_bytes
from ...core.plan.plan import AnyPlan, ModularPlan
from ...core.schedule.action import Action
from ..step.step import check_modules, representatives
from .margins import margins_of
from .remedies import is_tried, remedies

OUT_OF_MEMORY = "out-of-memory"
"""The finding of a plan that does not fit."""


NOTHING_HELPS = (
    "No zero, recompute, micro, offload, sequence_parallel, tp, pp or cp makes it fit here: use more devices."
)
NOT_TRIED = "Try zero, recompute, micro or more tp: the schedule is too long to try them here."
OF_MODULES = "Try zero, recompute, micro or more ranks for that module: with [[modules]] changes are not tried here."


@dataclass(frozen=True)
class Fit:
    """`report` has the JSON keys of the interface but `remedies`; `per_rank` in it holds one
    entry per pipeline rank."""

    plan: AnyPlan
    report: dict[str, Any]

    @property
    def fits(self) -> bool:
        """True when every rank's peak is within what it may use of its device."""
        return bool(self.report["fits"])

    @cached_property
    def remedies(self) -> list[dict[str, Any]]:
        """The smallest changes with which a plan that does not fit does, each tried; empty for a plan that
        fits, or where none helps, and with [[modules]]."""
        return [] if self.fits or isinstance(self.plan, ModularPlan) else remedies(self.plan)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Nothing for a plan that fits, else what the worst rank needs."""
        if self.fits:
            return ()
        report = self.report
        peak, capacity = format_bytes(report["peak_memory_bytes"]), format_bytes(report["capacity_bytes"])
        parts = ", ".join(f"{name} {format_bytes(count)}" for name, count in report["memory_bytes"].items())
        action = report["peak_memory_action"] or None
        microbatch = None if action is None else Action.from_str(action).microbatch
        where = Where(report["peak_memory_rank"], action, microbatch=microbatch)
        what = f"it needs {peak} and {capacity} of the device are usable: {parts}."
        return (Finding.at(OUT_OF_MEMORY, "error", where, what, self.hint, key="cluster.device_memory_bytes"),)

    @property
    def hint(self) -> str:
        """The fastest remedy of a plan that does not fit, in words, or why there is none."""
        if isinstance(self.plan, ModularPlan):
            return OF_MODULES
        if not self.remedies:
            return NOTHING_HELPS if is_tried(self.plan) else NOT_TRIED
        best = self.remedies[0]
        return (
            f"It fits with {' '.join(f'--set {text}' for text in best['set'])} "
            f"({format_bytes(best['peak_memory_bytes'])})."
        )


def fit(plan: AnyPlan) -> Fit:
    """Peak memory of every pipeline rank against what is usable of its device (`capacity`), of its
    smallest where classes differ.

    The report describes the rank with the least left. Of the sizes of a device `device_bytes` is its total
    and `capacity_bytes` what a peak of live tensors may be; `reserved_memory_bytes` is what the allocator is
    expected to hold at the peak.
    """
    if isinstance(plan, ModularPlan):
        check_modules(plan)
    found, ranks = margins_of(plan), representatives(plan)
    tightest = found.tightest
    memory = found.memories[tightest]
    return Fit(
        plan,
        {
            "fits": found.fits,
            **found.capacities[tightest].report(),
            "peak_memory_bytes": memory.peak_bytes,
            "peak_memory_rank": ranks[memory.pp_rank],
            "peak_memory_action": memory.peak_action,
            "reserved_memory_bytes": memory.reserved_bytes,
            "memory_bytes": memory.components(),
            "per_rank": [
                {
                    "pp_rank": rank.pp_rank,
                    "global_rank": ranks[rank.pp_rank],
                    "peak_memory_bytes": rank.peak_bytes,
                    "peak_memory_action": rank.peak_action,
                    "reserved_memory_bytes": rank.reserved_bytes,
                    "memory_bytes": rank.components(),
                }
                for rank in found.memories
            ],
        },
    )
