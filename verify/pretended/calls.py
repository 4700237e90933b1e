"""`RankCalls`: what one rank gave to NCCL's communicators, read from its log, and what each call comes after."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .log import Entry
from .races import Clock, Streams
from .registered import Registered, Registrations

MESSAGES = ("send", "recv")

Place = tuple[str, int]
"""A communicator, and the number of a call among those that a rank gave it."""


@dataclass(frozen=True)
class Communicator:
    """One that a rank opened: its members, as global ranks in their order, and the options it was opened with. `key` is
    its name, with a number where the name is used again."""

    key: str
    ranks: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Call:
    """The `number`-th call of a rank on a communicator. `count` elements of `dtype` of `element_bytes` are given (of a
    receive: taken); `sent` and `received` are those of each member in an all-to-all. `peer` is the global rank at the
    other end of a message. `after` are the calls on other communicators that are over when it begins, and `launched`
    the one that its thread made before; of each communicator the last. `asked` is the group that our code called."""

    rank: int
    communicator: Communicator
    number: int
    op: str
    dtype: str
    element_bytes: int
    count: int
    label: str
    thread: int
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    reduction: str = ""
    peer: int | None = None
    after: tuple[Place, ...] = ()
    launched: Place | None = None
    asked: str | None = None

    @property
    def place(self) -> Place:
        """Which call of which communicator it is."""
        return self.communicator.key, self.number

    @property
    def sent_bytes(self) -> int:
        """Bytes that leave the rank, as `Group` counts them."""
        size, payload = len(self.communicator.ranks), self.count * self.element_bytes
        match self.op:
            case "all_to_all":
                return (sum(self.sent) - self.sent[self.communicator.ranks.index(self.rank)]) * self.element_bytes
            case "all_gather":
                return payload * (size - 1)
            case "all_reduce":
                return -(-2 * (size - 1) * payload // size)
            case "reduce_scatter":
                return -(-(size - 1) * payload // size)
        return payload if self.op == "send" else 0

    def __str__(self) -> str:
        where = f" in {self.label}" if self.label else ""
        peer = "" if self.peer is None else f" {'to' if self.op == 'send' else 'from'} rank {self.peer}"
        return f"{self.op}{peer} of {self.count} x {self.dtype}{where}"


@dataclass(frozen=True)
class Asked:
    """A call of one of our groups, and what went over NCCL for it. `recorded_bytes` is None for one that is not
    recorded (a barrier)."""

    rank: int
    group: str
    label: str
    recorded_bytes: int | None
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class RankCalls:
    """What a rank gave to communicators, in the order of its log. `given_up` are calls whose peers did not come,
    `noticed` what the rank itself found, and `ended` says that it came to its end. `shared` says of each stream that
    was handed out more than once who has it."""

    rank: int
    communicators: tuple[Communicator, ...]
    calls: tuple[Call, ...]
    asked: tuple[Asked, ...] = ()
    given_up: tuple[Place, ...] = ()
    noticed: tuple[str, ...] = ()
    ended: bool = True
    shared: tuple[str, ...] = ()
    registered: Registered = field(default_factory=Registered)


@dataclass
class _Open:
    """An `Asked` that goes on."""

    group: str
    label: str
    recorded_bytes: int | None = None
    calls: list[Call] = field(default_factory=list)


class _Reader:
    """Reads the log of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.streams = Streams()
        self.communicators: dict[int, Communicator] = {}
        # By stream who asked for one and got it, and by communicator its stream and what that had been given with each
        # of its calls.
        self.owners: defaultdict[int, list[str]] = defaultdict(list)
        self.places: dict[int, tuple[int, list[int]]] = {}
        self.names: defaultdict[str, int] = defaultdict(int)
        self.details: dict[int, dict[str, Any]] = {}
        self.launched: dict[int, Place] = {}
        self.calls: list[Call] = []
        self.open: dict[int, _Open] = {}
        self.asked: list[Asked] = []
        self.given_up: list[Place] = []
        self.noticed: list[str] = []
        self.ended = False
        self.registrations = Registrations()

    def read(self, entry: Entry) -> None:
        """One line of the log."""
        match entry.kind:
            case "communicator":
                self._opens(entry)
            case "call":
                self.details[entry.thread] = json.loads(entry.name)
            case "stream":
                self.owners[entry.stream].append(entry.name)
            case "in pool" | "free":
                self.registrations.read(entry, "")
            case "register" | "deregister" | "shut down":
                # of one that was opened before the rank's log begins nothing is known
                if (known := self.communicators.get(json.loads(entry.name)["communicator"])) is not None:
                    self.registrations.read(entry, known.key)
            case "op":
                self.streams.gives(entry)
            case "collective":
                self.streams.gives(entry)
                self._calls(entry)
            case "asked":
                self._close(entry.thread)
                self.open[entry.thread] = _Open(entry.name, entry.label)
            case "recorded":
                if (asked := self.open.get(entry.thread)) is not None:
                    asked.recorded_bytes = (asked.recorded_bytes or 0) + int(entry.name)
            case "given up":
                said = json.loads(entry.name)
                self.given_up.append((self.communicators[said["communicator"]].key, said["number"]))
            case "ended":
                self.ended = True
            case "noticed":
                self.noticed.append(entry.name)
            case _:
                self.streams.orders(entry)

    def found(self) -> RankCalls:
        for thread in list(self.open) if self.ended else ():
            self._close(thread)
        return RankCalls(
            self.rank,
            tuple(self.communicators.values()),
            tuple(self.calls),
            tuple(self.asked),
            tuple(self.given_up),
            tuple(self.noticed),
            self.ended,
            tuple(f"stream {stream}: {', '.join(of)}" for stream, of in self.owners.items() if len(of) > 1),
            self.registrations.found(),
        )

    def _opens(self, entry: Entry) -> None:
        options = json.loads(entry.name)
        number, name, ranks = (options.pop(key) for key in ("communicator", "name", "ranks"))
        used = self.names[name]
        self.names[name] += 1
        made = Communicator(name + (f" ({used + 1})" if used else ""), tuple(ranks), options)
        self.communicators[number], self.places[number] = made, (entry.stream, [])
        self.owners[entry.stream][-1:] = [f"communicator {made.key!r}"]

    def _calls(self, entry: Entry) -> None:
        details = self.details.pop(entry.thread)
        communicator = self.communicators[details["communicator"]]
        clock, (_, given) = self.streams.streams[entry.stream], self.places[details["communicator"]]
        known = self.open.get(entry.thread)
        peer = details.get("peer")
        call = Call(
            self.rank,
            communicator,
            len(given),
            details["op"],
            details["dtype"],
            details["bytes"],
            details["count"],
            entry.label,
            entry.thread,
            tuple(details.get("sent", ())),
            tuple(details.get("received", ())),
            details.get("reduction", ""),
            None if peer is None else communicator.ranks[peer],
            self._after(clock, communicator),
            self.launched.get(entry.thread),
            None if known is None or details["op"] in MESSAGES else known.group,
        )
        given.append(clock[entry.stream])
        self.registrations.calls_with(communicator.key, entry)
        self.launched[entry.thread] = call.place
        self.calls.append(call)
        if known is not None and call.op not in MESSAGES:
            known.calls.append(call)

    def _after(self, clock: Clock, own: Communicator) -> tuple[Place, ...]:
        """The last calls that a stream comes after, of each other communicator, of one that has the same stream too."""
        over = {
            self.communicators[number].key: bisect_right(given, clock.get(stream, 0)) - 1
            for number, (stream, given) in self.places.items()
        }
        return tuple((key, last) for key, last in over.items() if key != own.key and last >= 0)

    def _close(self, thread: int) -> None:
        if (known := self.open.pop(thread, None)) is not None:
            self.asked.append(Asked(self.rank, known.group, known.label, known.recorded_bytes, tuple(known.calls)))


def calls_of(entries: Iterable[Entry]) -> RankCalls | None:
    """The calls in the log of a process, of its first run where it has several; None for one that was no rank."""
    reader: _Reader | None = None
    for entry in entries:
        if entry.kind == "rank":
            if reader is not None:
                break
            reader = _Reader(int(entry.name))
        elif reader is not None:
            reader.read(entry)
    return None if reader is None else reader.found()
