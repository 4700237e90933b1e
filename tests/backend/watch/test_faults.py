"""Ranks that die, hang or compute no numbers: the job ends soon, and says who it was, in which action, and
what the others wait for."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from helpers.gates import sampled
from helpers.plans import product_plan
from shardproof.backend.launching.launch import run_ranks
from shardproof.backend.launching.torchrun import failed
from shardproof.backend.model.block import TransformerBlock
from shardproof.backend.trainer import Trainer, run_steps
from shardproof.backend.transport.memory import MemoryWorld
from shardproof.backend.watch.halt import explain, last_words
from shardproof.backend.watch.rank_messages import Call, ThreadAt, Whereabouts
from shardproof.backend.watch.watch import Board, LaneAt, RankWatch
from shardproof.core.base.errors import (
    InternalError,
    PlanError,
    RankDefect,
    RankFailure,
    error_words,
)
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Runtime
from shardproof.core.plan.sections import DataParallel, ScheduleChoice
from shardproof.core.schedule.action import SENDS, Action

SECOND_STEP = "step 2"


def tiny(layout, *, schedule="1F1B", global_size=4, **train) -> Plan:
    return product_plan(
        layout,
        num_layers=2,
        hidden_size=16,
        num_heads=2,
        num_kv_heads=2,
        ffn_hidden_size=32,
        samples=global_size,
        sequence=16,
        dtype="fp32",
        schedule=schedule,
        steps=3,
        **train,
    )


STALL_S = 3.0
"""Longer than ranks of these plans stand still on a machine that is very busy."""

NOTICED_S = 60
"""Far below the half hour that gloo waits for a peer that is gone."""


@dataclass(frozen=True)
class Fault:
    """What befalls one rank in the middle of an action of the second step: `kill` or `hang`. `struck_file` gets
    when. With `at_collective` not at a layer."""

    plan: Plan
    global_rank: int
    action: str
    how: str
    struck_file: str = os.devnull
    at_collective: bool = False


def faulty_rank(transport, fault):
    """Training, but for the fault. It strikes inside the action: at one of its layers, its
    collective or its message."""

    def strike():
        if transport.watch.phase == SECOND_STEP:
            Path(fault.struck_file).write_text(str(time.monotonic()))
            if fault.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)

    if transport.global_rank == fault.global_rank:
        action, recorder, open_channel = Action.from_str(fault.action), transport.recorder, transport.channel
        board = transport.watch.board
        recorder.enabled = True  # then it hears of every product, with its layer
        plain_layer, plain_collective = recorder.layer, recorder.collective

        def layer(name):
            if recorder.scope[0] == action and not fault.at_collective:
                strike()
            return plain_layer(name)

        def collective(*call):
            if recorder.scope[0] == action:
                strike()
            plain_collective(*call)

        def channel(name, source, destination):
            line = open_channel(name, source, destination)
            method = "send" if action.kind in SENDS else "receive"
            plain = getattr(line, method)

            def call(*arguments):
                running = [lane.action for lane in board.lanes(fault.global_rank) if lane.state == "runs"]
                if name[0] == action.kind.name[-1] and fault.action in running:
                    strike()
                return plain(*arguments)

            setattr(line, method, call)
            return line

        if action.kind.name.startswith(("SEND", "RECV")):
            transport.channel = channel
        else:
            recorder.layer, recorder.collective = layer, collective
    return len(run_steps(transport, fault.plan).steps)


def fail(fault, transport="gloo", **limits):
    with pytest.raises(RankFailure) as caught:
        run_ranks(faulty_rank, fault, world_size=fault.plan.layout.world_size, transport=transport, **limits)
    return caught.value


# ranks that die

PIPELINE = tiny(Layout(pp=2, dp=2), schedule="ZBH1")
"""Ranks 0 and 1 run 0F0 0F1 0B0 0B1, ranks 2 and 3 1F0 1I0 1F1 1I1 1W0 1W1; every stage is reduced over two ranks."""


@sampled(
    ("global_rank", "action", "words"),
    [
        (0, "0F1", "rank 0 was at 0F1 (step 2, action 3 of 10)"),
        (0, "0B0", "rank 0 was at 0B0 (step 2, action 6 of 10)"),
        (2, "1I1", "rank 2 was at 1I1 (step 2, action 7 of 12)"),
        (2, "1W0", "rank 2 was at 1W0 (step 2, action 9 of 12)"),
        (0, "0SEND_F1", "lane F>1 at 0SEND_F1"),
        (2, "1SEND_B0", "lane B>0 at 1SEND_B0"),
        (2, "1RECV_F1", "lane F<0 at 1RECV_F1"),
        (0, "0RECV_B0", "lane B<1 at 0RECV_B0"),
        (2, "1REDUCE_GRAD", "lane dp at 1REDUCE_GRAD"),
        (0, "0STEP", "rank 0 was at 0STEP (step 2, action 10 of 10)"),
    ],
    on_push=6,
)
def test_a_rank_killed_inside_an_action_ends_the_job_at_once_and_the_action_is_named(
    tmp_path, global_rank, action, words
):
    failure = fail(Fault(PIPELINE, global_rank, action, "kill", str(tmp_path / "struck")))
    assert time.monotonic() - float((tmp_path / "struck").read_text()) < NOTICED_S
    assert str(failure).startswith(f"rank {global_rank} was killed by SIGKILL") and failure.global_rank == global_rank
    assert words in str(failure), str(failure)
    assert [rank["global_rank"] for rank in failure.report["ranks"]] == [0, 1, 2, 3]
    assert json.loads(json.dumps(failure.report))["holders"] == [global_rank]


GATHERED = replace(tiny(Layout(dp=2, zero=3)), schedule=ScheduleChoice("1F1B", max_active_stages=1))
EACH_TIME = tiny(Layout(dp=2, zero=2), global_size=8)
"""ZeRO 2 reduces after every microbatch, under its backward."""


@pytest.mark.parametrize(
    ("plan", "action", "words"),
    [
        (GATHERED, "0UNSHARD", "lane dp at 0UNSHARD"),
        (EACH_TIME, "0B1", "rank 1 was at 0B1 (step 2"),
    ],
    ids=["weights gathered", "gradients of one microbatch"],
)
def test_a_rank_killed_where_zero_gathers_or_reduces_is_named_with_the_action(plan, action, words):
    failure = fail(Fault(plan, 1, action, "kill", at_collective=True))
    assert str(failure).startswith("rank 1 was killed by SIGKILL") and words in str(failure), str(failure)


EARLY = replace(
    tiny(Layout(dp=2), global_size=8), data_parallel=DataParallel(bucket_bytes=2000, overlap_grad_reduce=True)
)
"""REDUCE_GRAD begins under the backward of the last of four microbatches."""


def test_a_rank_killed_in_a_bucket_under_the_last_backward_is_named_with_that_action():
    failure = fail(Fault(EARLY, 1, "0REDUCE_GRAD", "kill"))
    assert str(failure).startswith("rank 1 was killed by SIGKILL") and "lane dp at 0REDUCE_GRAD" in str(failure), str(
        failure
    )


# ranks that hang


@sampled("transport", ["gloo", "memory"], on_push=1)
def test_a_rank_that_hangs_in_a_bucket_holds_up_the_others_step_and_not_their_backward(transport):
    text = str(fail(Fault(EARLY, 1, "0REDUCE_GRAD", "hang"), transport, stall_s=STALL_S))
    assert text.startswith("no rank has come further for 3 s: rank 1 holds up the others"), text
    assert (
        "rank 0 waits for its lane dp before 0STEP (step 2, action 10 of 10), which is at 0REDUCE_GRAD, in all_reduce"
    ) in text, text
    assert "of group 'dp/0' over ranks 0, 1: rank 1 has not come." in text, text


@sampled("transport", ["gloo", "memory"], on_push=1)
def test_a_rank_that_hangs_in_an_action_is_named_with_what_the_others_wait_for(transport):
    plan = tiny(Layout(pp=2), global_size=3)
    failure = fail(Fault(plan, 1, "1B0", "hang"), transport, stall_s=STALL_S)
    text = str(failure)
    assert text.startswith("no rank has come further for 3 s: rank 1 holds up the others; all ranks were ended."), text
    assert failure.global_rank == 1
    assert "rank 0 waits for 1B0 from rank 1 to run 0B0 (step 2, action 6 of 14); rank 1 is at 1B0." in text, text
    assert "rank 1 is at 1B0 (step 2, action" in text and "in strike (" in text and "time.sleep(3600)" in text


@pytest.mark.parametrize(
    "runtime", [Runtime(p2p_overlap=False), Runtime(p2p_overlap=False, p2p_batched=False)], ids=["together", "in-order"]
)
def test_without_lanes_for_messages_a_rank_that_waits_names_the_message_and_what_its_peer_does(runtime):
    plan = replace(tiny(Layout(pp=2), global_size=3), runtime=runtime)
    text = str(fail(Fault(plan, 1, "1B0", "hang"), "memory", stall_s=STALL_S))
    assert (
        "rank 0 waits for 1SEND_B0 from rank 1 to run 0RECV_B0 (step 2, action" in text and "rank 1 is at 1B0" in text
    ), text
    assert "in receive of channel 'B/1-0', whose other end is rank 1" in text, text


@sampled("transport", ["gloo", "memory"], on_push=1)
def test_a_collective_that_one_rank_does_not_come_to_names_the_group_the_call_and_that_rank(transport):
    failure = fail(Fault(tiny(Layout(tp=2)), 1, "0F1", "hang"), transport, stall_s=STALL_S)
    text = str(failure)
    assert text.startswith("no rank has come further for 3 s: rank 1 holds up the others"), text
    assert "rank 0 is at 0F1 (step 2, action 3 of 10), in all_" in text, text
    assert "of group 'tp/0' over ranks 0, 1: rank 1 has not come." in text, text


TURNS = replace(tiny(Layout(tp=2), schedule="Combined1F1B"), runtime=Runtime(ep_comm_overlap=True))
"""Both ranks run 0F0, three pairs whose parts compute in turns, and 0B3."""


def test_a_rank_killed_inside_a_pair_is_named_with_the_pair_and_the_part():
    failure = fail(Fault(TURNS, 1, "0B1", "kill"))
    assert str(failure).startswith("rank 1 was killed by SIGKILL")
    assert ("rank 1 was at (0F2;0B1)OVERLAP_F_B (step 2, action 3 of 7); lane backward at 0B1.") in str(failure), str(
        failure
    )


@sampled(("part", "transport"), [("0B1", "gloo"), ("0F2", "memory")], on_push=1)
def test_a_rank_that_hangs_in_a_part_of_a_pair_names_what_each_part_of_the_others_waits_for(part, transport):
    text = str(fail(Fault(TURNS, 1, part, "hang"), transport, stall_s=STALL_S))
    assert text.startswith("no rank has come further for 3 s: rank 1 holds up the others"), text
    assert "rank 0 is at (0F2;0B1)OVERLAP_F_B (step 2, action 3 of 7): 0F2 in all_" in text, text
    assert "of group 'tp/0' over ranks 0, 1: rank 1 has not come" in text, text
    assert f"{part} in strike (" in text, text


def test_a_job_that_moves_is_not_ended_however_short_the_limit_against_its_length():
    assert run_ranks(
        faulty_rank, Fault(tiny(Layout(pp=2)), 9, "0F0", "hang"), world_size=2, transport="memory", stall_s=30.0
    ) == [3, 3]


# ranks that raise what nobody foresaw


OURS = """
def product(*_, **__):
    if str(recorder.scope[0]) == action and recorder.current_layer.startswith(layer):
        raise error
