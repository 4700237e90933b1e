"""The schedule of a plan of one model, of several models together, and of each part."""

from __future__ import annotations

from ..schedule.action import ActionArray
from ..schedule.joined import joined_schedule
from ..schedule.lower import lower
from ..schedule.placement import ModulePlacement, Placement
from ..schedule.schedule import Schedule
from .plan import AnyPlan, ModularPlan, Plan
from .schedule_choice import chosen_schedule


def schedule_for(plan: Plan, num_microbatches: int | None = None) -> Schedule:
    """The schedule of a plan: built by name, or read from `schedule.file` and then as complete as the file is
    (`lower` adds the rest).

    It is that of the data-parallel ranks with most microbatches; `num_microbatches` asks for another of
    `plan.microbatch_counts`. With `schedule.max_active_stages` it has UNSHARD and RESHARD, a file's own or those of
    `add_unshard`. Raises `ScheduleError` when the file's ranks, stages or microbatches are not the plan's.
    """
    return chosen_schedule(plan.schedule, plan.layout, num_microbatches or plan.num_microbatches)


def modular_schedule(plan: ModularPlan, num_microbatches: int) -> Schedule:
    """The lowered schedule of all pipeline ranks, a stage on each, for so many microbatches."""
    num_stages = len(plan.sources)
    is_line = all(sources == ((stage - 1,) if stage else ()) for stage, sources in enumerate(plan.sources))
    ranks = tuple((stage,) for stage in range(num_stages))
    placement = Placement("explicit", num_stages, ranks, num_microbatches, None if is_line else plan.sources)
    return joined_schedule(plan.schedule.name, placement)


def part_schedule(plan: AnyPlan, part: Plan, num_microbatches: int) -> Schedule:
    """The lowered schedule of one part of a plan, stages and pipeline ranks counted from 0 as in the part's own plan:
    of several modules the part's rows of `modular_schedule`."""
    if not isinstance(plan, ModularPlan):
        return lower(schedule_for(part, num_microbatches))
    whole, pp = modular_schedule(plan, num_microbatches), part.layout.pp
    first, last = (int(whole.offsets[part.first_stage + place]) for place in (0, pp))
    columns = whole.actions.take(slice(first, last)).columns
    actions = ActionArray(columns[0] - part.first_stage, *columns[1:])
    before = next((source.layout.pp - 1 for source, target in plan.joins if target is part), None)
    ranks = tuple((stage,) for stage in range(pp))
    placement = ModulePlacement("explicit", pp, ranks, num_microbatches, before=before, gives=not part.has_loss)
    offsets = whole.offsets[part.first_stage : part.first_stage + pp + 1] - first
    return Schedule(whole.name, placement, actions, offsets)
