"""The three meanings of a send. Oracle: one plain event loop per meaning, without arrays."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.core.schedule import build, lower
from shardproof.core.schedule.action import RECEIVES, SENDS, Action, Kind
from shardproof.core.schedule.schedule import Schedule
from shardproof.verify.schedule.check import check, examine
from shardproof.verify.schedule.rules import View
from shardproof.verify.schedule.rules.deadlock import send_meanings

COUNTERPART = {Kind.SEND_F: (1, Kind.RECV_F), Kind.SEND_B: (-1, Kind.RECV_B)}


def receive_of(send: Action) -> Action:
    step, kind = COUNTERPART[send.kind]
    return Action(send.stage + step, kind, send.microbatch)


def ends(schedule: Schedule, meaning: str) -> bool:
    """Runs the schedule with one meaning of a send, queue by queue."""
    queues: dict[tuple, list[Action]] = {}
    for rank, row in enumerate(schedule.rows()):
        for action in row:
            if meaning != "stream-ordered":
                queue = 0
            elif action.kind in (Kind.SEND_F, Kind.RECV_F):
                queue = 1
            else:
                queue = 2 if action.kind in (Kind.SEND_B, Kind.RECV_B) else 0
            queues.setdefault((rank, queue), []).append(action)
    done: set[str] = set()
    computed: set[str] = set()
    progress = True
    while progress:
        progress = False
        for queue in queues.values():
            while queue and can_go(queue[0], queues, done, computed, meaning):
                action = queue.pop(0)
                progress = True
                done.add(str(action))
                computed |= {str(part) for part in action.parts}
                if action.kind in SENDS and meaning != "buffered":
                    other = receive_of(action)
                    next(each for each in queues.values() if each and each[0] == other).pop(0)
                    done.add(str(other))
    return not any(queues.values())


def can_go(action: Action, queues: dict, done: set[str], computed: set[str], meaning: str) -> bool:
    if action.kind in SENDS:
        kinds = "F" if action.kind is Kind.SEND_F else "BI"
        if not any(f"{action.stage}{kind}{action.microbatch}" in computed for kind in kinds):
            return False
        return meaning == "buffered" or any(queue and queue[0] == receive_of(action) for queue in queues.values())
    if action.kind in RECEIVES:
        if meaning != "buffered":
            return False  # its send moves it on
        step = -1 if action.kind is Kind.RECV_F else 1
        kind = Kind.SEND_F if action.kind is Kind.RECV_F else Kind.SEND_B
        return str(Action(action.stage + step, kind, action.microbatch)) in done
    waiting = {str(each) for queue in queues.values() for each in queue}
    for part in action.parts:
        receive = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}.get(part.kind)
        if receive is not None and str(Action(part.stage, receive, part.microbatch)) in waiting:
            return False
    return True


def close_to_use(row: list[Action]) -> list[Action]:
    """Every receive right before the action that needs it, every send right behind the one that makes its value."""
    neighbours: dict[str, list[Action]] = {}
    for action in row:
        if action.kind in SENDS | RECEIVES:
            kinds = "F" if action.kind in (Kind.SEND_F, Kind.RECV_F) else "BI"
            for kind in kinds:
                neighbours.setdefault(f"{action.stage}{kind}{action.microbatch}", []).append(action)
    moved = []
    for action in row:
        if action.kind not in SENDS | RECEIVES:
            meanwhile = neighbours.get(str(action), [])
            moved += [
                *(each for each in meanwhile if each.kind in RECEIVES),
                action,
                *(each for each in meanwhile if each.kind in SENDS),
            ]
    return moved


@st.composite
def shuffled_messages(draw: st.DrawFn) -> Schedule:
    """A right schedule, perhaps with each message moved next to its use, then receives moved forward and sends back."""
    name = draw(st.sampled_from(["1F1B", "Interleaved1F1B", "GPipe", "ZBH1", "ZBVZeroBubble"]))
    vpp = 2 if name in ("Interleaved1F1B", "ZBVZeroBubble") else 1
    schedule = lower(build(name, pp=draw(st.integers(2, 3)), vpp=vpp, num_microbatches=draw(st.integers(2, 4))))
    rows = [close_to_use(list(row)) if draw(st.booleans()) else list(row) for row in schedule.rows()]
    for _ in range(draw(st.integers(0, 3))):
        row = draw(st.sampled_from(rows))
        places = [i for i, action in enumerate(row) if action.kind in SENDS | RECEIVES]
        i = draw(st.sampled_from(places))
        action = row.pop(i)
        row.insert(draw(st.integers(0, i) if action.kind in RECEIVES else st.integers(i, len(row) - 1)), action)
    return Schedule.from_rows("shuffled", schedule.placement, rows)


@settings(max_examples=150, deadline=None)
@given(shuffled_messages())
def test_each_meaning_ends_exactly_when_its_plain_run_ends(schedule: Schedule) -> None:
    if not examine(schedule).is_complete:
        return  # another rule is broken: messages out of order
    expected = {meaning: ends(schedule, meaning) for meaning in ("rendezvous", "buffered", "stream-ordered")}
    assert send_meanings(View(schedule)) == expected
    assert expected["rendezvous"] <= expected["buffered"] and expected["rendezvous"] <= expected["stream-ordered"]
    rules = {finding.rule for finding in check(schedule)}
    assert rules == ({"rendezvous-cycle"} if expected["buffered"] else {"receive-cycle"}) - (
        {"rendezvous-cycle"} if expected["rendezvous"] else set()
    )


HEAD_TO_HEAD = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0STEP\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1STEP\n"
)
RECEIVE_FIRST = "0F0,0RECV_B0,0SEND_F0,0B0,0REDUCE_GRAD,0STEP\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1STEP\n"


@pytest.mark.parametrize(
    ("text", "rendezvous", "buffered", "streams"),
    [(HEAD_TO_HEAD, False, True, True), (RECEIVE_FIRST, False, False, True)],
    ids=["head-to-head sends", "receive before the send it depends on"],
)
def test_head_to_head_sends_need_buffers_and_a_receive_too_early_needs_streams(
    text: str, rendezvous: bool, buffered: bool, streams: bool
) -> None:
    schedule = Schedule.from_csv(text)
    assert send_meanings(View(schedule)) == {"rendezvous": rendezvous, "buffered": buffered, "stream-ordered": streams}
