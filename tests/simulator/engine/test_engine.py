"""The engine against closed forms, hand-made spans, and a naive second implementation of the execution rule."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.core.base.errors import ScheduleError
from shardproof.core.schedule import build, lower
from shardproof.core.schedule.action import COMPUTE, Action, Kind
from shardproof.core.schedule.placement import Placement
from shardproof.core.schedule.schedule import Schedule
from shardproof.core.schedule.timeline import Timeline
from shardproof.simulator.engine.engine import execute, run_schedule
from shardproof.simulator.engine.graph import build_graph

COMPUTING = COMPUTE | {Kind.STEP}


def idle_s(timeline: Timeline, rank: int) -> float:
    return timeline.makespan_s - timeline.busy_s(rank)


def span_times(timeline: Timeline) -> dict[tuple[int, str], tuple[float, float]]:
    return {(span.global_rank, str(span.action)): (span.start_s, span.end_s) for span in timeline.spans}


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 1), (3, 5), (4, 8), (5, 12), (6, 6), (8, 3)])
def test_bubble_is_p_minus_1_of_m_plus_p_minus_1(name, p, m):
    timeline = run_schedule(build(name, pp=p, num_microbatches=m))
    assert timeline.makespan_s == 3 * (m + p - 1)
    for rank in range(p):
        assert idle_s(timeline, rank) * (m + p - 1) == timeline.makespan_s * (p - 1)


def test_1f1b_p4_m8_has_bubble_3_of_11():
    timeline = run_schedule(
        build("1F1B", pp=4, num_microbatches=8), forward_s=11, backward_input_s=11, backward_weight_s=11
    )
    assert [idle_s(timeline, rank) / timeline.makespan_s for rank in range(4)] == [3 / 11] * 4


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (3, 2, 6), (4, 3, 8), (5, 2, 10), (4, 4, 16)])
def test_interleaving_divides_the_bubble_by_v(p, v, m):
    plain = run_schedule(build("1F1B", pp=p, num_microbatches=m), forward_s=v, backward_input_s=v, backward_weight_s=v)
    interleaved = run_schedule(build("Interleaved1F1B", pp=p, vpp=v, num_microbatches=m))
    assert [v * idle_s(interleaved, rank) for rank in range(p)] == [idle_s(plain, rank) for rank in range(p)]


def test_fractions_stay_exact_until_the_end():
    third = Fraction(1, 3)
    timeline = run_schedule(
        build("1F1B", pp=3, num_microbatches=7), forward_s=third, backward_input_s=third, backward_weight_s=third
    )
    assert timeline.makespan_s == float(7 + 3 - 1)


def test_send_time_is_seen_on_the_way_up_and_down():
    timeline = run_schedule(build("1F1B", pp=3, num_microbatches=1), send_s=5)
    assert timeline.makespan_s == 3 * 1 + 3 * 2 + 4 * 5
    times = span_times(timeline)
    assert times[0, "0SEND_F0"] == times[1, "1RECV_F0"] == (1, 6)
    assert times[1, "1F0"] == (6, 7)


def test_durations_per_stage_and_reduction_before_step():
    timeline = run_schedule(
        build("1F1B", pp=2, num_microbatches=1),
        forward_s=[1, 2],
        backward_input_s=[3, 4],
        backward_weight_s=[5, 6],
        reduce_s=7,
        step_s=9,
    )
    times = span_times(timeline)
    assert times[1, "1B0"] == (3, 13)
    assert times[0, "0B0"] == (13, 21)
    assert times[1, "1REDUCE_GRAD"] == (13, 20)
    assert times[1, "1STEP"] == (20, 29)
    assert times[0, "0STEP"] == (28, 37)


def two_ranks_with_a_slow_receiver() -> Schedule:
    placement = Placement.loop(2, 2, 3)
    rows = [
        "0F0,0SEND_F0,0F1,0SEND_F1,0F2,0SEND_F2,0RECV_B0,0B0,0RECV_B1,0B1,0RECV_B2,0B2",
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1RECV_F2,1F2,1B2,1SEND_B2",
    ]
    return Schedule.from_rows(
        "slow receiver", placement, [[Action.from_str(cell) for cell in row.split(",")] for row in rows]
    )


def test_buffered_send_leaves_and_rendezvous_send_waits_for_its_receive():
    schedule = two_ranks_with_a_slow_receiver()
    slow = {"forward_s": [1, 10], "send_s": 1, "recv_buffers": 0}
    buffered = span_times(run_schedule(schedule, **slow, sends="buffered"))
    rendezvous = span_times(run_schedule(schedule, **slow, sends="rendezvous"))
    assert buffered[0, "0SEND_F1"] == (2, 3)
    assert buffered[1, "1RECV_F1"] == (14, 14)
    # rank 1 posts its second receive after 1B0, which ends at 2 + 10 + 2
    assert rendezvous[0, "0SEND_F1"] == rendezvous[1, "1RECV_F1"] == (14, 15)
    assert buffered[1, "1F1"][0] == 14
    assert rendezvous[1, "1F1"][0] == 15


def test_a_receive_posted_one_ahead_hides_the_rendezvous():
    schedule = two_ranks_with_a_slow_receiver()
    times = span_times(run_schedule(schedule, forward_s=[1, 10], send_s=1, sends="rendezvous", recv_buffers=1))
    assert times[0, "0SEND_F1"] == (2, 3)
    assert times[0, "0SEND_F2"] == (14, 15)
    assert times[1, "1F1"][0] == 14


def test_input_and_weight_gradients_apart_and_overlapped_pair():
    placement = Placement.loop(1, 1, 3)
    cells = ["0F0", "(0F1;0B0)OVERLAP_F_B", "0I1", "0F2", "0W1", "0I2", "0W2"]
    schedule = Schedule.from_rows("pair", placement, [[Action.from_str(cell) for cell in cells]])
    assert span_times(run_schedule(schedule))[0, "(0F1;0B0)OVERLAP_F_B"] == (1, 4)
    times = span_times(run_schedule(schedule, overlap_s=2.5, backward_input_s=3, backward_weight_s=4))
    assert times[0, "(0F1;0B0)OVERLAP_F_B"] == (1, 3.5)
    assert times[0, "0I1"] == (3.5, 6.5)
    assert times[0, "0W1"] == (7.5, 11.5)
    assert times[0, "0B2"] == (11.5, 18.5), "an I that its W follows at once is one B"


def test_forward_waits_for_its_parameters():
    placement = Placement.loop(1, 1, 1)
    cells = ["0UNSHARD", "0F0", "0B0", "0RESHARD", "0REDUCE_GRAD", "0STEP"]
    schedule = Schedule.from_rows("sharded", placement, [[Action.from_str(cell) for cell in cells]])
    graph = build_graph(schedule)
    run = execute(graph, [4, 1, 2, 0, 3, 1])
    assert run.start_s.tolist() == [0, 4, 5, 7, 7, 10]
    assert run.end_s.tolist() == [4, 5, 7, 7, 10, 11]


def test_circular_order_is_reported_with_the_stuck_actions():
    rows = [
        "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1",
        "1RECV_F1,1F1,1RECV_F0,1F0,1B0,1SEND_B0,1B1,1SEND_B1",
    ]
    schedule = Schedule.from_rows(
        "circle", Placement.loop(2, 2, 2), [[Action.from_str(c) for c in row.split(",")] for row in rows]
    )
    with pytest.raises(ScheduleError, match=r"circle.*rank 0 at 0B0, rank 1 at 1F1"):
        run_schedule(schedule)


def test_missing_receive_is_reported_with_the_send():
    rows = ["0F0,0SEND_F0,0RECV_B0,0B0", "1F0,1B0,1SEND_B0"]
    schedule = Schedule.from_rows(
        "hole", Placement.loop(2, 2, 1), [[Action.from_str(c) for c in row.split(",")] for row in rows]
    )
    with pytest.raises(ScheduleError, match=r"0SEND_F0 on pipeline rank 0 has no receive"):
        run_schedule(schedule)


@pytest.mark.parametrize("value", [-1, float("inf"), float("nan")])
def test_a_duration_that_is_none_is_refused(value):
    with pytest.raises(ScheduleError, match="forward_s"):
        run_schedule(build("1F1B", pp=2, num_microbatches=2), forward_s=value)


def test_durations_of_the_wrong_count_are_refused():
    with pytest.raises(ScheduleError, match="send_s has 3 values for 2 stages"):
        run_schedule(build("1F1B", pp=2, num_microbatches=2), send_s=[1, 2, 3])


def test_lanes_run_in_list_order_and_never_overlap():
    timeline = run_schedule(build("Interleaved1F1B", pp=3, vpp=2, num_microbatches=6), send_s=2, sends="rendezvous")
    for rank in range(3):
        for lane in timeline.spans.lanes:
            spans = timeline.select(rank, lane)
            assert all(a.end_s <= b.start_s for a, b in pairwise(spans))


def naive_times(
    schedule: Schedule, duration, *, rendezvous: bool, recv_buffers: int
) -> dict[tuple[int, str], tuple[int, int]]:
    """The execution rule again, on dicts, by repeated relaxation: slow, and written without looking at
    the engine's shortcuts."""
    rows = [list(row) for row in schedule.rows()]
    owner = {(a.kind, a.stage, a.microbatch): (rank, str(a)) for rank, row in enumerate(rows) for a in row}
    start = {(rank, str(a)): 0 for rank, row in enumerate(rows) for a in row}
    end = dict(start)
    lanes: dict[tuple, list[Action]] = {}
    for rank, row in enumerate(rows):
        for a in row:
            lanes.setdefault((rank, lane_of(schedule, owner, a)), []).append(a)
    for _ in range(100_000):
        before = dict(end)
        for (rank, _lane), actions in lanes.items():
            for position, a in enumerate(actions):
                key = (rank, str(a))
                ready = end[rank, str(actions[position - 1])] if position else 0
                for other in inputs_of(schedule, owner, rows[rank], a):
                    ready = max(ready, end[other])
                if a.kind in (Kind.RECV_F, Kind.RECV_B):
                    if position >= recv_buffers:
                        ready = max(ready, reached(rows[rank], actions[position - recv_buffers], end, rank))
                    send = owner[send_of(a)]
                    if rendezvous:
                        start[key] = start[send] = max(ready, start[send])
                        end[key] = end[send] = start[key] + duration(a)
                    else:
                        start[key] = max(ready, start[send])
                        end[key] = max(start[key], end[send])
                else:
                    start[key] = max(ready, start[key])
                    end[key] = start[key] + duration(a)
        if end == before:
            return {key: (start[key], end[key]) for key in end}
    raise AssertionError("does not settle")


