"""The two lines that open a report about a plan."""

from __future__ import annotations

from ..core.base.units import format_count
from ..core.plan.plan import AnyPlan, ModularPlan
from ..core.plan.sections import Batch


def of_last_batch(batch: Batch) -> str:
    """What is to be said of numbers about a step where steps have other batches; empty where they have not."""
    return "" if batch.stays else " (the last of the batches)"


def title_of(plan: AnyPlan, num_parameters: int) -> str:
    """Model, devices, layout, schedule and batch."""
    if isinstance(plan, ModularPlan):
        tokens = f"{plan.batch.global_size} x {plan.batch.sequence} tokens"
        return (
            f"{plan.title} ({format_count(num_parameters)} parameters) on {plan.world_size} devices of "
            f"{plan.cluster.name}\n"
            f"{plan.degrees}; {plan.schedule.name}, {tokens} in microbatches of {plan.batch.micro_size}, "
            f"{plan.precision.dtype}"
        )
    layout = plan.layout
    extras = [f"zero {layout.zero}"] if layout.zero else []
    extras += ["sequence parallel"] if layout.sequence_parallel else []
    extras += [f"recompute {plan.recompute.mode}"] if plan.recompute.mode != "none" else []
    several = "es" if plan.num_microbatches > 1 else ""
    microbatches = (
        f"{plan.num_microbatches} microbatch{several} of {plan.batch.micro_size} x {plan.batch.sequence} tokens"
        f"{of_last_batch(plan.batch)}"
    )
    return (
        f"{plan.model.name} ({format_count(num_parameters)} parameters) on {layout.world_size} devices of "
        f"{plan.cluster.name}\n"
        f"{', '.join([layout.degrees, *extras])}; {plan.schedule.file or plan.schedule.name}, {microbatches}, "
        f"{plan.precision.dtype}"
    )
