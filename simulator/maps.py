"""The services behind `draw --what`: where the ranks of a plan lie, what they send each other, what they hold."""

from __future__ import annotations

from ..core.layout.rank_map import RankMap, rank_map
from ..core.layout.rank_traffic import RankTraffic
from ..core.plan.plan import AnyPlan, ModularPlan
from ..core.plan.schedule_of import part_schedule
from .network.rank_traffic import rank_traffic
from .simulation.simulate import simulate


def map_of(plan: AnyPlan) -> RankMap:
    """Where the ranks of a plan lie, those of all its modules."""
    layouts = [part.layout for part in plan.parts] if isinstance(plan, ModularPlan) else [plan.layout]
    cluster = plan.cluster
    return rank_map(
        layouts,
        devices_per_node=cluster.devices_per_node,
        nodes_per_leaf=cluster.nodes_per_leaf,
        title=_title(plan),
    )


def traffic_of(plan: AnyPlan) -> RankTraffic:
    """What ranks send each other in a step. Modules each run as many microbatches as they cut the batch into."""
    if isinstance(plan, ModularPlan):
        schedules = [part_schedule(plan, part, part.num_microbatches) for part in plan.parts]
    else:
        schedules = [simulate(plan).run.graph.schedule]
    return rank_traffic(plan, schedules, title=_title(plan))


def _title(plan: AnyPlan) -> str:
    return f"{plan.title} on {plan.world_size} devices of {plan.cluster.name}: {plan.degrees}"
