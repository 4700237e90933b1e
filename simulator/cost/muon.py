"""What optimizers other than AdamW cost a step: traffic by the moments that they keep, and Muon's matrices, which come
together, are multiplied on their owners, and go back. Modelled: ranks of a stage have equal shares but for the
largest matrix, parts go over the copies of the stage where there are any, else over tp, and groups change no price.
"""

from __future__ import annotations

from collections.abc import Callable

from ...core.plan.plan import Plan
from ...core.program import Collective, Product, copies_axis, local_elements, num_shards
from ...core.program.holdings import held_elements
from ...core.program.optimizer_state import MOMENTS, matrices_of, moment_numbers
from ..compute.compute import product_s
from ..engine.seconds import Seconds

MOMENT_TRAFFIC = 8
"""Bytes of an fp32 moment that is read and written."""

FP32_BYTES = 4

OURS = "shardproof"
"""The stack that multiplies in fp32; others do so in bf16 (`torch.optim.Muon`)."""


def update_bytes(plan: Plan, stages: tuple[int, ...], of_adamw: float) -> float:
    """Memory traffic for each element that is updated, where AdamW has `of_adamw` bytes."""
    elements = sum(sum(held_elements(plan, stage)) for stage in stages)
    moments = sum(sum(moment_numbers(plan, stage)) for stage in stages)
    return of_adamw - MOMENT_TRAFFIC * (MOMENTS - moments / elements) if elements else of_adamw


def muon(plan: Plan, stages: tuple[int, ...], collective_s: Callable[[Collective], float]) -> Seconds:
    """Seconds of the matrices of a pipeline rank's stages."""
    total = Seconds()
    for stage in stages:
        ranks = plan.layout.tp * plan.num_copies(stage)
        seconds = [
            (count, sum(_orthogonal_s(plan, *shape) for shape in shapes))
            for _, count, shapes in matrices_of(plan, stage)
        ]
        if not seconds:
            continue
        all_s, largest_s = sum(count * each for count, each in seconds), max(each for _, each in seconds)
        total += Seconds(optimizer=max(all_s / ranks, largest_s))
        total += Seconds(dp_comm=sum(map(collective_s, exchanges(plan, stage))))
    return total


def exchanges(plan: Plan, stage: int) -> tuple[Collective, ...]:
    """Parts of matrices to their owners, each once, and the whole back to all that hold parts."""
    copies, tp = plan.num_copies(stage), plan.layout.tp
    size, axis = (copies, copies_axis(plan, stage)) if copies > 1 else (tp, "tp")
    if size == 1 or plan.optimizer.name != "muon":
        return ()
    shards = num_shards(plan, stage)
    sent = back = 0.0
    for parameter, _, _ in matrices_of(plan, stage):
        num_bytes = FP32_BYTES * local_elements(plan, parameter)
        sent += num_bytes / plan.num_copies(stage)
        back += num_bytes / (shards[parameter.expert] if plan.layout.zero else 1)
    others = (size - 1) / size
    return tuple(Collective("muon", "all_to_all", axis, size, round(each * others)) for each in (sent, back))


def _orthogonal_s(plan: Plan, rows: int, columns: int) -> float:
    """Seconds of the iterations of one matrix."""
    short, long = sorted((rows, columns))
    wide = Product("muon", short, short, long)
    products = (wide, Product("muon", short, short, short), Product("muon", short, long, short))
    dtype = "fp32" if plan.runtime.profile == OURS or plan.precision.dtype == "fp32" else "bf16"
    return plan.optimizer.muon_steps * sum(product_s(plan.cluster, dtype, each) for each in products)
