"""The actions that a rank's trace names: torch.distributed.pipelining annotates some schedules, people their own
calls."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..base.errors import ScheduleError
from ..schedule.action import COMPUTE, Action
from ..schedule.timeline import Span
from .events import OTHER, Event, RankTrace

_NAMED = re.compile(r"(?:PP:)?(\d.*|\(.*)")
"""An action as torch.distributed.pipelining annotates it (`PP:2F3`), or as we do (`2F3`)."""


def action_of(name: str) -> Action | None:
    """The action that a name is."""
    found = _NAMED.fullmatch(name)
    if not found:
        return None
    try:
        return Action.from_str(found[1])
    except ScheduleError:
        return None


def annotated(trace: RankTrace) -> list[Span]:
    """The actions of the last whole step that a rank's trace names, without a lane; none where it names none."""
    return _last_step([*_named(trace)])


def _named(trace: RankTrace) -> Iterator[Span]:
    """The actions of a rank by time. Where kernels of a device are annotated these count, else what the host does
    inside of an annotation: it waits for its inputs there too, so an action that computes begins with its first
    operation."""
    events = trace.events
    on_device = any(event.category == "gpu_user_annotation" and action_of(event.name) for event in events)
    wanted = "gpu_user_annotation" if on_device else "user_annotation"
    operations: dict[tuple[Any, Any], list[Event]] = {}
    for event in trace.operations:
        if not event.name.startswith(OTHER):
            operations.setdefault(event.thread, []).append(event)
    starts = {thread: [event.start_s for event in own] for thread, own in operations.items()}
    for event in events:
        action = action_of(event.name) if event.category in (wanted, "") else None
        if action is None:
            continue
        begin_s, end_s = event.start_s, event.end_s
        if not on_device and action.kind in COMPUTE and event.thread in operations:
            own = operations[event.thread]
            inside = own[
                bisect.bisect_left(starts[event.thread], begin_s) : bisect.bisect_right(starts[event.thread], end_s)
            ]
            if inside:
                begin_s, end_s = inside[0].start_s, min(end_s, max(each.end_s for each in inside))
        yield Span(trace.global_rank, "", action, begin_s, end_s)


def _last_step(spans: Sequence[Span]) -> list[Span]:
    """The spans of the last whole step: a step ends where one of its actions comes again. One that was recorded in part
    has fewer actions than the one before."""
    steps: list[dict[Action, Span]] = [{}]
    for span in spans:
        if span.action in steps[-1]:
            steps.append({})
        steps[-1][span.action] = span
    most = max(map(len, steps))
    return list(next(step for step in reversed(steps) if len(step) == most).values())