def collective(*_, **__):
    if str(recorder.scope[0]) == action and not layer:
        raise error
"""
"""Code of a module of ours, as far as its name says."""


@dataclass(frozen=True)
class Defect:
    """What rank 1 raises in an action: at a product of a layer, without one at a collective."""

    plan: Plan
    action: str
    layer: str
    error: Exception


def defective_rank(transport, defect):
    if transport.global_rank == 1:
        recorder = transport.recorder
        recorder.enabled = True  # then it hears of every product
        known = {"__name__": "shardproof.backend.defective", "recorder": recorder, **vars(defect)}
        exec(compile(OURS, "/shardproof/backend/defective.py", "exec"), known)
        recorder.product, recorder.collective = known["product"], known["collective"]
    return len(run_steps(transport, defect.plan).steps)


@pytest.mark.parametrize("transport", ["gloo", "memory"])
@pytest.mark.parametrize(
    ("defect", "words"),
    [
        (
            Defect(tiny(Layout(pp=2)), "1B2", "layers.1.mlp.down", KeyError(0)),
            "rank 1 failed: KeyError: 0, in 1B2 (step 1, microbatch 2) at layers.1.mlp.down, in product "
            "(defective.py:4: ",
        ),
        (
            Defect(tiny(Layout(tp=2)), "0F1", "layers.0.attention.qkv", AssertionError()),
            "rank 1 failed: AssertionError without a message, in 0F1 (step 1, microbatch 1) at "
            "layers.0.attention.qkv, in product (",
        ),
        (
            Defect(tiny(Layout(dp=2)), "0REDUCE_GRAD", "", AssertionError("tree unfinished")),
            "rank 1 failed: AssertionError: tree unfinished, in 0REDUCE_GRAD (step 1), in collective (defective.py:7: ",
        ),
        (
            Defect(TURNS, "0B1", "layers.0.mlp.down", IndexError("pop from an empty list")),
            "rank 1 failed: IndexError: pop from an empty list, in 0B1 (step 1, microbatch 1) at layers.0.mlp.down, "
            "in product (",
        ),
    ],
    ids=["backward", "forward", "lane dp", "pair"],
)
def test_an_exception_that_nobody_foresaw_is_a_defect_of_ours_named_with_action_microbatch_and_layer(
    transport, defect, words
):
    with pytest.raises(RankDefect) as caught:
        run_ranks(defective_rank, defect, world_size=defect.plan.layout.world_size, transport=transport)
    failure = caught.value
    assert str(failure).startswith(words), str(failure)
    assert "This is a defect of shardproof: please report it with the plan" in str(failure)
    assert isinstance(failure, InternalError) and failure.global_rank == 1 and failure.report["holders"] == [1]
    assert "defective.py" in failure.__notes__[0] and type(failure.__cause__) is type(defect.error)


def test_a_rank_of_torchrun_reports_its_defects_and_those_of_its_machine_in_the_same_way():
    transport = MemoryWorld(1).transport(0)
    transport.watch.phase = SECOND_STEP
    known = {"__name__": "shardproof.backend.defective", "nodes": []}
    exec(compile("def finish():\n    nodes.pop()", "/shardproof/backend/defective.py", "exec"), known)
    with (
        pytest.raises(IndexError) as caught,
        transport.recorder.action(Action.from_str("0F1")),
        transport.recorder.layer("layers.0.mlp"),
    ):
        known["finish"]()
    reported = str(failed(transport, caught.value))
    words = (
        "rank 0 failed: IndexError: pop from empty list, in 0F1 (step 2, microbatch 1) at layers.0.mlp, in "
        "finish (defective.py:2"
    )
    assert reported.startswith(words) and isinstance(failed(transport, caught.value), RankDefect)
    full = failed(transport, OSError(28, "No space left on device"))
    assert not isinstance(full, RankDefect) and str(full) == (
        "rank 0 failed: OSError: [Errno 28] No space left on device"
    )


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), MemoryError(), PlanError("a rule"), ModuleNotFoundError("no module x")],
    ids=lambda error: type(error).__name__,
)
def test_what_files_machines_and_plans_cause_is_no_defect_wherever_it_is_raised(error):
    defect = Defect(tiny(Layout(dp=2)), "0F0", "layers.0.mlp", error)
    with pytest.raises(RankFailure) as caught:
        run_ranks(defective_rank, defect, world_size=2, transport="memory")
    assert not isinstance(caught.value, InternalError) and str(caught.value) == f"rank 1 failed: {error_words(error)}"


class Own(TransformerBlock):
    """A user's own layer with a mistake of its own, or that gives one of our layers what it cannot take."""

    hands_on = False

    def forward(self, x_BSH):
        return self.mlp(x_BSH[0, 0]) if self.hands_on else x_BSH.no_such_thing


