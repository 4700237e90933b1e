"""`lower`: what it adds and where, against torch's own lowering and a brute-force reading of the result."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.core.base.errors import ScheduleError
from shardproof.core.schedule import build, lower
from shardproof.core.schedule.action import Kind
from shardproof.core.schedule.messages import UnrunnableError
from shardproof.core.schedule.schedule import Schedule

NAMES = (("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2))
SIZES = ((1, 3), (2, 1), (3, 5), (4, 8), (5, 3), (6, 6))
CATALOG_SIZES = [(name, vpp, pp, m) for name, vpp in NAMES for pp, m in SIZES]


def tokens(schedule: Schedule, pp_rank: int) -> str:
    return " ".join(map(str, schedule.row(pp_rank)))


def test_1f1b_p2_m2_lowered() -> None:
    lowered = lower(build("1F1B", pp=2, num_microbatches=2))
    assert tokens(lowered, 0) == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0STEP"
    assert tokens(lowered, 1) == "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1STEP"


def test_one_rank_needs_no_messages() -> None:
    assert tokens(lower(build("GPipe", pp=1, num_microbatches=2)), 0) == "0F0 0F1 0B0 0B1 0REDUCE_GRAD 0STEP"


def test_neighbour_stages_on_one_rank_hand_over_without_messages() -> None:
    """A vee: stages 0 and 3 on rank 0, stages 1 and 2 on rank 1, so between 1 and 2 nothing is sent."""
    lowered = lower(Schedule.from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n"))
    assert lowered.placement.kind == "vee"
    assert tokens(lowered, 1) == "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 2REDUCE_GRAD 1B0 1SEND_B0 1REDUCE_GRAD 1STEP"


def test_split_backward_sends_after_the_input_gradient_and_reduces_after_the_last_weight_gradient() -> None:
    lowered = lower(Schedule.from_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"))
    assert tokens(lowered, 1) == "1RECV_F0 1F0 1RECV_F1 1I0 1SEND_B0 1F1 1I1 1SEND_B1 1W0 1W1 1REDUCE_GRAD 1STEP"


def test_both_parts_of_an_overlapped_pair_are_sent() -> None:
    lowered = lower(Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n"))
    assert tokens(lowered, 0) == "0F0 0SEND_F0 0RECV_B0 (0F1;0B0)OVERLAP_F_B 0SEND_F1 0RECV_B1 0B1 0REDUCE_GRAD 0STEP"


def test_replicas_of_a_stage_each_reduce_and_step_in_one_order_on_all_their_ranks() -> None:
    lowered = lower(Schedule.from_csv("0F0,1F1,1B1,0B0\n1F0,1B0,0F1,0B1\n"))
    assert lowered.placement.kind == "replicated"
    assert tokens(lowered, 0) == "0F0 0SEND_F0 0RECV_B0 1RECV_F1 1F1 1B1 1SEND_B1 1REDUCE_GRAD 0B0 0REDUCE_GRAD 0STEP"
    assert tokens(lowered, 1) == "1RECV_F0 1F0 1B0 1SEND_B0 0F1 0SEND_F1 0RECV_B1 1REDUCE_GRAD 0B1 0REDUCE_GRAD 0STEP"


def test_lowering_twice_changes_nothing() -> None:
    lowered = lower(build("1F1B", pp=3, num_microbatches=4))
    assert lower(lowered) == lowered


def test_reductions_that_a_file_has_are_kept() -> None:
    """torch's own GPipe and 1F1B orders come with REDUCE_GRAD but without messages."""
    lowered = lower(Schedule.from_csv("0F0,0B0,0REDUCE_GRAD\n1F0,1B0,1REDUCE_GRAD\n"))
    assert tokens(lowered, 0) == "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD 0STEP"


