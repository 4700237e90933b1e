"""What actions cost where several modules are joined: each module's by its own plan, and the bridges between them.

Modelled assumptions besides those of `pricing`: a module's groups lie over nodes as if its first rank began one; a
message over a bridge takes as long as that rank of either side needs which has most to send or receive, one part after
the other; where modules cut the batch differently, the microbatches of each are as many, and so much larger, as those
of the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.plan.plan import ModularPlan, ModulePlan
from ...core.schedule.action import COMPUTE, SENDS, Kind
from ..engine.attribution import Sort, Sorts
from ..engine.seconds import Seconds, on_grid
from ..network.bridge_bytes import bridge_bytes
from ..network.network import message_s
from .pricing import GraphPrices, Pricing


class JoinedPricing:
    """`Pricing` of a plan of modules. Its sorts of action count stages and pipeline ranks over all modules."""

    def __init__(self, plan: ModularPlan):
        self.plan = plan
        self._pricings = tuple(Pricing(part) for part in plan.parts)

    def of_graph(self, sorts: Sorts) -> GraphPrices:
        """As `Pricing.of_graph`."""
        prices = tuple(self._price(sort) for sort in sorts.sorts)
        pairs = np.array([self._reduction_overlap(sort) for sort in sorts.sorts])
        overlap = dict(zip(("lead_s", "tail_s"), pairs.T[:, sorts.of_action], strict=True))
        duration_s = np.array([seconds.total_s for seconds in prices])[sorts.of_action]
        return GraphPrices(prices, duration_s, overlap, None)

    def _own(self, sort: Sort) -> tuple[ModulePlan, Pricing, Sort]:
        """The module of a sort of action, its pricing, and the sort as it counts."""
        number = max(number for number, part in enumerate(self.plan.parts) if part.first_stage <= sort.stage)
        part, first = self.plan.parts[number], self.plan.parts[number].first_stage
        return part, self._pricings[number], sort._replace(stage=sort.stage - first, pp_rank=sort.pp_rank - first)

    def _price(self, sort: Sort) -> Seconds:
        part, pricing, own = self._own(sort)
        forward = sort.kind is Kind.SEND_F and own.stage == part.layout.pp - 1
        backward = sort.kind is Kind.SEND_B and own.stage == 0
        if forward or backward:
            joins = [join for join in self.plan.joins if join[backward] is part]
            price = Seconds(pp_comm=on_grid(max(self._bridge_s(*join, backward=backward) for join in joins)))
        else:
            price = pricing.price(own)
        # where modules cut the batch differently, all run as many microbatches as the last one here
        if sort.kind in COMPUTE | SENDS:
            price = price.times(part.num_microbatches / self.plan.parts[-1].num_microbatches).on_grid()
        return price

    def _reduction_overlap(self, sort: Sort) -> tuple[float, float]:
        _, pricing, own = self._own(sort)
        reduces = sort.kind is Kind.REDUCE_GRAD and pricing.profile.overlap_grad_reduce
        return pricing.reduction_overlap(own) if reduces else (0.0, 0.0)

    def _bridge_s(self, source: ModulePlan, target: ModulePlan, *, backward: bool) -> float:
        """Seconds of one microbatch's message between two modules."""
        count = (target if backward else source).num_microbatches
        busy: dict[tuple[bool, int], float] = {}
        for (sender, receiver), num_bytes in bridge_bytes(self.plan, source, target, backward=backward).items():
            seconds = count * message_s(self.plan.cluster, sender, receiver, -(-num_bytes // count), ranks=2)
            for end in ((True, sender), (False, receiver)):
                busy[end] = busy.get(end, 0.0) + seconds
        return max(busy.values()) / count


def module_reports(plan: ModularPlan, peak_bytes: Sequence[int]) -> list[dict[str, Any]]:
    """What a report says of each module: its ranks, its heaviest rank's bytes, and the bytes that go to the next module
    in a step. `peak_bytes` are those of all pipeline ranks."""
    return [
        {
            "name": part.name,
            "ranks": [part.first_rank, part.first_rank + part.layout.world_size - 1],
            "layout": part.layout.degrees,
            "num_parameters": part.num_parameters,
            "peak_memory_bytes": max(peak_bytes[part.first_stage : part.first_stage + part.layout.pp]),
            "bridge_bytes": sum(
                sum(bridge_bytes(plan, *join, backward=False).values()) for join in plan.joins if join[0] is part
            ),
        }
        for part in plan.parts
    ]
