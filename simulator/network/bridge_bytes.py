"""The bytes that pass between the ranks of two modules in a step."""

from __future__ import annotations

from ...core.plan.plan import ModularPlan, ModulePlan
from ...core.program.bridge import bridge_messages, stage_grid
from ...core.program.work import activation_bytes


def bridge_bytes(
    plan: ModularPlan, source: ModulePlan, target: ModulePlan, *, backward: bool
) -> dict[tuple[int, int], int]:
    """`(from rank, to rank)` -> bytes of a whole step that pass between two modules: hidden
    states, or their gradients."""
    grids = [
        stage_grid(part, samples=[(part.samples_of(dp),) for dp in range(part.layout.dp)], pp_rank=pp_rank)
        for part, pp_rank in ((source, source.layout.pp - 1), (target, 0))
    ]
    giving, taking = reversed(grids) if backward else grids
    width = activation_bytes(plan.precision.dtype)
    found: dict[tuple[int, int], int] = {}
    for bridged in bridge_messages(giving, taking, plan.batch.micro_size):
        ends = bridged.message.source, bridged.message.destination
        found[ends] = found.get(ends, 0) + width * bridged.message.num_items
    return found