class HandsOn(Own):
    hands_on = True


@pytest.mark.parametrize(
    ("block", "place"), [(Own, "in forward (test_faults.py:"), (HandsOn, ("called by forward (test_faults.py:"))]
)
def test_a_mistake_of_a_users_own_layer_is_not_called_ours_and_its_line_is_named(block, place):
    with pytest.raises(RankFailure) as caught:
        Trainer(tiny(Layout(tp=2)), model=block, transport="memory").fit()
    text = str(caught.value)
    assert not isinstance(caught.value, InternalError) and "defect" not in text
    assert "in validation" in text or "in 0F0 (" in text, text
    assert place in text, text


# the explanation itself, on boards written by hand


@pytest.fixture
def board(tmp_path):
    return Board.create(tmp_path / "board", 4)


def show(board, global_rank, row, action, *, needs=None, peer=-1, phase="step 3"):
    watch = RankWatch(global_rank, board)
    watch.phase = phase
    watch.walks(row.split())
    place = watch.place(total=len(row.split()))
    place.comes_to(row.split().index(action) + 1)
    if needs is None:
        place.runs(action)
    else:
        place.waits(action, needs=needs, peer=peer)


IN_MAIL = Whereabouts((), "wait", (ThreadAt("compute", None, True, "wait (threading.py:1)"),))
BUSY = Whereabouts((), "mm", (ThreadAt("compute", None, False, "mm (linear.py:7)"),))


