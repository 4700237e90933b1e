"""What a plan's [schedule] chooses: a placement and a schedule, built by name or read from a file."""

from __future__ import annotations

from functools import lru_cache

from ..base.errors import ScheduleError
from ..layout.layout import Layout
from ..schedule import CATALOG, add_unshard, build
from ..schedule.action import Kind
from ..schedule.placement import Placement
from ..schedule.schedule import Schedule, read_csv
from .sections import ScheduleChoice


def microbatch_multiple(choice: ScheduleChoice) -> int:
    """The number that a schedule's numbers of microbatches are multiples of."""
    return 1 if choice.file is not None else CATALOG[choice.name].multiple


def chosen_placement(choice: ScheduleChoice, layout: Layout, num_microbatches: int) -> Placement:
    """The placement of the schedule of so many microbatches, without building the schedule where it has a name.

    Raises `ScheduleError` as `chosen_schedule`.
    """
    if choice.file is None:
        return _named_placement(choice.name, layout.pp, layout.vpp, num_microbatches)
    return _read_for(choice.file, layout, num_microbatches).placement


@lru_cache(maxsize=256)
def _named_placement(name: str, pp: int, vpp: int, num_microbatches: int) -> Placement:
    return CATALOG[name].placement(pp, vpp, num_microbatches)


def chosen_schedule(choice: ScheduleChoice, layout: Layout, num_microbatches: int) -> Schedule:
    """The schedule of so many microbatches: built by name, or read from the file.

    One from a file is as complete as the file is; `lower` adds the rest. With `max_active_stages` a schedule has
    UNSHARD and RESHARD, a file's own or those of `add_unshard`. Raises `ScheduleError` when the file has other
    ranks, stages or microbatches.
    """
    if choice.file is None:
        return named_schedule(choice, pp=layout.pp, vpp=layout.vpp, num_microbatches=num_microbatches)
    return _with_unshard(_read_for(choice.file, layout, num_microbatches), choice)


def named_schedule(choice: ScheduleChoice, *, pp: int, vpp: int, num_microbatches: int) -> Schedule:
    """As `chosen_schedule`, of a choice without a file."""
    return _with_unshard(build(choice.name, pp=pp, vpp=vpp, num_microbatches=num_microbatches), choice)


def _with_unshard(schedule: Schedule, choice: ScheduleChoice) -> Schedule:
    if choice.max_active_stages is None or (schedule.actions.kind == Kind.UNSHARD).any():
        return schedule
    return add_unshard(schedule, choice.max_active_stages)


def _read_for(file: str, layout: Layout, num_microbatches: int) -> Schedule:
    schedule = read_csv(file)
    problems = [
        f"{file} has {found} {what}, but the plan has {expected} ({source})."
        for what, found, expected, source in (
            ("rows (pipeline ranks)", schedule.num_ranks, layout.pp, "layout.pp"),
            ("stages", schedule.num_stages, layout.num_stages, "pp*vpp"),
            ("microbatches", schedule.num_microbatches, num_microbatches, "batch.global / (batch.micro * dp)"),
        )
        if found != expected
    ]
    if problems:
        raise ScheduleError("\n".join(problems))
    return schedule
