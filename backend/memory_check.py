"""Whether this machine has the memory that a plan's ranks take, asked before they start: a kernel that runs out of
it kills without a word.

What ranks hold is what `fit` says of our own backend, live tensors of each rank's worst moment. Not all ranks have that
moment together, so two numbers are held against what is free: the states of all ranks (weights, gradients, optimizer)
and the rest of one, which are needed for certain, and the sum of all peaks. The first refuses, the second only warns.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from ..core.base.errors import PlanError, Problem
from ..core.base.units import format_bytes
from ..core.commands.commands import service
from ..core.machine.host import available_memory_bytes
from ..core.plan.plan import AnyPlan
from ..core.plan.runtime import Offload
from .dry_run import rank_groups
from .watch.rank_messages import ON_GPUS

STATES = ("weights", "gradients", "optimizer")
"""The components of `fit` that a rank holds throughout."""

FORKED_BYTES = 36e6
TORCH_BYTES = 146e6
"""What a process takes besides its tensors: a rank forked from the server of ranks in a tiny run (private pages), and
one that has loaded torch itself (torch 2.13 for CPUs, 2026-11-23, /proc/PID/smaps_rollup)."""

CERTAIN_SHARE = 0.9
"""Of the modelled states: own runs come within 5% of the model (`benchmarks/own_runs.py`)."""


@dataclass(frozen=True)
class Need:
    """Bytes that the ranks of one machine take: `certain` at least, `peaks` if all have their worst moment at once.
    `largest` names the component with the most of the first."""

    num_ranks: int
    certain: float
    peaks: float
    largest: str


def check_memory(plan: AnyPlan, transport: str, available_bytes: float | None = None) -> str | None:
    """A warning where memory may run out, None where there is enough or none can know. Raises
    `PlanError` where it cannot do.

    On GPUs the plan's cluster says what a rank has, and `fit` decides. Under torchrun the first rank of each
    machine asks for all of it.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    if transport in ON_GPUS:
        return _check_device(plan)
    available = available_memory_bytes() if available_bytes is None else available_bytes
    if available is None:
        return None
    need = need_of(plan, transport)
    words = f"{need.num_ranks} rank{'s' * (need.num_ranks > 1)} on this machine"
    if need.certain > available:
        raise PlanError(
            f"{words} take at least {format_bytes(need.certain)} of memory, most of it {need.largest}, and "
            f"{format_bytes(available)} are "
            "available. Use fewer layers or a smaller model, more machines, layout.zero = 1 to 3 with dp > 1, or "
            "more tp and pp with less "
            "dp; `shardproof fit` says what each rank holds."
        )
    if need.peaks > available:
        return (
            f"{words} may take {format_bytes(need.peaks)} of memory at their peaks, and {format_bytes(available)} "
            "are available."
        )
    return None


def need_of(plan: AnyPlan, transport: str) -> Need:
    """What the ranks that this machine is to run take: all, or under torchrun
    `LOCAL_WORLD_SIZE` of them from `RANK` on."""
    first, count = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", plan.world_size))
    states = dict.fromkeys(STATES, 0.0)
    rest = peaks = num_ranks = 0
    for group in rank_groups(replace(_as_run(plan), offload=Offload())):  # it is the memory of this host in any case
        here = int(((group.ranks >= first) & (group.ranks < first + count)).sum())
        if not here:
            continue
        num_ranks += here
        peaks += here * group.peak.num_bytes
        rest = max(rest, group.peak.num_bytes - sum(group.peak.components[name] for name in STATES))
        for name in STATES:
            states[name] += here * group.peak.components[name]
    processes = (
        TORCH_BYTES if transport == "memory" else num_ranks * (TORCH_BYTES if "RANK" in os.environ else FORKED_BYTES)
    )
    certain = CERTAIN_SHARE * (sum(states.values()) + rest) + processes
    return Need(num_ranks, certain, peaks + processes, max(states, key=lambda name: states[name]))


def _as_run(plan: AnyPlan) -> AnyPlan:
    """The plan with the memory of our own backend, whatever stack it is modelled for."""
    return replace(plan, runtime=replace(plan.runtime, profile="shardproof"))


def _check_device(plan: AnyPlan) -> str | None:
    """`fit`, for a plan that says which GPUs it is for: refuses what does not fit."""
    if plan.cluster.name == "this-host":
        return None
    if findings := service("fit")(_as_run(plan)).findings:
        raise PlanError([Problem(f"{each.where}: {each.what} {each.hint}", each.key) for each in findings])
    return None
