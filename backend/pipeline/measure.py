"""What all ranks measured, as one `Timeline`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, replace
from typing import Any

import torch

from ...core.layout.layout import Layout
from ...core.schedule.action import RECEIVES, SENDS, Action
from ...core.schedule.timeline import MemorySample, Span, Timeline
from ..base.measured_peak import MeasuredPeak
from ..transport.base import Group
from ..transport.gather_values import gather_values
from .messages import receive_of

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


def measured_timeline(spans: Iterable[Span], memory: Iterable[MemorySample], layout: Layout, title: str) -> Timeline:
    """The timeline of one step over all ranks.

    A send or receive is shown from the moment both ends were there, as the simulator shows it: before that,
    one of them only waited.
    """
    return Timeline.from_spans(transfers_only(list(spans), layout), "measured", list(memory), title)


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
