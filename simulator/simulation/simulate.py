"""`simulate`: a plan in, the predicted timeline, memory and report out."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.base.errors import PlanError
from ...core.plan.plan import AnyPlan, ModularPlan
from ...core.schedule.timeline import Timeline
from ..network.placement import replicas_placed_equally
from ..recorded.replay import simulate_recorded
from ..step.step import Simulation, check_modules, simulate_first
from ..variation.variation import simulate_varied


def simulate(plan: AnyPlan, *, durations: Sequence[Timeline] = ()) -> Simulation:
    """The predicted step of a plan. Raises `ScheduleError` when its schedule does not fit or cannot run.

    One rank per pipeline rank is simulated: tensor- and data-parallel rank 0. Its peers run the same actions at the
    same time. Where replicas lie differently over nodes, or the plan's `variation` says that they differ, all are
    simulated, and the slowest is reported. With `durations`, recorded steps of the plan's ranks and stages, actions
    take what they took there instead of their prices; the recorded schedule may be another one. Memory and bytes are
    predicted as always. The modules of a plan
    run as one pipeline.
    """
    if isinstance(plan, ModularPlan):
        if durations:
            raise PlanError(
                "recorded durations are those of one model's plan, and this one has [[modules]]. Leave them out."
            )
        check_modules(plan)
        return simulate_first(plan)
    if durations:
        return simulate_recorded(plan, durations)
    if not (plan.variation.is_nothing and replicas_placed_equally(plan)):
        return simulate_varied(plan)
    return simulate_first(plan)
