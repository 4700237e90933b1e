"""What all ranks measured, as one `Timeline`."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..core.action import RECEIVES, SENDS, Action
from ..core.layout import Layout
from ..core.timeline import MemorySample, Span, Timeline
from .pipeline.messages import receive_of
from .transport.base import Group


def gather_objects(group: Group, value: Any, device: torch.device) -> list[Any]:
    """Every member's picklable `value`, in member order, on every member."""
    body = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
    sizes = group.all_gather(torch.tensor([body.numel()], dtype=torch.int64, device=device))
    bodies = group.all_gather(body, [(int(size),) for size in sizes])
    return [pickle.loads(body.cpu().numpy().tobytes()) for body in bodies]


def measured_timeline(spans: Iterable[Span], memory: Iterable[MemorySample], layout: Layout, title: str) -> Timeline:
    """The timeline of one step over all ranks.

    A send or receive is shown from the moment both ends were there, as the simulator shows it: before that, one of them only waited.
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
