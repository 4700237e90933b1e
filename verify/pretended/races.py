"""`races`: uses of memory by several streams that nothing orders, in what a process gave to its streams.

A stream does its work in the order in which it was given. Between streams order comes from events, from waits of one
stream for another, and from the host where a thread waits for a stream and then gives work to another; one thread knows
nothing of what others have waited for. The caching allocator gives memory that is let go of to the next that asks on
the stream it was allocated on, when that one and those that `record_stream` has named have done what they were given by
then: other streams' work must be over for one of them (torch, "CUDA semantics", "Memory management"). Page-locked
memory of the host that copies read and write is looked at in the same way, but for its end: its allocator waits for the
copies.

Memory that a capture allocates is given to captures of the same pool alone. So once it is captured, replays that use it
hold nobody up; all replays of a pool write to one memory more, which stands for the pool: two that may go on at the
same time are `written-twice` there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .log import Entry, Place

REPLAY = "graph replay"

Clock = dict[int, int]
"""How much of each stream's work is over, by stream."""


@dataclass(frozen=True)
class Use:
    """The `number`-th piece of work of its stream."""

    entry: Entry
    number: int

    def __str__(self) -> str:
        where = f" in {self.entry.label}" if self.entry.label else ""
        return f"{self.entry.name} on stream {self.entry.stream}{where}"


@dataclass(frozen=True)
class Race:
    """Two uses of one piece of memory, the second of which nothing holds up until the first is over; `second` is None
    where the memory is given to others meanwhile."""

    rule: str
    memory: int
    first: Use
    second: Use | None

    def __str__(self) -> str:
        second = "it is given to others" if self.second is None else str(self.second)
        return f"{self.rule}: memory {self.memory}: {second}, while {self.first} may go on"


Report = Callable[[str, int, Use, Use | None], None]
"""Takes the rule, the memory and the two uses of a race."""


@dataclass
class _Memory:
    """What is known of memory that is allocated."""

    stream: int
    written: Use | None = None
    reads: dict[int, Use] = field(default_factory=dict)
    recorded: set[int] = field(default_factory=set)
    in_graph: bool = False

    @property
    def uses(self) -> list[Use]:
        """The last use of each stream."""
        last = dict(self.reads)
        if self.written is not None:
            stream = self.written.entry.stream
            if stream not in last or last[stream].number < self.written.number:
                last[stream] = self.written
        return list(last.values())


class Streams:
    """What every stream and every thread of the host knows to be over."""

    def __init__(self) -> None:
        self.streams: defaultdict[int, Clock] = defaultdict(dict)
        self.threads: defaultdict[int, Clock] = defaultdict(dict)
        self._events: dict[str, Clock] = {}

    def gives(self, entry: Entry) -> Use:
        """A piece of work more on a stream, after what its thread knows."""
        clock = self.streams[entry.stream]
        _join(clock, self.threads[entry.thread])
        clock[entry.stream] = clock.get(entry.stream, 0) + 1
        return Use(entry, clock[entry.stream])

    def is_over(self, use: Use, stream: int) -> bool:
        """Whether a stream, or the host in its name, knows that a use is over."""
        return use.entry.stream == stream or self.streams[stream].get(use.entry.stream, 0) >= use.number

    def waited_for_by_all(self, streams: Iterable[int], thread: int) -> Clock:
        """What is over when all these streams have done what they were given, as a thread knows it."""
        clock = dict(self.threads[thread])
        for stream in streams:
            _join(clock, self.streams[stream])
        return clock

    def orders(self, entry: Entry) -> None:
        """Events, waits, threads."""
        if entry.kind == "record":
            clock = dict(self.streams[entry.stream])
            _join(clock, self.threads[entry.thread])
            self._events[entry.name] = clock
        elif entry.kind == "wait":
            _join(self.streams[entry.stream], self._events.get(entry.name, {}))
        elif entry.kind == "host waits for event":
            _join(self.threads[entry.thread], self._events.get(entry.name, {}))
        elif entry.kind == "host waits for stream":
            _join(self.threads[entry.thread], self.streams[entry.stream])
        elif entry.kind == "host waits for device":
            for clock in list(self.streams.values()):
                _join(self.threads[entry.thread], clock)


def races(entries: Iterable[Entry]) -> list[Race]:
    """Every race between a use and the next, or the end of its memory, each pair of operators and labels once."""
    streams, memories = Streams(), dict[int, dict[Place, _Memory]]()
    found: dict[tuple[object, ...], Race] = {}

    def race(rule: str, memory: int, first: Use, second: Use | None) -> None:
        key = rule, *(None if use is None else (use.entry.name, use.entry.label) for use in (first, second))
        found.setdefault(key, Race(rule, memory, first, second))

    for entry in entries:
        if entry.kind in ("op", "collective"):
            use = streams.gives(entry)
            for place in entry.reads:
                _reads(memories.get(_memory(place), {}), place, use, streams, race)
            for place in entry.writes:
                _writes(memories.get(_memory(place), {}), place, use, streams, race)
        elif entry.kind in ("allocate", "allocate host"):
            memories[int(entry.name)] = {int(entry.name): _Memory(entry.stream)}
        elif entry.kind == "in graph":
            memories[int(entry.name)][int(entry.name)].in_graph = True
        elif entry.kind == "free host":
            memories.pop(int(entry.name), None)
        elif entry.kind == "record_stream":
            for known in memories.get(int(entry.name), {}).values():
                known.recorded.add(entry.stream)
        elif entry.kind == "free":
            for known in memories.pop(int(entry.name), {}).values():
                clock = streams.waited_for_by_all([known.stream, *known.recorded], entry.thread)
                for use in known.uses:
                    if known.in_graph and use.entry.name == REPLAY:
                        continue
                    if clock.get(use.entry.stream, 0) < use.number:
                        race("freed-in-use", int(entry.name), use, None)
        else:
            streams.orders(entry)
    return list(found.values())


def _reads(known: dict[Place, _Memory], place: Place, use: Use, streams: Streams, race: Report) -> None:
    """A read of a place, of a memory that is `known` by its places; none where it was allocated before."""
    if not known:
        return
    for each in _overlapping(known, place):
        if each.written is not None and not streams.is_over(each.written, use.entry.stream):
            race("read-before-written", _memory(place), each.written, use)
    _own(known, place).reads[use.entry.stream] = use


def _writes(known: dict[Place, _Memory], place: Place, use: Use, streams: Streams, race: Report) -> None:
    if not known:
        return
    for each in _overlapping(known, place):
        for before in each.uses:
            if not streams.is_over(before, use.entry.stream):
                rule = "written-twice" if before is each.written else "written-while-read"
                race(rule, _memory(place), before, use)
    own = _own(known, place)
    own.written, own.reads = use, {}


def _memory(place: Place) -> int:
    return place if isinstance(place, int) else place[0]


def _own(known: dict[Place, _Memory], place: Place) -> _Memory:
    return known.setdefault(place, _Memory(known[_memory(place)].stream))


def _overlapping(known: dict[Place, _Memory], place: Place) -> list[_Memory]:
    """What is known of places that have a byte in common with one; a whole memory has all."""
    if isinstance(place, int):
        return list(known.values())
    _, first, last = place
    return [each for other, each in known.items() if isinstance(other, int) or (other[1] < last and first < other[2])]


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number
