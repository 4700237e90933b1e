"""The order of calls in logs written by hand: what each member gave to communicators, with what must be found."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.backend.base.recorder import Recorder
from shardproof.core.program import Collective, Message
from shardproof.core.program.of_rank import differences, recorded_by_action
from shardproof.core.schedule.action import Action, Kind
from shardproof.verify.pretended.calls import RankCalls, calls_of
from shardproof.verify.pretended.circles import LEAST_CTAS, MOST_CTAS, at_once, circles, does_not_fit, order_faults
from shardproof.verify.pretended.labelled import without_forwards
from shardproof.verify.pretended.log import Entry
from shardproof.verify.pretended.order import RULES, faults

TP, DP = (10, "tp/0", (0, 1)), (11, "dp/0", (0, 1))
"""A stream, the name of its communicator, and the members."""
CHANNEL = (12, "F/0-1", (0, 1))


def opened(*communicators, **options) -> list[Entry]:
    return [
        Entry("communicator", 1, stream, json.dumps({"communicator": stream, "name": name, "ranks": ranks, **options}))
        for stream, name, ranks in communicators
    ]


def call(of, op="all_reduce", *, count=8, dtype="float32", label="0F0 mlp", thread=1, **more) -> list[Entry]:
    """A call, asked for by the group of that name, after what its thread has given to the stream 0, which waits."""
    stream, name, _ = of
    what = {"communicator": stream, "op": op, "dtype": dtype, "bytes": 4, "count": count, "reduction": "SUM", **more}
    return [
        *([Entry("asked", thread, 0, name, label=label)] if "peer" not in more else []),
        Entry("call", thread, stream, json.dumps(what), label=label),
        Entry("collective", thread, stream, f"{op} {name}", label=label),
    ]


def waits(stream: int, for_stream: int, event: str, thread: int = 1) -> list[Entry]:
    return [Entry("record", thread, for_stream, event), Entry("wait", thread, stream, event)]


def ranks_of(*logs: Sequence[Entry]) -> list[RankCalls]:
    found = [
        calls_of([Entry("rank", 1, 0, str(rank)), *log, Entry("ended", 1, 0, "")]) for rank, log in enumerate(logs)
    ]
    assert all(found)
    return [each for each in found if each is not None]


BOTH = opened(TP, DP)
RIGHT = [*BOTH, *call(TP), *call(DP, label="0REDUCE_GRAD mlp")]
A2A = {"op": "all_to_all", "sent": [3, 5], "received": [3, 4]}

CASES = {
    "all make the same calls": ((RIGHT, RIGHT), None, ()),
    "another kind of call": (
        (RIGHT, [*BOTH, *call(TP, "all_gather"), *call(DP, label="0REDUCE_GRAD mlp")]),
        "call-differs",
        (0, 1),
    ),
    "another format": ((RIGHT, [*BOTH, *call(TP, dtype="float16"), *RIGHT[5:]]), "call-differs", (0, 1)),
    "another reduction": ((RIGHT, [*BOTH, *call(TP, reduction="MAX"), *RIGHT[5:]]), "call-differs", (0, 1)),
    "for another layer": ((RIGHT, [*BOTH, *call(TP, label="0F0 norm"), *RIGHT[5:]]), "call-differs", (0, 1)),
    "another count": ((RIGHT, [*BOTH, *call(TP, count=9), *RIGHT[5:]]), "count-differs", (0, 1)),
    "one call fewer": ((RIGHT, [*BOTH, *call(TP)]), "call-missing", (1,)),
    "parts that nobody expects": (
        (
            [*BOTH, *call(TP, **A2A)],
            [*BOTH, *call(TP, "all_to_all", sent=[4, 2], received=[6, 2])],
        ),
        "count-differs",
        (0, 1),
    ),
    "parts that are expected": (
        (
            [*BOTH, *call(TP, **A2A)],
            [*BOTH, *call(TP, "all_to_all", sent=[4, 2], received=[5, 2])],
        ),
        None,
        (),
    ),
    "a message that is received": (
        ([*opened(CHANNEL), *call(CHANNEL, "send", peer=1)], [*opened(CHANNEL), *call(CHANNEL, "recv", peer=0)]),
        None,
        (),
    ),
    "a message that is not": (
        ([*opened(CHANNEL), *call(CHANNEL, "send", peer=1)], opened(CHANNEL)),
        "message-without-partner",
        (1,),
    ),
    "a message that is not sent": (
        (opened(CHANNEL), [*opened(CHANNEL), *call(CHANNEL, "recv", peer=0)]),
        "message-without-partner",
        (0,),
    ),
    "a longer message": (
        (
            [*opened(CHANNEL), *call(CHANNEL, "send", peer=1)],
            [*opened(CHANNEL), *call(CHANNEL, "recv", peer=0, count=9)],
        ),
        "count-differs",
        (0, 1),
    ),
    "the communicator of another group": (
        (RIGHT, [*BOTH, Entry("asked", 1, 0, "dp/0"), *call(TP)[1:], *RIGHT[5:]]),
        "wrong-communicator",
        (1,),
    ),
    "one stream for two communicators": (
        (RIGHT, [Entry("stream", 1, 10, "here"), *opened(TP), Entry("stream", 1, 10, "there"), *RIGHT[1:]]),
        "shared-stream",
        (1,),
    ),
    "other bytes than are recorded": (
        (RIGHT, [*BOTH, call(TP)[0], Entry("recorded", 1, 0, "1000"), *call(TP)[1:], *RIGHT[5:]]),
        "other-bytes",
        (1,),
    ),
    "the bytes that are recorded": (
        (RIGHT, [*BOTH, call(TP)[0], Entry("recorded", 1, 0, "32"), *call(TP)[1:], *RIGHT[5:]]),
        None,
        (),
    ),
    "a call whose peer does not come": (
        (RIGHT, [*RIGHT, Entry("given up", 1, 10, json.dumps({"communicator": 10, "number": 0}))]),
        "given-up",
        (1,),
    ),
    "what the rank itself has found": (
        (RIGHT, [*RIGHT, Entry("noticed", 1, 0, "without-action: outside of actions: 1 too many")]),
        "without-action",
        (1,),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_members_do_differently_is_found(name: str) -> None:
    logs, rule, ranks = CASES[name]
    found = order_faults(ranks_of(*logs))
    assert [(fault.rule, fault.ranks) for fault in found] == ([] if rule is None else [(rule, ranks)])
    assert {fault.rule for fault in found} <= RULES.keys()


def test_of_three_members_the_odd_one_is_named_with_its_action() -> None:
    three = (10, "tp/0", (0, 1, 2))
    right, wrong = [*opened(three), *call(three)], [*opened(three), *call(three, count=9, label="0F0 mlp")]
    (fault,) = order_faults(ranks_of(right, wrong, right))
    assert str(fault) == (
        "count-differs: rank 1: communicator 'tp/0', call 0: 0, 2: all_reduce of 8 x float32 in 0F0 mlp; "
        "1: all_reduce of 9 x float32 in 0F0 mlp"
    )


def test_a_run_that_was_cut_off_lacks_nothing() -> None:
    ranks = ranks_of(RIGHT, [*BOTH, *call(TP)])
    assert faults([ranks[0], replace(ranks[1], ended=False)]) == []


def split(stream: int, ranks: tuple[int, ...], color: int) -> list[Entry]:
    return opened((stream, f"tp/{color}", ranks), split_from="whole", split_color=color)


@pytest.mark.parametrize(
    ("logs", "ranks"),
    [
        (([*split(5, (0, 1), 0)], [*split(5, (0, 1), 0)]), None),
        (([*split(5, (0,), 0)], [*split(5, (1,), 1)]), None),
        (([*split(5, (0, 1), 0)], [*split(5, (0, 1), 1)]), (0,)),
        (([*split(5, (0, 1), 0)], []), (1,)),
    ],
    ids=["together", "alone", "another colour", "not at all"],
)
def test_splits_are_calls_of_all(logs, ranks) -> None:
    assert [(fault.rule, fault.ranks) for fault in faults(ranks_of(*logs))] == (
        [] if ranks is None else [("split-differs", ranks)]
    )


def then(first, second, *, ordered: bool) -> list[Entry]:
    """Two calls, the second one after the first where a stream waits for the other."""
    order = waits(second[0], first[0], "1") if ordered else []
    return [*BOTH, *call(first, thread=1), *order, *call(second, thread=1 if ordered else 2)]


def test_two_communicators_that_wait_for_each_other_are_a_circle_with_its_ranks_and_actions() -> None:
    ranks = ranks_of(then(TP, DP, ordered=True), then(DP, TP, ordered=True))
    (fault,) = order_faults(ranks)
    assert (fault.rule, fault.ranks) == ("circle", (0, 1))
    assert "rank 0 begins all_reduce of 8 x float32 in 0F0 mlp on 'dp/0' after" in fault.what and "'tp/0'" in fault.what


def test_calls_that_nothing_orders_wait_for_nobody_but_need_room() -> None:
    ranks = ranks_of(then(TP, DP, ordered=False), then(DP, TP, ordered=False))
    assert order_faults(ranks) == []
    together = at_once(ranks[0])
    assert together is not None and together.lines == (("tp/0",), ("dp/0",))
    assert (together.least_ctas, together.most_ctas) == (2 * LEAST_CTAS, 2 * MOST_CTAS)


def test_calls_that_one_thread_launches_have_its_order() -> None:
    def launched(first, second) -> list[Entry]:
        return [*BOTH, *call(first), *call(second)]

    (fault,) = order_faults(ranks_of(launched(TP, DP), launched(DP, TP)))
    assert fault.rule == "launch-circle"
    assert order_faults(ranks_of(launched(TP, DP), launched(TP, DP))) == []


def test_more_thread_blocks_than_multiprocessors_do_not_fit() -> None:
    log = [*opened(TP, DP, CHANNEL, min_ctas=64, max_ctas=64)]
    log += [*call(TP, thread=1), *call(DP, thread=2), *call(CHANNEL, "send", peer=1, thread=3)]
    rank = ranks_of(log)[0]
    together = at_once(rank)
    assert together is not None
    (fault,) = does_not_fit([together])
    assert fault.ranks == (0,) and "192 to 192 of 132 multiprocessors" in fault.what


GROUPS = {"a": (0, 1), "b": (1, 2), "c": (0, 2), "d": (0, 1, 2), "e": (0, 1)}


def hangs(programs: list[list[str]]) -> bool:
    """Whether ranks that make one call after the other, each of which ends when all members are in it, stop."""
    places = [0] * len(programs)
    while True:
        heads = [
            program[place] if place < len(program) else None for program, place in zip(programs, places, strict=True)
        ]
        ready = next((name for name, ranks in GROUPS.items() if all(heads[rank] == name for rank in ranks)), None)
        if ready is None:
            return any(head is not None for head in heads)
        for rank in GROUPS[ready]:
            places[rank] += 1


@given(st.lists(st.sampled_from(sorted(GROUPS)), max_size=7), st.data())
def test_a_circle_is_there_just_where_ranks_hang(calls: list[str], data: st.DataObject) -> None:
    programs = [data.draw(st.permutations([name for name in calls if rank in GROUPS[name]])) for rank in range(3)]
    streams = {name: 10 + number for number, name in enumerate(GROUPS)}
    logs = []
    for rank, program in enumerate(programs):
        own = [(streams[name], name, ranks) for name, ranks in GROUPS.items() if rank in ranks]
        log = opened(*own)
        for number, name in enumerate(program):
            if number:
                log += waits(streams[name], streams[program[number - 1]], str(number))
            log += call((streams[name], name, GROUPS[name]))
        logs.append(log)
    assert bool(circles(ranks_of(*logs))) == hangs(programs)


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 3), max_size=2)), min_size=1, max_size=8))
def test_no_more_calls_run_at_once_than_there_are_lines(given_calls: list[tuple[int, list[int]]]) -> None:
    """Streams that wait for some others before each call, in threads of their own; brute force over sets of calls."""
    own = [(10 + number, f"c{number}", (0, 1)) for number in range(4)]
    log, before = opened(*own), []
    clocks: list[set[int]] = [set() for _ in range(4)]
    for number, (stream, awaited) in enumerate(given_calls):
        for other in awaited:
            log += waits(10 + stream, 10 + other, f"{number}-{other}", thread=9)
            clocks[stream] |= clocks[other]
        before.append(set(clocks[stream]))
        clocks[stream] = clocks[stream] | {number}
        log += call(own[stream], thread=stream + 1)
    rank = ranks_of(log)[0]
    together = at_once(rank)
    assert together is not None
    widest = max(
        size
        for size in range(1, 5)
        for chosen in combinations(range(len(before)), size)
        if all(a not in before[b] and b not in before[a] for a, b in combinations(chosen, 2))
    )
    assert widest <= len(together.lines)
    for line in together.lines:
        numbers = [n for n, (stream, _) in enumerate(given_calls) if f"c{stream}" in line]
        assert all(a in before[b] or b in before[a] for a, b in combinations(numbers, 2))


def test_what_was_recorded_otherwise_than_the_program_says_is_named_by_action() -> None:
    forward, sent = Action(0, Kind.F, 0), Collective("mlp", "all_gather", "tp", 2, 64)
    program = recorded_by_action([(forward, sent), (forward, sent), (None, Message("", 8))])
    did = recorded_by_action([(forward, sent), (None, sent), (None, Message("", 8))])
    assert differences(program, program) == {}
    assert differences(program, did) == {forward: ([sent], []), None: ([], [sent])}


def test_of_an_evaluation_late_gathers_of_steps_stay_recorded() -> None:
    recorder = Recorder(enabled=True)
    step, forward = Action(0, Kind.STEP), Action(0, Kind.F, 0)

    def evaluate() -> float:
        with ThreadPoolExecutor() as lane, recorder.action(forward):
            recorder.collective("all_reduce", "tp", 2, 64)
            lane.submit(gather).result()
        recorder.collective("all_reduce", "model", 2, 8)
        return 1.5

    def gather() -> None:
        with recorder.action(step), recorder.layer("bucket.0"):
            recorder.collective("all_gather", "dp", 2, 128)

    with recorder.action(forward):
        recorder.collective("all_reduce", "tp", 2, 32)
    assert without_forwards(recorder, evaluate) == 1.5
    assert recorder.events == [
        (forward, Collective("", "all_reduce", "tp", 2, 32)),
        (step, Collective("bucket.0", "all_gather", "dp", 2, 128)),
    ]


def test_the_first_run_of_a_process_counts(tmp_path: Path) -> None:
    log = [Entry("rank", 1, 0, "3"), *BOTH, *call(TP), Entry("rank", 1, 0, "3"), *call(TP)]
    found = calls_of(log)
    assert found is not None and found.rank == 3 and len(found.calls) == 1
    assert calls_of([Entry("op", 1, 0, "aten::add")]) is None
