"""What NCCL asks of registered buffers, in the logs of all ranks of a run, as rules.

`Registrations` reads of one rank which memory lies in which pool, which communicator has registered it, and which calls
are given what. NCCL's user guide ("User Buffer Registration"): source and destination are registered, on all members or
on none, else the behaviour is undefined; offsets are the same on all members; windows are registered by all together.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .log import Entry

RULES = {
    "outside-of-pool": "a call is given memory of a registered pool and memory outside of it, or a communicator with a "
    "registered pool is never given any of it",
    "registration-differs": "of the k-th calls of a communicator's members some are given registered memory, some not",
    "registered-in-another-order": "members register their communicators in another order than others, or pools whose "
    "memory has other sizes",
    "grown-after-registration": "a pool takes memory after it was registered",
    "used-after-deregistration": "a call is given memory of a pool that its communicator does not know, or no longer",
    "deregistered-late": "a communicator ends before its pool is deregistered",
}
"""Rule -> what it finds."""


@dataclass(frozen=True)
class Registered:
    """What one rank registered: by communicator the sizes that lay in the pool, in the order of the calls, and of each
    call of such a communicator whether all it was given lies there. `wrong` are faults that need no other rank."""

    pools: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    calls: Mapping[str, tuple[tuple[bool, str], ...]] = field(default_factory=dict)
    wrong: tuple[tuple[str, str], ...] = ()


@dataclass
class Registrations:
    """Reads the log of one rank, whose communicators are `keys` by number."""

    pools: dict[int, int] = field(default_factory=dict)
    sizes: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    known: dict[str, int] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    given: dict[str, tuple[int, ...]] = field(default_factory=dict)
    calls: defaultdict[str, list[tuple[bool, str]]] = field(default_factory=lambda: defaultdict(list))
    wrong: dict[tuple[str, str], str] = field(default_factory=dict)

    def read(self, entry: Entry, key: str) -> None:
        """One line of the log that is about pools, or a collective; `key` is the communicator's."""
        match entry.kind:
            case "in pool":
                pool, size = map(int, entry.place.split(":"))
                self.pools[int(entry.name)] = pool
                self.sizes[pool].append(size)
                for registered, of in self.known.items():
                    if of == pool:
                        self._say("grown-after-registration", registered, f"{size} bytes more")
            case "free":
                self.pools.pop(int(entry.name), None)
            case "register":
                self.known[key] = json.loads(entry.name)["pool"]
                self.given[key] = tuple(self.sizes[self.known[key]])
            case "deregister":
                self.known.pop(key, None)
                self.gone.add(key)
            case "shut down":
                if key in self.known:
                    self._say("deregistered-late", key, "it ends, and its pool is still registered")

    def calls_with(self, key: str, entry: Entry) -> None:
        """A collective of a communicator."""
        memory = {place if isinstance(place, int) else place[0] for place in (*entry.reads, *entry.writes)}
        inside = [self.pools.get(each) for each in memory]
        said = f"{entry.name.split()[0]} in {entry.label}"
        if key not in self.known:
            if any(inside):
                self._say("used-after-deregistration", key, said)
            return
        of_pool = [pool == self.known[key] for pool in inside]
        if any(of_pool) and not all(of_pool):
            self._say("outside-of-pool", key, said)
        self.calls[key].append((all(of_pool), said))

    def found(self) -> Registered:
        """What was read."""
        for key, calls in self.calls.items():
            if not any(inside for inside, _ in calls):
                self._say("outside-of-pool", key, f"none of its {len(calls)} calls is given memory of its pool")
        return Registered(
            dict(self.given),
            {key: tuple(calls) for key, calls in self.calls.items()},
            tuple((rule, f"communicator {key!r}: {what}") for (rule, key), what in self.wrong.items()),
        )

    def _say(self, rule: str, key: str, what: str) -> None:
        self.wrong.setdefault((rule, key), what)


def registration_faults(of_ranks: Mapping[int, Registered]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Rule, ranks and words of every fault, of each rule and communicator the first."""
    for rank, found in of_ranks.items():
        yield from ((rule, (rank,), what) for rule, what in found.wrong)
    keys = dict.fromkeys(key for found in of_ranks.values() for key in found.pools)
    for key in keys:
        members = {rank: found for rank, found in of_ranks.items() if key in found.pools}
        yield from _in_order(key, members)
        calls = zip(*(found.calls.get(key, ()) for found in members.values()), strict=False)
        for number, call in enumerate(calls):
            if odd := _odd(list(members), [inside for inside, _ in call]):
                yield "registration-differs", odd, f"communicator {key!r}, call {number}: {call[0][1]}"
                break


def _in_order(key: str, members: Mapping[int, Registered]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """What members had registered before, of what they share, and the sizes of their pools."""
    shared = set.intersection(*(set(found.pools) for found in members.values()))
    before = [[each for each in _until(found.pools, key) if each in shared] for found in members.values()]
    sizes = [found.pools[key] for found in members.values()]
    rule = "registered-in-another-order"
    if odd := _odd(list(members), list(zip(map(tuple, before), sizes, strict=True))):
        yield rule, odd, f"communicator {key!r}: after {before}, of {sizes} bytes"


def _until(keys: Mapping[str, object], key: str) -> list[str]:
    found = list(keys)
    return found[: found.index(key)]


def _odd(ranks: Sequence[int], values: Sequence[object]) -> tuple[int, ...]:
    """The ranks that are not with the most; all where there is no majority."""
    counts = Counter(values)
    if len(counts) == 1:
        return ()
    (first, most), (_, second) = counts.most_common(2)
    return tuple(rank for rank, value in zip(ranks, values, strict=True) if most == second or value != first)