def send_of(a: Action) -> tuple:
    return (
        (Kind.SEND_F, a.stage - 1, a.microbatch) if a.kind is Kind.RECV_F else (Kind.SEND_B, a.stage + 1, a.microbatch)
    )


def lane_of(schedule: Schedule, owner, a: Action):
    match a.kind:
        case Kind.SEND_F | Kind.RECV_B:
            return a.kind, schedule.placement.rank_of(a.stage + 1)
        case Kind.SEND_B | Kind.RECV_F:
            return a.kind, schedule.placement.rank_of(a.stage - 1)
        case Kind.REDUCE_GRAD:
            return "dp"
        case _:
            return "compute"


def inputs_of(schedule: Schedule, owner, row: list[Action], a: Action) -> list[tuple[int, str]]:
    last = schedule.num_stages - 1
    wanted = []
    match a.kind:
        case Kind.F if a.stage > 0:
            wanted = [(Kind.RECV_F, a.stage, a.microbatch), (Kind.F, a.stage - 1, a.microbatch)]
        case Kind.B if a.stage < last:
            wanted = [(Kind.RECV_B, a.stage, a.microbatch), (Kind.B, a.stage + 1, a.microbatch)]
        case Kind.SEND_F:
            wanted = [(Kind.F, a.stage, a.microbatch)]
        case Kind.SEND_B:
            wanted = [(Kind.B, a.stage, a.microbatch)]
        case Kind.REDUCE_GRAD:
            return [owner[b.kind, b.stage, b.microbatch] for b in row if b.kind is Kind.B and b.stage == a.stage]
        case Kind.STEP:
            return [owner[b.kind, b.stage, b.microbatch] for b in row if b.kind is Kind.REDUCE_GRAD]
    return [owner[key] for key in wanted if key in owner][:1]