def test_a_wait_is_matched_with_where_the_peer_is_in_its_row(board):
    show(board, 2, "4F6 4B1 4B2 4F7", "4B2")
    show(board, 3, "5F7 5B7", "5F7", needs="4F7", peer=2)
    halt = explain({2: BUSY, 3: IN_MAIL}, board)
    assert halt.lines == [
        "rank 2 is at 4B2 (step 3, action 3 of 4), in mm (linear.py:7).",
        "rank 3 waits for 4F7 from rank 2 to run 5F7 (step 3, action 1 of 2); rank 2 is at 4B2, 1 action before it.",
    ]
    assert halt.holders == (2,) and not halt.is_circle


def test_a_peer_that_has_done_what_is_waited_for_or_never_will_is_reported(board):
    show(board, 0, "0F0 0F1 0B0", "0B0", needs="1B0", peer=1)
    show(board, 1, "1F0 1F1 1B0", "1F1", needs="0F1", peer=0)
    show(board, 2, "2F0 2B0", "2F0", needs="1F9", peer=1)
    halt = explain({0: IN_MAIL, 1: IN_MAIL, 2: IN_MAIL}, board)
    assert halt.lines[0].endswith("; rank 1 is at 1F1, 1 action before it.")
    assert halt.lines[1].endswith("; rank 0 is at 0B0, 1 action after it.")
    assert halt.lines[2].endswith("; rank 1 is at 1F1, and its row has no 1F9.")
    assert halt.holders == (0, 1) and halt.is_circle


