"""`training_rank`: the rank that trains its part of a plan, of one model or of several.

A rank of one of several modules trains its own by a `TrainingRank`, as if there were no other. What is more: hidden
states come and go over bridges where a pipeline rank has no neighbour in its own module, and loss, gradient norm and
token counts are those of all modules (`joined`).
"""

from __future__ import annotations

from ...core.plan.plan import AnyPlan, Plan
from ..base.observe import Observer
from ..model.block import BlockFactory
from ..numerics import Numerics
from ..transport.base import Transport
from .joined import Joined, ModuleTransport, NamedObserver
from .training_rank import TrainingRank


def training_rank(
    transport: Transport,
    plan: AnyPlan,
    *,
    model: BlockFactory | None = None,
    observer: Observer | None = None,
    numerics: Numerics | None = None,
) -> TrainingRank:
    """This rank of a plan, of one model or of several. Arguments are those of `TrainingRank`."""
    transport.communicators = plan.communicators
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
