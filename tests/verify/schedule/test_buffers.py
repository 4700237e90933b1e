"""`buffer-reuse`: the verdict is that of a transitive closure over every ordering the execution rule gives."""

from __future__ import annotations

from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.core.base.errors import ScheduleError
from shardproof.core.schedule import build, lower
from shardproof.core.schedule.action import Action, Kind
from shardproof.core.schedule.schedule import Schedule
from shardproof.verify.schedule.check import check
from shardproof.verify.schedule.facts import BUFFER_KINDS, Buffers, Facts
from shardproof.verify.schedule.rules import View
from shardproof.verify.schedule.rules.buffers import buffer_reuse, least_rings

SCHEDULES = {
    "GPipe": (3, 1),
    "1F1B": (3, 1),
    "Interleaved1F1B": (3, 2),
    "ZBH1": (3, 1),
    "ZBH2": (3, 1),
    "ZBVZeroBubble": (3, 2),
    "DualPipe": (4, 1),
    "DualPipeV": (3, 2),
    "Combined1F1B": (3, 1),
}


def order_of(schedule: Schedule, recv_buffers: int) -> nx.DiGraph:
    """Start and end of every action and transfer as nodes, an edge where one surely is before the other. Shares
    no code with the rule."""
    graph = nx.DiGraph()
    lanes: dict[tuple, list[tuple[Action, Action, int, int]]] = {}
    rank_of = schedule.placement.rank_of
    computes = {Kind.F, Kind.B, Kind.I, Kind.W, Kind.OVERLAP_F_B}
    for row in schedule.rows():
        previous = None
        for action in row:
            if action.kind in computes:
                for part in action.parts:
                    graph.add_edge(("start", str(action)), ("end", str(action)))
                    graph.add_edge(("start", str(action)), ("start", str(part)))
                    graph.add_edge(("start", str(part)), ("start", str(action)))
                    graph.add_edge(("end", str(action)), ("end", str(part)))
                    graph.add_edge(("end", str(part)), ("end", str(action)))
                if previous is not None:
                    graph.add_edge(("end", str(previous)), ("start", str(action)))
                previous = action
    for rank, row in enumerate(schedule.rows()):
        for action in row:
            if action.kind in (Kind.SEND_F, Kind.SEND_B):
                forward = action.kind is Kind.SEND_F
                stage = action.stage + (1 if forward else -1)
                receive = Action(stage, Kind.RECV_F if forward else Kind.RECV_B, action.microbatch)
                lanes.setdefault((forward, rank, rank_of(stage, action.microbatch)), []).append(
                    (action, receive, rank, rank_of(stage, action.microbatch))
                )
    for (forward, _, to), messages in lanes.items():
        row = list(schedule.row(to))
        for number, (send, receive, _, _) in enumerate(messages):
            transfer = str(send)
            graph.add_edge(("start", transfer), ("end", transfer))
            graph.add_edge(("end", str(maker(schedule, send, forward))), ("start", transfer))
            graph.add_edge(("end", transfer), ("start", str(maker(schedule, receive, forward))))
            if number:
                graph.add_edge(("end", str(messages[number - 1][0])), ("start", transfer))
            if number >= recv_buffers:
                place = row.index(messages[number - recv_buffers][1])
                before = [action for action in row[:place] if action.kind in computes]
                if before:
                    graph.add_edge(("end", str(before[-1])), ("start", transfer))
    return graph


def maker(schedule: Schedule, message: Action, forward: bool) -> Action:
    """The compute action on the same stage that makes what is sent, or uses what is received."""
    if forward:
        return Action(message.stage, Kind.F, message.microbatch)
    tokens = {str(part) for action in schedule.actions for part in action.parts}
    full = Action(message.stage, Kind.B, message.microbatch)
    return full if str(full) in tokens else Action(message.stage, Kind.I, message.microbatch)


def unsafe_pairs(schedule: Schedule, name: str, ring: int, recv_buffers: int) -> set[tuple[str, str]]:
    """(writer, reader) of every slot that is written before its reader has surely ended."""
    graph = order_of(schedule, recv_buffers)
    tokens = {str(part) for action in schedule.actions for part in action.parts}
    rank_of, last = schedule.placement.rank_of, schedule.num_stages - 1
    slots: dict[tuple, list[tuple[int, str, str]]] = {}
    position = {str(part): index for index, action in enumerate(schedule.actions) for part in action.parts}
    for s in range(schedule.num_stages):
        for m in range(schedule.num_microbatches):
            gradient = f"{s}B{m}" if f"{s}B{m}" in tokens else f"{s}I{m}"
            final = f"{s}W{m}" if f"{s}W{m}" in tokens else gradient
            below = f"{s - 1}B{m}" if f"{s - 1}B{m}" in tokens else f"{s - 1}I{m}"
            writer, reader = {
                "activations": (f"{s}F{m}", final),
                "outputs": (
                    f"{s}F{m}",
                    gradient if s == last else f"{s}SEND_F{m}" if f"{s}SEND_F{m}" in tokens else f"{s + 1}F{m}",
                ),
                "inputs": (f"{s}RECV_F{m}", final),
                "output_gradients": (f"{s}RECV_B{m}", final),
                "input_gradients": (gradient, f"{s}SEND_B{m}" if f"{s}SEND_B{m}" in tokens else below),
            }[name]
            if writer in tokens and reader in tokens:
                slots.setdefault((rank_of(s, m), s, m % ring), []).append((position[writer], writer, reader))
    found = set()
    for values in slots.values():
        values.sort()
        for (_, _, reader), (_, writer, _) in pairwise(values):
            filled = writer
            if "RECV" in writer:
                action = Action.from_str(writer)
                step = -1 if action.kind is Kind.RECV_F else 1
                filled = (
                    f"{action.stage + step}{'SEND_F' if action.kind is Kind.RECV_F else 'SEND_B'}{action.microbatch}"
                )
            if not nx.has_path(graph, ("end", reader), ("start", filled)):
                found.add((writer, reader))
    return found


