"""`simulate`: a plan in, the predicted timeline, memory and report out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from ...core.base.errors import PlanError
from ...core.plan.plan import ModularPlan, Plan
from ...core.schedule.timeline import Timeline
from ..network.placement import replicas_placed_equally
from ..recorded.replay import simulate_recorded
from ..step.modules import ModularSimulation, simulate_modules
from ..step.step import Simulation, simulate_first
from ..variation.variation import simulate_varied


@overload
def simulate(plan: Plan, *, durations: Sequence[Timeline] = ()) -> Simulation: ...
@overload
def simulate(plan: ModularPlan, *, durations: Sequence[Timeline] = ()) -> ModularSimulation: ...
def simulate(plan: Plan | ModularPlan, *, durations: Sequence[Timeline] = ()) -> Simulation | ModularSimulation:
    """The predicted step of a plan. Raises `ScheduleError` when its schedule does not fit or cannot run.

    One rank per pipeline rank is simulated: tensor- and data-parallel rank 0. Its peers run the same actions at the
    same time. Where replicas lie differently over nodes, or the plan's `variation` says that they differ, all are
    simulated, and the slowest is reported. With `durations`, recorded steps of the plan's ranks and stages, actions
    take what they took there instead of their prices; the recorded schedule may be another one. Memory and bytes are
    predicted as always. A plan of modules is run as a whole (`modules`).
    """
    if isinstance(plan, ModularPlan):
        if durations:
            raise PlanError(
                "recorded durations are those of one model's plan, and this one has [[modules]]. Leave them out."
            )
        return simulate_modules(plan)
    if durations:
        return simulate_recorded(plan, durations)
    if not (plan.variation.is_nothing and replicas_placed_equally(plan)):
        return simulate_varied(plan)
    return simulate_first(plan)
