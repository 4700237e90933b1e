"""`lower`: from compute actions to everything a rank does in a step, by the passes of `passes` and
`messages` one after the other."""

from __future__ import annotations

from .action import RECEIVES, SENDS, Kind
from .messages import add_messages
from .passes import add_reductions, add_steps, add_unshard, merge_backward
from .schedule import Schedule


def lower(schedule: Schedule, *, max_active_stages: int | None = None) -> Schedule:
    """The schedule with all it lacks: REDUCE_GRAD after each stage's last backward, STEP at the end of each rank, SEND
    and RECV where a stage's neighbour is on another rank; with `max_active_stages` (ZeRO-3) UNSHARD and RESHARD too,
    see `add_unshard`. An I whose W then follows at once, with no message to send between them, becomes one B.

    What is there already stays as it is, so a file with messages keeps them, and a lowered schedule is returned
    unchanged. Raises `ScheduleError` when compute actions are missing, doubled, or in an order that can never run.
    """
    there = {kind for kind in Kind if (schedule.actions.kind == kind).any()}
    if max_active_stages is not None and not there & {Kind.UNSHARD, Kind.RESHARD}:
        schedule = add_unshard(schedule, max_active_stages)
    if Kind.REDUCE_GRAD not in there:
        schedule = add_reductions(schedule)
    if Kind.STEP not in there:
        schedule = add_steps(schedule)
    if not there & (SENDS | RECEIVES):
        schedule = merge_backward(add_messages(schedule))
    return schedule
