"""The services behind `draw --what`: where the ranks of a plan lie, what they send each other, what they hold."""

from __future__ import annotations

from ..core.layout.rank_map import RankMap, rank_map
from ..core.layout.rank_traffic import RankTraffic
from ..core.plan.plan import AnyPlan, ModularPlan, only_model
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
    """What ranks send each other in a step. Raises `PlanError` for a plan of several modules."""
    model = only_model(plan, "--what traffic")
    return rank_traffic(model, simulate(model).run.graph.schedule, title=_title(model))


def _title(plan: AnyPlan) -> str:
    return f"{plan.title} on {plan.world_size} devices of {plan.cluster.name}: {plan.degrees}"
