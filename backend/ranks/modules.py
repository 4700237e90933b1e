"""Several modules trained as one (`core.plan.plan.ModularPlan`): how a rank of one of them is joined to
the ranks of the others.

A rank trains its own module by a `TrainingRank`, as if there were no other. What is more: hidden states come
and go over bridges where a pipeline rank has no neighbour in its own module, and loss, gradient norm and token
counts are those of all modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...core.plan.plan import ModularPlan, Plan
from ...core.plan.schedule_of import modular_schedule
from ...core.schedule.action import RECEIVES, SENDS
from ...core.schedule.timeline import MemorySample, Span, Timeline
from ..base.observe import Observer
from ..model.block import BlockFactory
from ..numerics import Numerics
from ..pipeline.measure import transfers_only
from ..pipeline.messages import lane_name
from ..transport.base import Transport
from .joined import Joined, ModuleTransport, NamedObserver
from .training_rank import TrainingRank


def training_rank(
    transport: Transport,
    plan: Plan | ModularPlan,
    *,
    model: BlockFactory | None = None,
    observer: Observer | None = None,
    numerics: Numerics | None = None,
) -> TrainingRank:
    """This rank of a plan, of one model or of several. Arguments are those of `TrainingRank`."""
    if isinstance(plan, Plan):
        return TrainingRank(transport, plan, model=model, observer=observer, numerics=numerics)
    part = plan.part_of(transport.global_rank)
    joined = Joined(transport, plan, part)
    named = None if observer is None else NamedObserver(observer, part)
    return TrainingRank(
        ModuleTransport(transport, part.name, part.layout.world_size),
        part,
        model=model,
        observer=named,
        numerics=numerics,
        joined=joined,
    )


def plan_on(plan: Plan | ModularPlan, global_rank: int) -> Plan:
    """The plan that a rank trains by: that of its module where there are several."""
    return plan if isinstance(plan, Plan) else plan.part_of(global_rank)


def measured_modules(spans: Sequence[Span], memory: Sequence[MemorySample], plan: ModularPlan, title: str) -> Timeline:
    """The timeline of one step over the ranks of all modules, with the stages and pipeline ranks of the whole. Inside a
    module messages are shown as `measure.measured_timeline` does; over a bridge from the moment that an end was there,
    because a rank may send to several."""
    placement = modular_schedule(plan, 1).placement
    moved = []
    for part in plan.parts:
        ranks = range(part.first_rank, part.first_rank + part.layout.world_size)
        for span in transfers_only([span for span in spans if span.global_rank in ranks], part.layout):
            shift = part.first_stage
            action = replace(span.action, stage=span.action.stage + shift)
            is_message = action.kind in SENDS | RECEIVES
            moved.append(replace(span, action=action, lane=lane_name(action, placement) if is_message else span.lane))
    return Timeline.from_spans(moved, "measured", list(memory), title)
