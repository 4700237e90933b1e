"""The schedule of a plan: built by name, or read from a file."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from .action import Kind
from .errors import ScheduleError
from .placement import Placement
from .schedule import Schedule
from .schedules import CATALOG, add_unshard, build, read_csv
from .sections import ScheduleChoice

if TYPE_CHECKING:
    from .plan import Plan


def placement_for(plan: Plan, num_microbatches: int | None = None) -> Placement:
    """The placement of a plan's schedule of so many microbatches (by default the most that a rank has), without building the schedule
    where it has a name. Raises `ScheduleError` as `schedule_for`."""
    choice, layout = plan.schedule, plan.layout
    if choice.file is None:
        return _named_placement(choice.name, layout.pp, layout.vpp, num_microbatches or plan.num_microbatches)
    return schedule_for(plan).placement


@lru_cache(maxsize=256)
def _named_placement(name: str, pp: int, vpp: int, num_microbatches: int) -> Placement:
    return CATALOG[name].placement(pp, vpp, num_microbatches)


def schedule_for(plan: Plan, num_microbatches: int | None = None) -> Schedule:
    """The schedule of a plan: built by name, or read from `schedule.file` and then as complete as the file is (`lower` adds the rest).

    It is that of the data-parallel ranks with most microbatches; `num_microbatches` asks for another of `plan.microbatch_counts`.
    With `schedule.max_active_stages` it has UNSHARD and RESHARD, a file's own or those of `add_unshard`. Raises `ScheduleError` when
    the file's ranks, stages or microbatches are not the plan's.
    """
    choice, layout = plan.schedule, plan.layout
    if choice.file is None:
        return named_schedule(choice, pp=layout.pp, vpp=layout.vpp, num_microbatches=num_microbatches or plan.num_microbatches)
    return _with_unshard(_read_for(plan, choice.file), choice)


def named_schedule(choice: ScheduleChoice, *, pp: int, vpp: int, num_microbatches: int) -> Schedule:
    """As `schedule_for`, of a choice without a file."""
    return _with_unshard(build(choice.name, pp=pp, vpp=vpp, num_microbatches=num_microbatches), choice)


def _with_unshard(schedule: Schedule, choice: ScheduleChoice) -> Schedule:
    if choice.max_active_stages is None or (schedule.actions.kind == Kind.UNSHARD).any():
        return schedule
    return add_unshard(schedule, choice.max_active_stages)


def _read_for(plan: Plan, file: str) -> Schedule:
    layout, schedule = plan.layout, read_csv(file)
    problems = [
        f"{file} has {found} {what}, but the plan has {expected} ({source})."
        for what, found, expected, source in (
            ("rows (pipeline ranks)", schedule.num_ranks, layout.pp, "layout.pp"),
            ("stages", schedule.num_stages, layout.num_stages, "pp*vpp"),
            ("microbatches", schedule.num_microbatches, plan.num_microbatches, "batch.global / (batch.micro * dp)"),
        )
        if found != expected
    ]
    if problems:
        raise ScheduleError("\n".join(problems))
    return schedule