@given(st.integers(2, 6), st.integers(1, 12))
def test_counts_of_what_is_added(pp: int, num_microbatches: int) -> None:
    kinds = lower(build("1F1B", pp=pp, num_microbatches=num_microbatches)).actions.kind.tolist()
    for kind in (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B):
        assert kinds.count(kind) == (pp - 1) * num_microbatches
    assert kinds.count(Kind.REDUCE_GRAD) == kinds.count(Kind.STEP) == pp


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_receives_stand_close_to_their_use_however_many_microbatches(name: str) -> None:
    """Compute actions between a receive and its use, at most: the same for 8 and 64 microbatches."""

    def farthest(num_microbatches: int) -> int:
        worst = 0
        for row in lower(build(name, pp=4, num_microbatches=num_microbatches)).rows():
            computed, received = 0, {}
            for action in row:
                if action.kind in (Kind.RECV_F, Kind.RECV_B):
                    received[action.stage, Kind.F if action.kind is Kind.RECV_F else Kind.B, action.microbatch] = (
                        computed
                    )
                elif action.kind in (Kind.F, Kind.B):
                    worst = max(
                        worst, computed - received.get((action.stage, action.kind, action.microbatch), computed)
                    )
                    computed += 1
        return worst

    assert farthest(8) == farthest(64) <= 3


@pytest.mark.parametrize(("name", "vpp", "pp", "num_microbatches"), CATALOG_SIZES)
def test_torch_finds_our_lowered_schedules_legal(name: str, vpp: int, pp: int, num_microbatches: int) -> None:
    """torch's validator takes the compute rows, and its dry run of messages gets through ours without a deadlock."""
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    built = build(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches)
    compute = {
        rank: [torch_schedules._Action.from_str(str(action)) for action in row] for rank, row in enumerate(built.rows())
    }
    torch_schedules._validate_schedule(compute, pp, built.num_stages, num_microbatches)
    rows = {
        rank: [
            torch_schedules._Action.from_str(str(action))
            for action in row
            if action.kind not in (Kind.REDUCE_GRAD, Kind.STEP)
        ]
        for rank, row in enumerate(lower(built).rows())
    }
    torch_schedules._simulate_comms_compute(rows, built.placement.rank_of, built.num_stages)


@pytest.mark.parametrize(("name", "vpp", "pp", "num_microbatches"), CATALOG_SIZES)
def test_torch_lowering_has_the_same_messages_in_the_same_order_per_pair(
    name: str, vpp: int, pp: int, num_microbatches: int
) -> None:
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    built = build(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches)
    compute = {
        rank: [torch_schedules._Action.from_str(str(action)) for action in row] for rank, row in enumerate(built.rows())
    }
    theirs = torch_schedules._add_send_recv(compute, built.placement.rank_of, built.num_stages)
    ours = lower(built)
    for rank in range(pp):
        for kind in (Kind.SEND_F, Kind.SEND_B):
            their_sends = [str(action) for action in theirs[rank] if action.computation_type.name == kind.name]
            assert [str(action) for action in ours.row(rank) if action.kind is kind] == their_sends


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0,0B1", "runs the forward of microbatch 1 0 times"),
        ("0F0,0B0,0B0", "runs the backward of microbatch 0 2 times"),
        ("0F0,0F1,0B1", "runs the backward of microbatch 0 0 times"),
    ],
)
def test_incomplete_compute_cannot_be_lowered(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        lower(Schedule.from_csv(text))


def test_an_order_that_can_never_run_names_the_circle() -> None:
    schedule = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0\n")
    with pytest.raises(UnrunnableError) as caught:
        lower(schedule)
    assert (
        "0B0 (rank 0) waits for 1B0 (rank 1) waits for 1F1 (rank 1) waits for 0F1 (rank 0) waits for 0B0 (rank 0)"
    ) in str(caught.value)
    assert [str(caught.value.schedule.actions[index]) for index in caught.value.cycle] == ["0B0", "1B0", "1F1", "0F1"]


def test_an_action_that_waits_for_itself_is_a_circle_of_one() -> None:
    with pytest.raises(UnrunnableError, match=r"OVERLAP_F_B \(rank 0\) waits for"):
        lower(Schedule.from_csv("(0F0;0B0)OVERLAP_F_B\n"))
