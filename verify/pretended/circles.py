"""Circles of waits between calls of several communicators, and how many calls must be able to run at the same time.

A call of NCCL is a kernel that stays on the device until every peer's has come. What NCCL guarantees between
communicators is little (user guide, "Using multiple NCCL communicators concurrently"): all operations of a device need
one total order that is the same on all ranks, by streams' waits or by synchronization; since 2.26 with
`NCCL_LAUNCH_ORDER_IMPLICIT` it is the order in which the host launches them. Before that the guide said that operations
on different streams "might work provided they can fit within the GPU". So there are three questions:

- `circle`: a graph whose nodes are calls, those of all members being one node, has an edge from each call to those that
  a stream, an event or a wait of the host keeps until it is over. A circle hangs on any device.
- `launch-circle`: the same with an edge between calls that one thread launches one after the other. It hangs where the
  device runs one call at a time.
- `does-not-fit`: calls whose order nothing says (message lanes and gradient reductions next to the compute lane) must
  be able to run at the same time, else two ranks may each run the one that the other has not come to. Each takes at
  least `communicators.min_ctas` multiprocessors, and at most `max_ctas`.

A call is one launch, also an all-to-all, which NCCL makes of sends and receives in a group.
"""

from __future__ import annotations

import graphlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .calls import MESSAGES, Call, Place, RankCalls
from .order import MATCHING, OrderFault, faults

MULTIPROCESSORS = 132
"""Of an H100 (NVIDIA H100 white paper, SXM5), which pretended CUDA says it is."""

LEAST_CTAS = 1
MOST_CTAS = 32
"""Thread blocks of a call, each of which takes a multiprocessor at worst, where no key says how many (NCCL's user
guide, `ncclConfig_t`: `minCTAs`, `maxCTAs`)."""

Node = tuple[str, str, int]
"""A communicator, whose calls of it are meant (all of them, or a pair of ranks), and their number."""

Edge = tuple[Call, Call]


@dataclass(frozen=True)
class AtOnce:
    """How many calls of a rank may have to run at the same time: one of each of these lines of communicators, whose
    calls come one after the other, and how many multiprocessors they take at least and at most."""

    rank: int
    lines: tuple[tuple[str, ...], ...]
    least_ctas: int
    most_ctas: int

    def __str__(self) -> str:
        count = len(self.lines)
        lines = "; ".join(", ".join(line) for line in self.lines)
        return (
            f"rank {self.rank}: {count} call{'s' * (count > 1)} at a time at most (of {lines}), "
            f"on {self.least_ctas} to {self.most_ctas} of {MULTIPROCESSORS} multiprocessors"
        )


def order_faults(ranks: Sequence[RankCalls]) -> list[OrderFault]:
    """Everything that is wrong with the order of calls. Where members' calls do not match, numbers do not say which
    meet, and nothing is said of circles."""
    found = faults(ranks)
    matched = not any(fault.rule in MATCHING for fault in found)
    together = [each for each in map(at_once, ranks) if each is not None]
    return [*found, *(circles(ranks) if matched else ()), *does_not_fit(together)]


def circles(ranks: Sequence[RankCalls]) -> list[OrderFault]:
    """The first circle, by streams or else by launches."""
    nodes = _nodes(ranks)
    of_place = {rank.rank: {call.place: call for call in rank.calls} for rank in ranks}
    for rule, before in (("circle", _after), ("launch-circle", _after_or_launched)):
        edges: dict[Node, dict[Node, Edge]] = defaultdict(dict)
        for rank in ranks:
            for call in rank.calls:
                for place in before(call):
                    earlier = of_place[rank.rank].get(place)
                    if earlier is not None and earlier.communicator.key != call.communicator.key:
                        edges[nodes[rank.rank, call.place]].setdefault(nodes[rank.rank, place], (earlier, call))
                if call.number and (earlier := of_place[rank.rank].get((call.communicator.key, call.number - 1))):
                    edges[nodes[rank.rank, call.place]].setdefault(nodes[rank.rank, earlier.place], (earlier, call))
        try:
            graphlib.TopologicalSorter(edges).prepare()
        except graphlib.CycleError as error:
            return [_named(rule, error.args[1], edges)]
    return []


def _after(call: Call) -> Iterable[Place]:
    return call.after


def _after_or_launched(call: Call) -> Iterable[Place]:
    return (*call.after, call.launched) if call.launched is not None else call.after


def _nodes(ranks: Sequence[RankCalls]) -> dict[tuple[int, Place], Node]:
    """The node of every call of every rank."""
    found: dict[tuple[int, Place], Node] = {}
    for rank in ranks:
        numbers: defaultdict[tuple[str, str], int] = defaultdict(int)
        for call in rank.calls:
            of = "all"
            if call.op in MESSAGES:
                of = f"{rank.rank}-{call.peer}" if call.op == "send" else f"{call.peer}-{rank.rank}"
            found[rank.rank, call.place] = (call.communicator.key, of, numbers[call.communicator.key, of])
            numbers[call.communicator.key, of] += 1
    return found


def _named(rule: str, circle: Sequence[Node], edges: dict[Node, dict[Node, Edge]]) -> OrderFault:
    """A circle in words. In the list each node comes before the one that waits for it."""
    steps = [edges[later][earlier] for earlier, later in pairwise(circle)]
    # a communicator's own calls come one after the other anyway
    steps = [(earlier, call) for earlier, call in steps if earlier.communicator.key != call.communicator.key]
    words = [
        f"rank {call.rank} begins {call} on {call.communicator.key!r} after {earlier} on {earlier.communicator.key!r}"
        for earlier, call in steps
    ]
    return OrderFault(rule, tuple(sorted({call.rank for _, call in steps})), "; ".join(words))


def at_once(rank: RankCalls) -> AtOnce | None:
    """The calls of a rank that nothing orders, at most: its communicators in lines in which every call comes before or
    after each other one. None for a rank without calls."""
    by_key: defaultdict[str, list[Call]] = defaultdict(list)
    for call in rank.calls:
        by_key[call.communicator.key].append(call)
    lines: list[list[str]] = []
    for key, calls in by_key.items():
        for line in lines:
            if all(_are_ordered(calls, by_key[other]) for other in line):
                line.append(key)
                break
        else:
            lines.append([key])
    if not lines:
        return None
    options = {each.key: each.options for each in rank.communicators}
    least = sum(max(options[key].get("min_ctas") or LEAST_CTAS for key in line) for line in lines)
    most = sum(max(options[key].get("max_ctas") or MOST_CTAS for key in line) for line in lines)
    return AtOnce(rank.rank, tuple(map(tuple, lines)), least, max(least, most))


def _are_ordered(ours: Sequence[Call], theirs: Sequence[Call]) -> bool:
    """Whether each of `ours` comes before or after each of `theirs`: of theirs so many are over before one of ours, and
    so many begin after it."""
    their_last = [_last(call, ours[0].communicator.key) for call in theirs]  # ascending
    return all(
        _last(call, theirs[0].communicator.key) + 1 + len(theirs) - bisect_right(their_last, call.number - 1)
        == len(theirs)
        for call in ours
    )


def _last(call: Call, key: str) -> int:
    """The number of the last call of another communicator that is over before a call; -1 where there is none."""
    return next((number for other, number in call.after if other == key), -1)


def does_not_fit(ranks: Iterable[AtOnce]) -> list[OrderFault]:
    """Ranks whose calls do not run at the same time, however few multiprocessors each takes."""
    return [
        OrderFault("does-not-fit", (each.rank,), str(each).partition(": ")[2])
        for each in ranks
        if each.least_ctas > MULTIPROCESSORS
    ]