def reached(row: list[Action], receive: Action, end, rank: int) -> int:
    done = [end[rank, str(a)] for a in row[: row.index(receive)] if a.kind in COMPUTING]
    return done[-1] if done else 0


@settings(max_examples=25, deadline=None)
@given(
    pp=st.sampled_from([1, 2, 3]),
    vpp=st.sampled_from([1, 2]),
    m=st.integers(1, 5),
    rendezvous=st.booleans(),
    recv_buffers=st.integers(0, 2),
    costs=st.lists(st.integers(0, 9), min_size=24, max_size=24),
)
def test_engine_agrees_with_the_naive_rule(pp, vpp, m, rendezvous, recv_buffers, costs):
    if pp == 1:
        vpp = 1
    schedule = lower(build("Interleaved1F1B" if vpp > 1 else "1F1B", pp=pp, vpp=vpp, num_microbatches=m))
    per_stage = dict(enumerate(zip(costs[0:6], costs[6:12], costs[12:18], costs[18:24], strict=True)))

    def duration(a: Action) -> int:
        forward, backward, send, reduce = per_stage[a.stage]
        if a.kind in (Kind.RECV_F, Kind.RECV_B):
            return per_stage[send_of(a)[1]][2]
        return {Kind.F: forward, Kind.B: backward, Kind.SEND_F: send, Kind.SEND_B: send, Kind.REDUCE_GRAD: reduce}.get(
            a.kind, 1
        )

    sends = "rendezvous" if rendezvous else "buffered"
    graph = build_graph(schedule, sends=sends, recv_buffers=recv_buffers)
    run = execute(graph, np.array([duration(a) for a in schedule.actions], dtype=np.float64))
    expected = naive_times(schedule, duration, rendezvous=rendezvous, recv_buffers=recv_buffers)
    found = {
        (rank, str(a)): (start, end)
        for rank, a, start, end in zip(
            graph.rank.tolist(), schedule.actions, run.start_s.tolist(), run.end_s.tolist(), strict=True
        )
    }
    assert found == expected
