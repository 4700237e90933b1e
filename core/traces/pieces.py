"""A rank's trace without names cut into pieces: what it computed forwards or backwards in one go, between messages."""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from .events import OTHER, Event, RankTrace

Direction = Literal["F", "B"]

MESSAGE = re.compile(r"(?:c10d::|nccl:|gloo:|mpi:|ucc:)(send|recv)")
"""A message as torch names it: the operation, and what its library is asked for."""

COMMUNICATION = re.compile(r"nccl|rccl", re.IGNORECASE)
"""A kernel that moves data between ranks."""

_BACKWARD = "autograd::engine::evaluate_function"
_OPTIMIZER = "Optimizer.step#"
_SEQUENCE = "Sequence number"
"""What autograd numbers its operations by: a backward has that of its forward."""


@dataclass
class Piece:
    """One action that computes: its direction, when the host asked for it, its seconds, the numbers of autograd in it,
    and with which pieces of the other direction it shares these."""

    direction: Direction
    asked_s: float
    start_s: float
    end_s: float
    numbers: frozenset[int]
    partners: set[int] = field(default_factory=set)


class _Part(NamedTuple):
    """An operation of a forward, or one of a backward; numbers that no other has say which belong together."""

    direction: Direction
    start_s: float
    end_s: float
    thread: tuple[Any, Any]
    number: int | None


def pieces_of(trace: RankTrace) -> list[Piece]:
    """What a rank computed, by time. A piece ends where the direction changes, where a message is asked for, and where
    the pieces of the other direction that it belongs to change. On a device a piece lasts from its first kernel to its
    last, else from its first operation to its last."""
    runs = _runs(_parts(trace), [event.start_s for event in messages(trace, on_host=True)])
    runs = _split(_split(runs, "F"), "B")
    launches = trace.launches
    starts = [event.start_s for event in launches]
    found = []
    for run in runs:
        times = _device_times(run, trace, launches, starts) if launches else None
        begin_s, end_s = times or (run[0].start_s, max(part.end_s for part in run))
        numbers = frozenset(part.number for part in run if part.number is not None)
        found.append(Piece(run[0].direction, run[0].start_s, begin_s, end_s, numbers))
    holders: dict[int, list[int]] = {}
    for at, piece in enumerate(found):
        for number in piece.numbers:
            holders.setdefault(number, []).append(at)
    for piece in found:
        others = {at for number in piece.numbers for at in holders[number]}
        piece.partners |= {at for at in others if found[at].direction != piece.direction}
    return found


def messages(trace: RankTrace, *, on_host: bool) -> list[Event]:
    """The messages of a rank by time: as the host asks for them, or as long as they last where that is recorded. Those
    inside of an operation (around a ring of context parallelism, say) belong to it."""
    whole = _outermost(trace.operations, lambda event: not event.name.startswith(OTHER))
    found = [event for event in trace.events if MESSAGE.match(event.name)]
    found = [event for event in found if _holder(event, whole) is None]
    lasting = [event for event in found if event.category == "gpu_user_annotation"]
    lasting = lasting or [event for event in found if event.category == "user_annotation"]
    return found if on_host else lasting or found


class Stepped(NamedTuple):
    """An optimizer step: when the host asked for it, and its seconds."""

    asked_s: float
    start_s: float
    end_s: float


def optimizer_steps(trace: RankTrace) -> list[Stepped]:
    """When the optimizer stepped: its kernels where a device has them, else its operations."""
    found = []
    for event in trace.events:
        if event.name.startswith(_OPTIMIZER) and event.category != "gpu_user_annotation":
            launches = [each for each in trace.launches if event.start_s <= each.start_s <= event.end_s]
            found.append(Stepped(event.start_s, *(_lasting(trace, launches) or (event.start_s, event.end_s))))
    return found


