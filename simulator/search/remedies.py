"""The smallest changes of a plan with which it fits: every one is made, as `--set` makes it, and tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ...core.base.errors import ShardproofError
from ...core.plan.plan import Plan
from ..cost.host_link import copies_under_work
from ..simulation.simulate import simulate
from ..step.step import lowered_schedule
from .changes import Changes, changed, settings
from .margins import margins_of

MOST_ACTIONS = 100_000
"""Of schedules with more actions the step is not simulated, so that an answer stays a matter of a second."""


MOST_TRIED_ACTIONS = 2_000_000
"""Of plans whose schedule has more actions nothing is tried: looking at one takes seconds."""


def is_tried(plan: Plan) -> bool:
    """True for plans small enough that changes of them are tried."""
    return len(lowered_schedule(plan)) <= MOST_TRIED_ACTIONS


def remedies(plan: Plan) -> list[dict[str, Any]]:
    """Changes that make a plan fit on its devices, the fastest step first.

    `set` has texts for `--set`, `peak_memory_bytes` is the changed plan's heaviest rank's, `step_time_s` its step,
    None where it was not simulated. Of every knob the first value that is enough counts; where no single one is,
    those that cost no communication are turned together, and one more with them. Empty where nothing helps, and
    where nothing is tried (`is_tried`).
    """
    if not is_tried(plan):
        return []
    found = _first_of_each(plan, {})
    if not found:
        multiple = _all_in_place(plan)
        found = [multiple] if _fitting(plan, multiple) else _first_of_each(plan, multiple)
    reports = [_reported(plan, changes) for changes in found]
    return sorted(reports, key=lambda each: (each["step_time_s"] is None, each["step_time_s"] or 0.0))


def _first_of_each(plan: Plan, base: Changes) -> list[Changes]:
    """Of every knob the first change that is enough together with `base`."""
    found: list[Changes] = []
    for steps in _knobs(plan):
        enough = next((changes for step in steps if _fitting(plan, changes := {**base, **step})), None)
        if enough is not None:
            found.append(enough)
    return found


def _knobs(plan: Plan) -> Iterator[Iterator[Changes]]:
    """For every knob its values beyond the plan's, the nearest first."""
    layout = plan.layout
    yield iter([{"layout.sequence_parallel": True}] if layout.tp > 1 and not layout.sequence_parallel else [])
    yield ({"layout.zero": stage} for stage in range(layout.zero + 1, 4) if layout.dp * layout.cp > 1)
    yield ({"batch.micro": size} for size in _smaller_micro(plan))
    yield ({"recompute.mode": mode} for mode in _more_recompute(plan))
    if copies_under_work(plan.cluster):  # elsewhere memory of the host is that of the device
        yield _more_of_the_optimizer(plan)
        yield ({"offload.activations": count} for count in _more_layers(plan))
    for axis in ("tp", "pp", "cp"):
        yield map(partial(_wider, plan, axis), _doublings(layout.dp))


def _all_in_place(plan: Plan) -> dict[str, Any]:
    """All that can be had without moving more bytes: the smallest microbatch, full recomputation,
    sequence parallelism."""
    changes: dict[str, Any] = {}
    if smaller := list(_smaller_micro(plan)):
        changes["batch.micro"] = smaller[-1]
    if more := _more_recompute(plan):
        changes["recompute.mode"] = more[-1]
    if plan.layout.tp > 1 and not plan.layout.sequence_parallel:
        changes["layout.sequence_parallel"] = True
    return changes


def _smaller_micro(plan: Plan) -> Iterator[int]:
    size = plan.batch.micro_size
    return (each for each in range(size - 1, 0, -1) if size % each == 0)


def _more_recompute(plan: Plan) -> Sequence[str]:
    modes = ("none", "selective", "full")
    return modes[modes.index(plan.recompute.mode) + 1 :]


def _more_of_the_optimizer(plan: Plan) -> Iterator[Changes]:
    """Half and all of the moments in host memory, then the fp32 weights too."""
    for share in (0.5, 1.0):
        if share > plan.offload.optimizer:
            yield {"offload.optimizer": share}
    if plan.precision.dtype != "fp32" and not plan.offload.masters:
        yield {"offload.optimizer": 1.0, "offload.masters": True}


def _more_layers(plan: Plan) -> Iterator[int]:
    """Half and all of the layers of a stage."""
    most = max(len(content.layers) for content in plan.stages)
    return (count for count in dict.fromkeys((-(-most // 2), most)) if count > plan.offload.activations)


def _doublings(degree: int) -> Iterator[int]:
    factor = 2
    while degree % factor == 0:
        yield factor
        factor *= 2


def _wider(plan: Plan, axis: str, factor: int) -> Changes:
    """So many times the degree of an axis, taken from dp."""
    return {f"layout.{axis}": getattr(plan.layout, axis) * factor, "layout.dp": plan.layout.dp // factor}


def _fitting(plan: Plan, changes: Changes) -> bool:
    """True where the changed plan is legal and fits."""
    try:
        return margins_of(changed(plan, changes)).fits
    except ShardproofError:
        return False


def _reported(plan: Plan, changes: Changes) -> dict[str, Any]:
    better = changed(plan, changes)
    found = margins_of(better)
    step_s = float(simulate(better).report["step_time_s"]) if len(lowered_schedule(better)) <= MOST_ACTIONS else None
    peak = found.memories[found.tightest].peak_bytes
    return {"set": settings(changes), "peak_memory_bytes": peak, "step_time_s": step_s}
