"""How long a rank communicated during its step, and how much of that nothing hid: measured in a profiler's trace."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..schedule.timeline import Span
from .events import Event, RankTrace
from .pieces import COMMUNICATION

_POINT_TO_POINT = re.compile(r"send|recv", re.IGNORECASE)
"""Messages between stages: ranks that wait for them are in the bubble, so they are not counted here."""

_ASKED = re.compile(r"(?:nccl|gloo|mpi|ucc):")
"""A collective of a rank without a device, as torch annotates what its library does."""


@dataclass(frozen=True)
class Communication:
    """Seconds of a rank's step in which collectives ran, and those of them in which it computed nothing."""

    seconds: float
    exposed_s: float


def communication_of(trace: RankTrace, spans: Sequence[Span]) -> Communication:
    """The collectives between the begin of a rank's first action and the end of its last, messages between stages left
    out. On a device these are kernels; else what the host's libraries did while no operation of tensors ran."""
    begin_s, end_s = min(span.start_s for span in spans), max(span.end_s for span in spans)
    if trace.kernels:
        moving = [kernel for kernel in trace.kernels if COMMUNICATION.search(kernel.name)]
        computing = [kernel for kernel in trace.kernels if not COMMUNICATION.search(kernel.name)]
    else:
        moving = [event for event in trace.events if _ASKED.match(event.name)]
        computing = [event for event in trace.operations if event.name.startswith("aten::")]
    moving = [event for event in moving if not _POINT_TO_POINT.search(event.name)]
    collectives = _union(moving, begin_s, end_s)
    both = _union([*moving, *computing], begin_s, end_s)
    return Communication(_length(collectives), _length(both) - _length(_union(computing, begin_s, end_s)))


def _union(events: Iterable[Event], begin_s: float, end_s: float) -> list[tuple[float, float]]:
    """The times in which at least one of the events runs, within bounds, in order and apart."""
    found: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda each: each.start_s):
        low, high = max(event.start_s, begin_s), min(event.end_s, end_s)
        if high <= low:
            continue
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return found


def _length(times: Iterable[tuple[float, float]]) -> float:
    return sum(high - low for low, high in times)