def test_a_backward_is_named_as_the_peer_splits_or_pairs_it(board):
    show(board, 0, "0F0 0B0", "0B0", needs="1B0", peer=1)
    show(board, 1, "1F0 1I0 1W0", "1F0")
    show(board, 2, "2F0 2B0", "2B0", needs="3B0", peer=3)
    show(board, 3, "3F0 (3F1;3B0)OVERLAP_F_B", "3F0")
    lines = explain({0: IN_MAIL, 1: BUSY, 2: IN_MAIL, 3: BUSY}, board).lines
    assert lines[0] == (
        "rank 0 waits for 1I0 from rank 1 to run 0B0 (step 3, action 2 of 2); rank 1 is at 1F0, 1 action before it."
    )
    assert lines[2] == (
        "rank 2 waits for 3B0 from rank 3 to run 2B0 (step 3, action 2 of 2); rank 3 is at 3F0, 1 action before it."
    )


def test_different_collectives_under_one_number_are_distinguished(board):
    for rank in (0, 1):
        show(board, rank, "0F0", "0F0")
    found = {
        rank: Whereabouts((), "", (ThreadAt("compute", Call(op, "tp/0", (0, 1, 2), (rank,), 7), False, ""),))
        for rank, op in ((0, "all_reduce"), (1, "all_gather"))
    }
    halt = explain({**found, 2: None}, board)
    assert halt.lines == [
        "rank 0 is at 0F0 (step 3, action 1 of 1), in all_reduce, call 7 of group 'tp/0' over ranks 0, 1, 2: "
        "rank 1 came with all_gather, rank 2 has not come.",
        "rank 1 is at 0F0 (step 3, action 1 of 1), in all_gather, call 7 of group 'tp/0' over ranks 0, 1, 2: "
        "rank 0 came with all_reduce, rank 2 has not come.",
        "rank 2 does not answer.",
    ]
    assert halt.holders == (2,)