def _parts(trace: RankTrace) -> list[_Part]:
    """The operations of forwards that have a backward, as the outermost that hold them, and those of backwards."""
    backwards = _outermost(trace.operations, lambda event: event.name.startswith(_BACKWARD))
    others = [event for event in trace.operations if not event.name.startswith(OTHER)]
    forwards = [event for event in others if _holder(event, backwards) is None]
    numbered: dict[int, list[Event]] = {}
    for event in forwards:
        if (number := event.number(_SEQUENCE)) is not None:
            numbered.setdefault(number, []).append(event)
    outer = _outermost(forwards, lambda event: True)
    found: list[_Part] = []
    for event in (event for own in backwards.values() for event in own):
        number, made = event.number(_SEQUENCE), None
        if number is not None:
            # operations before the one that autograd noted carry its number too, so the last of them is that one
            earlier = [each for each in numbered.get(number, ()) if each.start_s < event.start_s]
            made = max(earlier, default=None, key=lambda each: each.start_s)
        place = None if made is None else id(made)
        found.append(_Part("B", event.start_s, event.end_s, event.thread, place))
        if made is not None:
            whole = _holder(made, outer) or made
            found.append(_Part("F", whole.start_s, whole.end_s, whole.thread, place))
    return sorted(set(found), key=lambda part: part.start_s)


def _runs(parts: Sequence[_Part], asked_s: Sequence[float]) -> list[list[_Part]]:
    """Parts of one direction with no message between them, together."""
    runs: list[list[_Part]] = []
    for part in parts:
        before = runs[-1][-1] if runs else None
        same = before is not None and before.direction == part.direction
        if before and same and bisect.bisect(asked_s, before.start_s) == bisect.bisect(asked_s, part.start_s):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _split(runs: list[list[_Part]], direction: Direction) -> list[list[_Part]]:
    """The runs with those of one direction cut where what they belong to changes."""
    home: dict[int, int] = {}
    for at, run in enumerate(runs):
        for part in run:
            if part.direction != direction and part.number is not None:
                home.setdefault(part.number, at)
    found = []
    for run in runs:
        if run[0].direction != direction:
            found.append(run)
            continue
        current: list[_Part] = []
        last: int | None = None
        for part in run:
            belongs = home.get(part.number) if part.number is not None else None
            if current and belongs is not None and last is not None and belongs != last:
                found.append(current)
                current = []
            current.append(part)
            last = belongs if belongs is not None else last
        found.append(current)
    return found


def _device_times(
    run: Sequence[_Part], trace: RankTrace, launches: Sequence[Event], starts: Sequence[float]
) -> tuple[float, float] | None:
    """When the kernels that a run launched began and ended; those that move data do not count."""
    begin_s, end_s = run[0].start_s, max(part.end_s for part in run)
    inside = launches[bisect.bisect_left(starts, begin_s) : bisect.bisect_right(starts, end_s)]
    threads = {part.thread for part in run}
    return _lasting(trace, [each for each in inside if each.thread in threads])


def _lasting(trace: RankTrace, launches: Sequence[Event]) -> tuple[float, float] | None:
    """From the first kernel launched to the last, without those that move data."""
    kernels = [trace.launched[each.args["correlation"]] for each in launches]
    kernels = [each for each in kernels if not COMMUNICATION.search(each.name)]
    return (min(each.start_s for each in kernels), max(each.end_s for each in kernels)) if kernels else None


Threads = dict[tuple[Any, Any], list[Event]]
"""Events of every thread by time, none of which holds another."""


def _outermost(events: Sequence[Event], wanted: Callable[[Event], bool]) -> Threads:
    """The events wanted that no other of them holds, by thread."""
    found: Threads = {}
    for event in events:
        if wanted(event):
            own = found.setdefault(event.thread, [])
            if not own or event.start_s >= own[-1].end_s:
                own.append(event)
    return found


def _holder(event: Event, threads: Threads) -> Event | None:
    """The event of the same thread that holds one."""
    own = threads.get(event.thread, [])
    at = bisect.bisect_right(own, event.start_s, key=lambda each: each.start_s) - 1
    return own[at] if at >= 0 and event.start_s < own[at].end_s else None
