"""What NCCL asks of the order of calls, in the logs of all ranks of a run (`calls`), as rules.

A communicator matches the calls of its members by their order alone: the k-th of one meets the k-th of every other, and
nothing checks that they are the same (NCCL's user guide, "Collective Operations": the same count and datatype on all
ranks, else the behaviour is undefined, "including hangs, crashes, or data corruption"). A send meets the receive of its
peer, in the order of the messages between these two.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from .calls import MESSAGES, Call, RankCalls
from .registered import RULES as REGISTERED_RULES
from .registered import registration_faults

RULES = {
    "call-differs": "the calls of a communicator's members differ in kind, format, action or layer, number by number",
    "count-differs": "they are the same call, but of other numbers of elements",
    "call-missing": "a member makes fewer calls than the others",
    "message-without-partner": "a send has no receive of its peer, or a receive no send",
    "wrong-communicator": "a call of a group goes over the communicator of another one",
    "other-bytes": "a communicator carries other bytes than the group's call records",
    "other-than-program": "a rank computes or sends something else in an action than `core/program` says",
    "without-action": "a call of a step belongs to no action, though the program has none outside of actions",
    "split-differs": "ranks split communicators in another order, or into others, than they expect",
    "shared-stream": "torch's pool had no stream left, and gave one that a communicator or lane has already",
    "ends-under-graph": "a communicator ends while a graph is there that has captured its calls: NCCL waits for it",
    "given-up": "a call's peers did not come, so that the run would hang",
    **REGISTERED_RULES,
    "circle": "calls wait for each other in a circle, whatever runs at the same time (`circles`)",
    "launch-circle": "they do where the device runs one call at a time, in the order of launches (`circles`)",
    "does-not-fit": "calls that may have to run at the same time need more multiprocessors than there are (`circles`)",
}
"""Rule -> what it finds."""

MATCHING = ("call-differs", "count-differs", "call-missing", "message-without-partner")
"""Rules about whether the calls of members match."""

UNENDED = ("call-missing", "message-without-partner")
"""What says nothing of a run that ended before its time."""

PADDING_BYTES = 16
"""Of each member, at most: what fills up parts that are summed in fp32 (`Group._wide_all_reduce`)."""


@dataclass(frozen=True)
class OrderFault:
    """A rule that calls break: the ranks that do, or among which the fault is, and where."""

    rule: str
    ranks: tuple[int, ...]
    what: str

    def __str__(self) -> str:
        named = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}"
        return f"{self.rule}: {named}: {self.what}"


def faults(ranks: Sequence[RankCalls]) -> list[OrderFault]:
    """Every fault but circles, the first one of each communicator and rule: those after it follow from it."""
    found = [
        *_among_members(ranks),
        *_splits(ranks),
        *_among_peers(ranks),
        *(fault for rank in ranks for fault in _of_rank(rank)),
        *(OrderFault(*fault) for fault in registration_faults({rank.rank: rank.registered for rank in ranks})),
    ]
    whole = all(rank.ended for rank in ranks)
    return [fault for fault in found if whole or fault.rule not in UNENDED]


def _among_members(ranks: Sequence[RankCalls]) -> Iterator[OrderFault]:
    """Collectives of each communicator, member by member and number by number."""
    members: defaultdict[str, dict[int, list[Call]]] = defaultdict(dict)
    for rank in ranks:
        for communicator in rank.communicators:
            members[communicator.key].setdefault(rank.rank, [])
        for call in rank.calls:
            if call.op not in MESSAGES:
                members[call.communicator.key][rank.rank].append(call)
    for key, by_rank in members.items():
        yield from _compared(key, by_rank)


def _splits(ranks: Sequence[RankCalls]) -> Iterator[OrderFault]:
    """A split is a call of all members of the communicator that is split, and those of one colour get one together."""
    by_rank = {rank.rank: [each for each in rank.communicators if each.options.get("split_from")] for rank in ranks}
    for number in range(max(map(len, by_rank.values()), default=0)):
        short = tuple(rank for rank, splits in by_rank.items() if len(splits) <= number)
        if short:
            other = next(splits[number] for splits in by_rank.values() if len(splits) > number)
            yield OrderFault("split-differs", short, f"split {number}: none here, {other.key!r} elsewhere")
            return
        by_color: defaultdict[int, dict[int, tuple[int, ...]]] = defaultdict(dict)
        for rank, splits in by_rank.items():
            by_color[splits[number].options["split_color"]][rank] = splits[number].ranks
        for came in by_color.values():
            if odd := tuple(rank for rank, expected in came.items() if sorted(came) != sorted(expected)):
                names = ", ".join(sorted({by_rank[rank][number].key for rank in came}))
                yield OrderFault("split-differs", odd, f"split {number} ({names}): ranks {sorted(came)} come together")
                return


def _compared(key: str, by_rank: dict[int, list[Call]]) -> Iterator[OrderFault]:
    least, most = (choose(map(len, by_rank.values())) for choose in (min, max))
    for number in range(least):
        calls = {rank: calls[number] for rank, calls in by_rank.items()}
        if odd := _odd(calls, lambda call: (call.op, call.dtype, call.reduction, _work(call))):
            yield OrderFault("call-differs", odd, _said(key, number, calls))
            return
        if odd := _other_counts(calls):
            yield OrderFault("count-differs", odd, _said(key, number, calls))
            return
    if least < most:
        short = tuple(sorted(rank for rank, calls in by_rank.items() if len(calls) < most))
        other = next(calls for calls in by_rank.values() if len(calls) == most)
        yield OrderFault("call-missing", short, f"communicator {key!r}, call {least}: no {other[least]}")


def _work(call: Call) -> str:
    """What a call is for, on whatever stage: STEP is called after the first of its rank."""
    return call.label.lstrip("0123456789")


def _odd(calls: dict[int, Call], what: Callable[[Call], object]) -> tuple[int, ...]:
    """The ranks that are not with the most; all where there is no majority."""
    counts = Counter(map(what, calls.values()))
    if len(counts) == 1:
        return ()
    (first, most), (_, second) = counts.most_common(2)
    return tuple(sorted(rank for rank, call in calls.items() if most == second or what(call) != first))


def _other_counts(calls: dict[int, Call]) -> tuple[int, ...]:
    one = next(iter(calls.values()))
    if one.op != "all_to_all":
        return _odd(calls, lambda call: call.count)
    places = {rank: place for place, rank in enumerate(one.communicator.ranks)}
    found = {
        rank
        for sender, sends in calls.items()
        for receiver, receives in calls.items()
        if sends.sent[places[receiver]] != receives.received[places[sender]]
        for rank in (sender, receiver)
    }
    return tuple(sorted(found))


def _said(key: str, number: int, calls: dict[int, Call]) -> str:
    by_words: defaultdict[str, list[int]] = defaultdict(list)
    for rank, call in sorted(calls.items()):
        by_words[str(call)].append(rank)
    words = "; ".join(f"{', '.join(map(str, ranks))}: {said}" for said, ranks in by_words.items())
    return f"communicator {key!r}, call {number}: {words}"


def messages(ranks: Sequence[RankCalls]) -> dict[tuple[str, int, int], tuple[list[Call], list[Call]]]:
    """Sends and receives of each communicator from one rank to another, in order."""
    found: defaultdict[tuple[str, int, int], tuple[list[Call], list[Call]]] = defaultdict(lambda: ([], []))
    for rank in ranks:
        for call in rank.calls:
            if call.op in MESSAGES and call.peer is not None:
                ends = (rank.rank, call.peer) if call.op == "send" else (call.peer, rank.rank)
                found[(call.communicator.key, *ends)][call.op == "recv"].append(call)
    return dict(found)


def _among_peers(ranks: Sequence[RankCalls]) -> Iterator[OrderFault]:
    for (key, source, destination), (sends, receives) in messages(ranks).items():
        fault = "message-without-partner"
        for number, (send, receive) in enumerate(zip(sends, receives, strict=False)):
            if (send.count, send.dtype) != (receive.count, receive.dtype):
                calls = {source: send, destination: replace(receive, label="")}
                yield OrderFault("count-differs", (source, destination), _said(key, number, calls))
                break
        else:
            if len(sends) > len(receives):
                said = f"communicator {key!r}: {sends[len(receives)]} is never received"
                yield OrderFault(fault, (destination,), said)
            elif len(receives) > len(sends):
                after = f", after {sends[-1]}" if sends else ""
                number = len(sends)
                said = f"communicator {key!r}: nothing is sent for receive {number} from rank {source}{after}"
                yield OrderFault(fault, (source,), said)


def _of_rank(rank: RankCalls) -> Iterator[OrderFault]:
    """What needs no other rank: groups and their communicators, bytes, actions."""
    wrong = _firsts(
        (call.asked, f"group {call.asked!r} goes over communicator {call.communicator.key!r}: {call}")
        for call in rank.calls
        if call.asked is not None and call.asked != call.communicator.key.partition(" ")[0]
    )
    yield from (OrderFault("wrong-communicator", (rank.rank,), said) for said in wrong)
    other = _firsts(
        (
            asked.group,
            f"group {asked.group!r} records {asked.recorded_bytes} bytes, {carried} are sent in {asked.label}",
        )
        for asked in rank.asked
        if asked.recorded_bytes is not None
        for carried in [sum(call.sent_bytes for call in asked.calls)]
        if not 0 <= carried - asked.recorded_bytes <= _padding(asked.calls)
    )
    yield from (OrderFault("other-bytes", (rank.rank,), said) for said in other)
    if rank.given_up:
        calls = {call.place: call for call in rank.calls}
        first = min(rank.given_up, key=list(calls).index)
        said = f"communicator {first[0]!r}, call {first[1]}: {calls[first]}: its peers did not come"
        yield OrderFault("given-up", (rank.rank,), said)
    if rank.shared:
        more = f", and {len(rank.shared) - 1} streams more" * (len(rank.shared) > 1)
        yield OrderFault("shared-stream", (rank.rank,), rank.shared[0] + more)
    for notice in rank.noticed:
        rule, _, what = notice.partition(": ")
        yield OrderFault(rule, (rank.rank,), what)


def _padding(calls: Iterable[Call]) -> int:
    return max((2 * PADDING_BYTES * len(call.communicator.ranks) for call in calls), default=0)


def _firsts(said: Iterable[tuple[str | None, str]]) -> list[str]:
    """The first sentence of each key."""
    found: dict[str | None, str] = {}
    for key, sentence in said:
        found.setdefault(key, sentence)
    return list(found.values())