def reported(schedule: Schedule, name: str, ring: int, recv_buffers: int) -> set[tuple[str, str]]:
    view = View(schedule, Facts(buffers=Buffers(**{name: ring}, recv_buffers=recv_buffers)))
    parts = {index: {str(part) for part in schedule.actions[index].parts} for index in range(len(schedule))}
    found = {(violation.index, violation.related[0]) for violation in buffer_reuse(view)}
    return {(min(parts[writer]), min(parts[reader])) for writer, reader in found}


@pytest.mark.parametrize("name", BUFFER_KINDS)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_verdict_is_that_of_the_transitive_closure(name: str, data: st.DataObject) -> None:
    schedule_name = data.draw(st.sampled_from(sorted(SCHEDULES)))
    pp, vpp = SCHEDULES[schedule_name]
    num_microbatches = data.draw(st.sampled_from([6, 7])) if pp == 3 else 8
    schedule = lower(build(schedule_name, pp=pp, vpp=vpp, num_microbatches=num_microbatches))
    ring, recv_buffers = data.draw(st.integers(1, 7)), data.draw(st.integers(0, 3) | st.just(99))
    parts = {str(part): min(map(str, action.parts)) for action in schedule.actions for part in action.parts}
    expected = {(parts[writer], parts[reader]) for writer, reader in unsafe_pairs(schedule, name, ring, recv_buffers)}
    assert reported(schedule, name, ring, recv_buffers) == expected


@pytest.mark.parametrize("pp", [2, 3, 5, 6])
def test_1f1b_needs_p_minus_rank_slots_for_activations_and_outputs(pp: int) -> None:
    """Its forward i + p - r follows its backward i, whose gradient shows that output i has arrived."""
    view = View(lower(build("1F1B", pp=pp, num_microbatches=3 * pp)))
    expected = tuple(pp - rank for rank in range(pp))
    assert least_rings(view, "activations") == expected
    assert least_rings(view, "outputs") == expected


def test_gpipe_keeps_every_output_since_nothing_shows_that_it_has_left() -> None:
    view = View(lower(build("GPipe", pp=3, num_microbatches=7)))
    assert least_rings(view, "outputs") == (7, 7, 7)


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
def test_gpipe_gradients_need_one_slot_more_than_receives_are_posted_ahead(ahead: int) -> None:
    view = View(lower(build("GPipe", pp=4, num_microbatches=8)))
    assert least_rings(view, "output_gradients", recv_buffers=ahead) == (1 + ahead, 1 + ahead, 1 + ahead, 1)


def test_one_slot_less_than_safe_is_reported_with_the_safe_ring() -> None:
    schedule = lower(build("1F1B", pp=3, num_microbatches=6))
    assert check(schedule, facts=Facts(buffers=Buffers(outputs=(3, 2, 1)))) == []
    findings = check(schedule, facts=Facts(buffers=Buffers(outputs=(2, 2, 1))))
    assert {finding.rule for finding in findings} == {"buffer-reuse"}
    assert findings[0].where == "rank 0, step 4, 0F2"
    assert findings[0].what == (
        "this fills the slot of the output of stage 0, microbatch 0, again, while 0SEND_F0 may still run. "
        "A ring of 3 is safe for this stage."
    )


def test_two_stages_of_a_rank_may_share_a_slot_only_in_turn() -> None:
    """Explicit slots are numbers on a rank: both stages keep their activations in slot 0, and stage 1 writes
    while stage 0 is live."""
    schedule = Schedule.from_csv("0F0,1F0,1B0,0B0\n")
    assert check(schedule, facts=Facts(buffers=Buffers(activations=((0,), (1,))))) == []
    findings = check(schedule, facts=Facts(buffers=Buffers(activations=((0,), (0,)))))
    assert [(finding.rule, finding.where) for finding in findings] == [("buffer-reuse", "rank 0, step 1, 1F0")]


@pytest.mark.parametrize("slots", [0, (1,), (1, 2, 3), ((0, 1), (0,)), ((0,), (0,))])
def test_slots_that_do_not_fit_the_schedule_are_refused(slots) -> None:
    with pytest.raises(ScheduleError, match=r"buffers\.outputs"):
        check(build("1F1B", pp=2, num_microbatches=3), facts=Facts(buffers=Buffers(outputs=slots)))
