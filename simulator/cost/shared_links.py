"""The links that a plan's transfers load, for the engine's shared run: messages, and reductions that overlap with them.

Only one rank per pipeline rank is simulated, so a transfer stands for the equal ones of its node at the same time: of
every device that holds the same stages, and of every group that those form. What is shared here is what a node sends
and receives over its network cards; inside a node every device has its own link into the switch, whose two directions
do not disturb each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...core.plan.plan import Plan
from ...core.program import Collective, copies_axis, message_bytes, operations
from ...core.schedule.action import Kind
from ..engine.attribution import Sort, Sorts
from ..engine.contention import Link, Traffic
from ..engine.seconds import Seconds
from ..network.spreads import Spreads
from ..network.topology import network_share_bytes_per_s


def shared_links(plan: Plan, sorts: Sorts, prices: Sequence[Seconds]) -> Traffic | None:
    """What the sorts of action of a plan's graph load; None where nothing leaves a node."""
    cluster = plan.cluster
    if cluster.num_nodes == 1:
        return None
    loads, capacity = (
        _Loads(plan),
        network_share_bytes_per_s(cluster) * min(cluster.devices_per_node, cluster.num_devices),
    )
    routes: list[Mapping[Link, float]] = []
    rates: list[float] = []
    route_of = np.full(len(sorts.sorts), -1, dtype=np.int32)
    for i, sort in enumerate(sorts.sorts):
        seconds = prices[i].total_s
        found = loads.of(sort) if seconds > 0 else None
        if found is not None:
            route_of[i] = len(routes)
            route, num_bytes = found
            routes.append(route)
            # alone a transfer has the links it needs
            rates.append(min(num_bytes / seconds, capacity / max(route.values())))
    if not routes:
        return None
    links = dict.fromkeys((link for route in routes for link in route), capacity)
    return Traffic(route_of[sorts.of_action], tuple(routes), rates, links)


class _Loads:
    """Routes and bytes of the transfers of one plan."""

    def __init__(self, plan: Plan):
        self._plan = plan
        self._spreads = Spreads(plan)
        self._node = plan.cluster.devices_per_node

    def of(self, sort: Sort) -> tuple[dict[Link, float], float] | None:
        """The links of a transfer with the bytes each carries per byte of it, and its bytes; None for
        what loads no network."""
        if sort.kind in (Kind.SEND_F, Kind.SEND_B):
            return self._message(sort)
        return self._reduction(sort) if sort.kind is Kind.REDUCE_GRAD else None

    def _message(self, sort: Sort) -> tuple[dict[Link, float], float] | None:
        plan, layout = self._plan, self._plan.layout
        owners = plan.placement.ranks[sort.stage + (1 if sort.kind is Kind.SEND_F else -1)]
        replica = plan.placement.replica_of(sort.stage, sort.pp_rank)
        peer = owners[min(replica, len(owners) - 1)]
        source, target = (layout.global_rank(pp=rank) // self._node for rank in (sort.pp_rank, peer))
        if source == target:
            return None
        num_equal = float(self._num_equal_ranks(sort.pp_rank))
        return {("out", source): num_equal, ("in", target): num_equal}, float(message_bytes(plan))

    def _reduction(self, sort: Sort) -> tuple[dict[Link, float], float] | None:
        """One ring crosses each node once (`simulator.network.topology.collective_loads`)."""
        plan = self._plan
        axis = copies_axis(plan, sort.stage)
        spread = self._spreads.spread(axis, sort.stage, sort.pp_rank)
        if spread.num_nodes == 1:
            return None
        replica = plan.placement.replica_of(sort.stage, sort.pp_rank)
        found = operations(plan, sort.kind, sort.stage, replica=replica)
        sent = sum(op.sent_bytes for op in found if isinstance(op, Collective) and op.axis == axis)
        if not sent:
            return None
        node = plan.layout.global_rank(pp=sort.pp_rank) // self._node
        groups = max(1.0, self._num_equal_ranks(sort.pp_rank) / spread.per_node)
        return {("out", node): groups, ("in", node): groups}, float(sent)

    def _num_equal_ranks(self, pp_rank: int) -> int:
        """Devices of the first node of a pipeline rank that belong to it."""
        layout = self._plan.layout
        lo = layout.global_rank(pp=pp_rank) // self._node * self._node
        last = min(lo + self._node, layout.world_size)
        return sum(layout.coordinates(rank)["pp"] == pp_rank for rank in range(lo, last))
