"""DualPipe, DualPipeV and combined 1F1B: published bubbles and memory, torch's own order, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from shardproof import build, check, lower, run_schedule
from shardproof.core.base.errors import ScheduleError
from shardproof.core.schedule import CATALOG
from shardproof.core.schedule.action import Kind
from shardproof.core.schedule.placement import Placement
from shardproof.core.schedule.schedule import Schedule
from shardproof.simulator.memory.memory import peak_in_flight


def idle_s(
    schedule: Schedule, forward: float, backward_input: float, backward_weight: float, overlap: float
) -> list[float]:
    """Makespan minus busy seconds of every rank."""
    timeline = run_schedule(schedule, forward, backward_input, backward_weight, overlap_s=overlap)
    return [timeline.makespan_s - timeline.busy_s(rank) for rank in range(schedule.num_ranks)]


DUALPIPE_SIZES = [(2, 4), (4, 8), (4, 10), (6, 12), (6, 20), (8, 20), (10, 24)]
DUALPIPEV_SIZES = [(2, 4), (3, 6), (3, 7), (4, 11), (5, 12), (6, 12)]
TIMES = [(1, 1, 1, 3), (1, 1, 1, 2.5), (2, 2, 1, 5), (2, 2, 1, 4), (3, 3, 2, 6)]


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("pp", "num_microbatches"), DUALPIPE_SIZES)
def test_the_bubble_of_dualpipe_is_p_half_minus_1_times_pair_plus_b_minus_3w(pp, num_microbatches, times):
    """The table of deepseek-ai/DualPipe: (p/2-1)(F&B+B-3W), B the full backward; it takes I to be as long as F."""
    _, backward_input, weight, pair = times
    bubble = (pp / 2 - 1) * (pair + backward_input + weight - 3 * weight)
    assert max(idle_s(build("DualPipe", pp=pp, num_microbatches=num_microbatches), *times)) == bubble


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("pp", "num_microbatches"), DUALPIPEV_SIZES)
def test_the_bubble_of_dualpipev_on_half_the_ranks_is_that_of_dualpipe(pp, num_microbatches, times):
    _, backward_input, weight, pair = times
    bubble = (pp - 1) * (pair + backward_input + weight - 3 * weight)
    folded = build("DualPipeV", pp=pp, num_microbatches=num_microbatches, vpp=2)
    whole = build("DualPipe", pp=2 * pp, num_microbatches=2 * num_microbatches)
    assert max(idle_s(folded, *times)) == bubble
    assert idle_s(whole, *times) == [*idle_s(folded, *times), *reversed(idle_s(folded, *times))]


def test_with_unit_costs_every_rank_of_dualpipe_p8_m20_idles_6_of_66():
    schedule = build("DualPipe", pp=8, num_microbatches=20)
    assert idle_s(schedule, 1, 1, 1, 3) == [6.0] * 8
    assert run_schedule(schedule, 1, 1, 1, overlap_s=3).makespan_s == 66
    one_direction = run_schedule(build("1F1B", pp=8, num_microbatches=20), 1, 1, 1)
    # (m+p-1)(F+B): DualPipe's rank runs two half-filled directions of the same 60 units
    assert one_direction.makespan_s == 81


@pytest.mark.parametrize(("pp", "num_microbatches"), DUALPIPE_SIZES)
def test_dualpipe_holds_p_plus_1_activations_and_two_stages_per_rank(pp, num_microbatches):
    schedule = build("DualPipe", pp=pp, num_microbatches=num_microbatches)
    assert peak_in_flight(schedule) == [pp + 1] * pp
    assert all(len(schedule.placement.stages_of(rank)) == 2 for rank in range(pp))


@pytest.mark.parametrize(("pp", "num_microbatches"), DUALPIPEV_SIZES)
def test_dualpipev_holds_2p_plus_1_activations_per_rank(pp, num_microbatches):
    assert peak_in_flight(build("DualPipeV", pp=pp, num_microbatches=num_microbatches, vpp=2)) == [2 * pp + 1] * pp


@pytest.mark.parametrize(("pp", "num_microbatches"), DUALPIPE_SIZES)
def test_dualpipe_is_legal_and_cannot_deadlock(pp, num_microbatches):
    assert check(build("DualPipe", pp=pp, num_microbatches=num_microbatches)) == []


@pytest.mark.parametrize(("pp", "num_microbatches"), [(1, 2), (1, 5), *DUALPIPEV_SIZES])
def test_dualpipev_is_legal_and_cannot_deadlock(pp, num_microbatches):
    assert check(build("DualPipeV", pp=pp, num_microbatches=num_microbatches, vpp=2)) == []


def test_dualpipe_p4_m8_in_the_published_order():
    """Figure 5 of the DeepSeek-V3 report has p=8, m=20; this is the same at p=4, where rank 2 mirrors
    rank 1 and rank 3 rank 0."""
    rows = build("DualPipe", pp=4, num_microbatches=8).to_csv().splitlines()
    assert rows[0] == (
        "0F0,0F1,0F2,3F4,3I4,3W4,3F5,(0F3;3B5)OVERLAP_F_B,(3F6;0B0)OVERLAP_F_B,3B6,(3F7;0B1)OVERLAP_F_B,3B7,0I2,0W2,0I3,0W3"
    )
    assert rows[1] == (
        "1F0,2F4,1F1,2F5,1F2,2B4,(2F6;1B0)OVERLAP_F_B,(1F3;2B5)OVERLAP_F_B,(2F7;1B1)OVERLAP_F_B,2B6,1B2,2I7,1I3,2W7,1W3"
    )
    other_half = str.maketrans("01234567", "45670123")
    for rank in (0, 1):  # microbatch m+4 on the mirrored rank does what microbatch m does here
        mirrored = Schedule.from_csv("\n".join(rows)).row(3 - rank)
        here = Schedule.from_csv("\n".join(rows)).row(rank)
        assert [str(int(m)).translate(other_half) for m in mirrored.microbatch] == [
            str(int(m)) for m in here.microbatch
        ]
        assert np.array_equal(mirrored.stage, here.stage) and np.array_equal(mirrored.kind, here.kind)


@pytest.mark.parametrize(("pp", "num_microbatches"), DUALPIPEV_SIZES)
def test_dualpipev_is_torchs_token_by_token(pp, num_microbatches):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = object.__new__(schedules.ScheduleDualPipeV)
    theirs.pp_group_size, theirs._n_microbatches = pp, num_microbatches
    rows = [",".join(map(str, theirs._calculate_single_rank_operations(rank))) for rank in range(pp)]
    assert build("DualPipeV", pp=pp, num_microbatches=num_microbatches, vpp=2).to_csv() == "\n".join(rows) + "\n"


def test_the_two_directions_of_a_csv_file_come_back_as_replicas():
    schedule = build("DualPipe", pp=6, num_microbatches=14)
    assert schedule.placement == Placement.replicated(6, 14) == Schedule.from_csv(schedule.to_csv()).placement
    assert Schedule.from_csv(lower(schedule).to_csv()) == lower(schedule)


def test_replicas_know_their_microbatches_and_ends():
    placement = Placement.replicated(4, 10)
    assert placement.ranks == ((0, 3), (1, 2), (2, 1), (3, 0))
    assert [placement.microbatches_of(1, replica) for replica in (0, 1)] == [(0, 5), (5, 10)]
    assert (placement.replica_of(1, 1), placement.replica_of(1, 2)) == (0, 1)
    # both ends on both ranks: nothing to send for a tied table
    assert placement.ends_of(0) == placement.ends_of(3) == ()
    assert Placement.loop(3, 6, 4).ends_of(2) == (0, 2) and Placement.loop(3, 6, 4).ends_of(1) == ()
    same_direction = Placement("replicated", 4, ((0, 2), (1, 3)), 4)
    assert same_direction.ends_of(2) == same_direction.ends_of(3) == (2, 3)


@pytest.mark.parametrize(("pp", "num_microbatches"), DUALPIPE_SIZES)
def test_both_ranks_of_a_pair_list_their_two_reductions_in_one_order(pp, num_microbatches):
    lowered = lower(build("DualPipe", pp=pp, num_microbatches=num_microbatches))
    orders = [row.stage[row.kind == Kind.REDUCE_GRAD].tolist() for row in lowered.rows()]
    assert orders == [*orders[: pp // 2], *reversed(orders[: pp // 2])]
    assert [sorted(order) for order in orders] == [sorted((rank, pp - 1 - rank)) for rank in range(pp)]


def test_a_reduction_waits_for_the_slower_replica():
    """F=1, B=2: the replicas of stage 0 end at 6 and 11, those of stage 1 at 9 and 4; a reduction
    takes 1, then 4 seconds."""
    schedule = Schedule.from_csv("0F0,0B0,1F1,1B1\n1F0,1B0,0F1,0B1\n")
    for seconds, spans in (
        (1, [("1REDUCE_GRAD", 9, 10), ("0REDUCE_GRAD", 11, 12)]),
        (4, [("1REDUCE_GRAD", 9, 13), ("0REDUCE_GRAD", 13, 17)]),
    ):
        timeline = run_schedule(schedule, 1, 1, 1, reduce_s=seconds)
        for rank in (0, 1):
            assert [(str(span.action), span.start_s, span.end_s) for span in timeline.select(rank, "dp")] == spans


def test_reductions_in_crossed_orders_deadlock():
    rows = lower(build("DualPipe", pp=2, num_microbatches=4)).to_csv()
    first, second = rows.splitlines()
    swapped = second.replace("0REDUCE_GRAD", "x").replace("1REDUCE_GRAD", "0REDUCE_GRAD").replace("x", "1REDUCE_GRAD")
    run_schedule(Schedule.from_csv(rows))
    with pytest.raises(ScheduleError, match="deadlocks"):
        run_schedule(Schedule.from_csv(f"{first}\n{swapped}\n"))


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        (
            "DualPipe",
            {"pp": 3, "num_microbatches": 8},
            ("even number of ranks, got pp=3. Use pp=4 with at least 8 microbatches"),
        ),
        ("DualPipe", {"pp": 4, "num_microbatches": 6}, "at least pp=4 of them, got 6. Use 8 microbatches"),
        ("DualPipe", {"pp": 4, "num_microbatches": 11}, "got 11. Use 12 microbatches"),
        ("DualPipe", {"pp": 4, "num_microbatches": 8, "vpp": 2}, "runs one stage per rank, got vpp=2"),
        ("DualPipeV", {"pp": 4, "num_microbatches": 7, "vpp": 2}, "2\\*pp=8, got 7. Use 8 microbatches, or pp=3"),
        ("DualPipeV", {"pp": 2, "num_microbatches": 8, "vpp": 3}, "needs vpp of 2, got vpp=3"),
    ],
)
def test_sizes_that_were_never_published_are_refused_with_the_nearest_legal_ones(name, sizes, message):
    with pytest.raises(ScheduleError, match=message):
        build(name, **sizes)


@pytest.mark.parametrize("times", [(1, 1, 1, 3), (1, 1, 1, 2), (1, 1, 1, 2.5), (2, 1, 0, 2.5), (1, 0.5, 0.5, 3)])
@pytest.mark.parametrize(
    ("pp", "num_microbatches", "vpp"),
    [
        (1, 1, 1),
        (1, 4, 1),
        (2, 4, 1),
        (3, 5, 1),
        (4, 2, 1),
        (4, 6, 1),
        (5, 12, 1),
        (2, 4, 2),
        (3, 6, 2),
        (4, 8, 3),
        (5, 10, 2),
    ],
)
def test_the_makespan_of_combined_1f1b_is_vp_forwards_and_backwards_and_pairs_for_the_rest(
    pp, num_microbatches, vpp, times
):
    forward, backward_input, weight, pair = times
    schedule = build("Combined1F1B", pp=pp, num_microbatches=num_microbatches, vpp=vpp)
    makespan = vpp * pp * (forward + backward_input + weight) + (num_microbatches * vpp - (vpp - 1) * pp - 1) * pair
    assert run_schedule(schedule, *times[:3], overlap_s=pair).makespan_s == makespan


def test_combined_1f1b_without_overlap_has_the_bubble_of_interleaved_1f1b():
    for pp, num_microbatches, vpp in ((3, 6, 2), (4, 8, 3), (6, 12, 2)):
        combined = build("Combined1F1B", pp=pp, num_microbatches=num_microbatches, vpp=vpp)
        interleaved = build("Interleaved1F1B", pp=pp, num_microbatches=num_microbatches, vpp=vpp)
        assert (
            run_schedule(combined).makespan_s
            == run_schedule(interleaved).makespan_s
            == 3 * (num_microbatches * vpp + pp - 1)
        )


def test_combined_1f1b_holds_two_more_activations_than_its_warm_up_has_forwards_but_the_last():
    assert peak_in_flight(build("Combined1F1B", pp=4, num_microbatches=9)) == [8, 6, 4, 2]
    assert peak_in_flight(build("Combined1F1B", pp=4, num_microbatches=8, vpp=2)) == [12, 10, 8, 6]
    assert peak_in_flight(build("Combined1F1B", pp=4, num_microbatches=3)) == [3, 3, 3, 2]


@pytest.mark.parametrize("pp", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 9])
@pytest.mark.parametrize("vpp", [1, 2, 3])
def test_combined_1f1b_is_legal_and_cannot_deadlock_also_with_fewer_microbatches_than_ranks(pp, num_microbatches, vpp):
    assert check(build("Combined1F1B", pp=pp, num_microbatches=num_microbatches, vpp=vpp)) == []


def test_every_forward_but_the_warm_up_of_combined_1f1b_is_in_a_pair():
    schedule = build("Combined1F1B", pp=3, num_microbatches=8, vpp=2, microbatch_group_size=4)
    pairs = [int((row.kind == Kind.OVERLAP_F_B).sum()) for row in schedule.rows()]
    assert pairs == [16 - (2 * (2 - rank) + 4 + 1) for rank in range(3)]


@pytest.mark.parametrize("name", CATALOG)
def test_the_placement_of_a_catalog_entry_is_that_of_its_schedule(name):
    entry = CATALOG[name]
    for pp, num_microbatches in ((2, 4), (4, 8), (6, 12)):
        vpp = entry.nearest_vpp(2 if entry.chunks else 1)
        built = build(name, pp=pp, num_microbatches=num_microbatches, vpp=vpp)
        assert entry.placement(pp, vpp, num_microbatches) == built.placement
