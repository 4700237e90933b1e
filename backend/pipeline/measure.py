"""What all ranks measured, as one `Timeline`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, replace
from typing import Any

import torch

from ...core.layout.layout import Layout
from ...core.plan.plan import AnyPlan, ModularPlan, Plan
from ...core.plan.schedule_of import modular_schedule
from ...core.schedule.action import RECEIVES, SENDS, Action
from ...core.schedule.timeline import MemorySample, Span, Timeline
from ..base.measured_peak import MeasuredPeak
from ..transport.base import Group
from ..transport.gather_values import gather_values
from .messages import lane_name, receive_of

Recorded = tuple[list[Span], list[MemorySample], list[MeasuredPeak]]
"""What one rank kept of a step."""


def gather_recorded(group: Group, recorded: Recorded, device: torch.device) -> list[Recorded]:
    """What every member has kept of a step, in member order, on every member."""
    spans, samples, peaks = recorded
    rows = [[span.global_rank, span.lane, str(span.action), span.start_s, span.end_s] for span in spans]
    everyone = gather_values(group, [rows, list(map(astuple, samples)), list(map(astuple, peaks))], device)
    return [
        (
            [
                Span(rank, lane, Action.from_str(action), start_s, end_s)
                for rank, lane, action, start_s, end_s in theirs
            ],
            [MemorySample(*row) for row in memory],
            [MeasuredPeak(*row) for row in held],
        )
        for theirs, memory, held in everyone
    ]


def measured_timeline(spans: Sequence[Span], memory: Iterable[MemorySample], plan: AnyPlan, title: str) -> Timeline:
    """The timeline of one step over all ranks, with the stages and pipeline ranks of the run.

    A send or receive is shown from the moment both ends were there, as the simulator shows it: before that, one of them
    only waited. Over a bridge between modules it is shown from the moment that an end was there, because a rank may
    send to several.
    """
    moved: list[Span] = []
    for part in plan.parts:
        ranks = range(part.first_rank, part.first_rank + part.world_size)
        own = transfers_only([span for span in spans if span.global_rank in ranks], part.layout)
        moved += _in_run(own, plan, part) if isinstance(plan, ModularPlan) else own
    return Timeline.from_spans(moved, "measured", list(memory), title)


def _in_run(spans: Iterable[Span], plan: ModularPlan, part: Plan) -> Iterator[Span]:
    """The spans of a module with the stages and lanes that they have in the run."""
    placement = modular_schedule(plan, 1).placement
    for span in spans:
        action = replace(span.action, stage=span.action.stage + part.first_stage)
        is_message = action.kind in SENDS | RECEIVES
        yield replace(span, action=action, lane=lane_name(action, placement) if is_message else span.lane)


def transfers_only(spans: Sequence[Span], layout: Layout) -> list[Span]:
    """The spans with the waiting at either end of a message cut off."""

    def message(span: Span) -> tuple[tuple[int, ...], Action]:
        """The same for a send and its receive: the pipeline they run in, and the receive."""
        coordinates = layout.coordinates(span.global_rank)
        receive = receive_of(span.action) if span.action.kind in SENDS else span.action
        return tuple(coordinates[axis] for axis in ("tp", "cp", "dp")), receive

    both_there_s: dict[Any, float] = {}
    messages = [span for span in spans if span.action.kind in SENDS | RECEIVES]
    for span in messages:
        key = message(span)
        both_there_s[key] = max(both_there_s.get(key, span.start_s), span.start_s)
    cut = {id(span): replace(span, start_s=min(both_there_s[message(span)], span.end_s)) for span in messages}
    return [cut.get(id(span), span) for span in spans]
