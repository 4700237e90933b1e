"""The events of one rank's trace, as torch's profiler (Kineto) exports them. Nothing in a trace is executed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeGuard

from ..base.errors import TimelineError

OTHER = ("c10d::", "gloo:", "nccl:", "record_param_comms", "PP:", "ProfilerStep", "autograd::engine")
"""Operations that move data or only enclose others."""

_OPERATIONS = ("cpu_op", "Operator")
_KERNELS = ("kernel", "Kernel")
_CALLS = ("cuda_runtime", "cuda_driver", "Runtime")
"""Categories as they are called today, and as they were until torch 1.12."""

_MOST_US = 1e18
"""Microseconds of 30,000 years: more is no time."""


class Event(NamedTuple):
    """One complete event: its name and category, its thread, seconds, and what the profiler says besides."""

    name: str
    category: str
    thread: tuple[Any, Any]
    start_s: float
    end_s: float
    args: Mapping[str, Any] = {}

    def number(self, key: str) -> int | None:
        """A whole number of what the profiler says besides."""
        value = self.args.get(key)
        return value if type(value) is int else None


@dataclass(frozen=True)
class RankTrace:
    """What one rank recorded: its complete events by the time at which they begin, seconds from `base_ns`, which counts
    from 1970."""

    name: str
    global_rank: int
    base_ns: int
    events: Sequence[Event]

    @cached_property
    def operations(self) -> list[Event]:
        """What the host's threads computed, those that enclose others before these."""
        return [event for event in self.events if event.category in _OPERATIONS]

    @cached_property
    def kernels(self) -> list[Event]:
        """What ran on a device."""
        return [event for event in self.events if event.category in _KERNELS]

    @cached_property
    def launched(self) -> dict[int, Event]:
        """The number of a launch -> the kernel that it launched."""
        return {number: kernel for kernel in self.kernels if (number := kernel.number("correlation")) is not None}

    @cached_property
    def launches(self) -> list[Event]:
        """The host's calls that launched a kernel of this trace."""
        return [
            event for event in self.events if event.category in _CALLS and event.number("correlation") in self.launched
        ]


def is_trace(document: Any) -> bool:
    """Whether a JSON value is a trace: an object with `traceEvents`."""
    return isinstance(document, dict) and isinstance(document.get("traceEvents"), list)


def complete_events(name: str, document: Any) -> list[Event]:
    """The complete events of a trace by time; one of negative duration has no length. Raises `TimelineError` for one
    without name, ts or dur, and for a thread that is no number or name."""
    found = []
    for event in document["traceEvents"]:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        start, length, args = event.get("ts"), event.get("dur", 0), event.get("args")
        thread = (event.get("pid"), event.get("tid"))
        if not (
            _is_microseconds(start)
            and _is_microseconds(length)
            and isinstance(event.get("name"), str)
            and all(each is None or isinstance(each, int | float | str) for each in thread)
        ):
            raise TimelineError(
                f"{name}: an event has no name, ts, dur, pid or tid that could be read: {str(event)[:80]}."
            )
        times = (start * 1e-6, (start + max(length, 0)) * 1e-6)
        found.append(
            Event(event["name"], str(event.get("cat", "")), thread, *times, args if isinstance(args, dict) else {})
        )
    return sorted(found, key=lambda event: (event.start_s, -event.end_s))


def _is_microseconds(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and abs(value) < _MOST_US


def read_rank(name: str, document: Any, known: Mapping[int, object]) -> RankTrace:
    """One rank's trace. It says whose it is, else it is that of the next rank. Raises `TimelineError` for a rank that
    is known, and for events that cannot be read."""
    info = document.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    rank = rank if type(rank) is int and 0 <= rank < 2**31 else len(known)
    if rank in known:
        raise TimelineError(f"{name}: another trace is of rank {rank} too. Give one of each rank.")
    base = document.get("baseTimeNanoseconds", 0)
    base = base if type(base) is int and 0 <= base < 2**63 else 0
    return RankTrace(name, rank, base, complete_events(name, document))