def test_a_step_that_waits_for_its_reductions_names_the_lane_and_who_is_missing(board):
    show(board, 0, "0F0 0B0 0REDUCE_GRAD 0STEP", "0STEP", needs="lane dp")
    watch = RankWatch(0, board)
    watch.phase = "step 3"
    watch.place()  # the compute lane has the first line
    watch.place("dp", 1).runs("0REDUCE_GRAD")
    show(board, 1, "0F0 0B0 0REDUCE_GRAD 0STEP", "0B0")
    reducing = ThreadAt("dp", Call("all_reduce", "dp/0", (0, 1), (0,), 4), False, "")
    halt = explain({0: Whereabouts((), "", (*IN_MAIL.threads, reducing)), 1: BUSY}, board)
    assert halt.lines[0] == (
        "rank 0 waits for its lane dp before 0STEP (step 3, action 4 of 4), which is at 0REDUCE_GRAD, "
        "in all_reduce, call 4 of group 'dp/0' over ranks 0, 1: rank 1 has not come."
    )
    assert halt.holders == (1,)


def test_what_a_dead_rank_wrote_last_is_read_after_its_end(board):
    show(board, 1, "1F0 1B0", "1B0")
    watch = RankWatch(1, board)
    watch.phase = "step 3"
    watch.place()
    watch.place("F>2", 5).runs("1SEND_F0")
    show(board, 2, "2F0", "2F0", needs="1F0", peer=1)
    assert last_words(board, [1]).lines == [
        "rank 1 was at 1B0 (step 3, action 2 of 2); lane F>2 at 1SEND_F0.",
        "rank 2 waited for 1F0 from rank 1 to run 2F0 (step 3, action 1 of 1); rank 1 was at 1B0, 1 action after it.",
    ]


def test_a_torn_or_empty_record_is_no_lane_and_a_long_one_is_cut():
    place = LaneAt("F<0", "step 1", "runs", "1RECV_F2", 3, 8)
    assert LaneAt.from_record(place.to_record() + bytes(9)) == place
    assert LaneAt.from_record(bytes(20)) is None
    assert LaneAt.from_record(place.to_record()[:12]) is None
    assert len(place._replace(action="x" * 999).to_record()) == 192


def test_a_job_that_fails_for_a_reason_of_its_own_leaves_no_hang_in_the_message():
    with pytest.raises(RankFailure) as caught:
        run_ranks(raising, world_size=2, transport="memory")
    assert str(caught.value) == "rank 0 failed: ValueError: no luck"


def raising(transport, _):
    if transport.global_rank == 0:
        raise ValueError("no luck")
    transport.group("world", "dp", (0, 1)).barrier()
