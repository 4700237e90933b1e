"""The compiled loops against the plain ones: the same bits for every schedule of the catalog, every
kind of send, any times."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.core.base.errors import ScheduleError
from shardproof.core.schedule import build, lower
from shardproof.core.schedule.action import Kind
from shardproof.core.schedule.placement import Placement
from shardproof.core.schedule.schedule import Schedule
from shardproof.simulator.engine import kernel
from shardproof.simulator.engine.engine import execute, plain_run, run_schedule
from shardproof.simulator.engine.graph import build_graph, plain_graph

needs_kernel = pytest.mark.skipif(
    not kernel.IS_COMPILED, reason=("the compiled loops were not built (no C compiler at install time)")
)

SHAPES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBH1": 1,
    "ZBH2": 1,
    "ZBVZeroBubble": 2,
    "DualPipe": 1,
    "DualPipeV": 2,
}
SENDS = ["buffered", "rendezvous", "blocking"]
COLUMNS = ["rank", "waits", "partner", "posted_after", "lane", "lane_order"]


def lowered(name: str, pp: int, rounds: int, active: int | None = None) -> Schedule:
    """A schedule with all its messages; `rounds` times the microbatches that every builder accepts."""
    num_microbatches = 2 * pp * rounds if name.startswith("DualPipe") else pp * rounds
    return lower(build(name, pp=pp, vpp=SHAPES[name], num_microbatches=num_microbatches), max_active_stages=active)


def assert_same_graph(schedule: Schedule, sends, recv_buffers: int) -> None:
    found = build_graph(schedule, sends=sends, recv_buffers=recv_buffers)
    expected = plain_graph(schedule, sends=sends, recv_buffers=recv_buffers)
    assert found.rank.dtype == np.int32, "not the compiled path"
    for column in COLUMNS:
        assert np.array_equal(getattr(found, column), getattr(expected, column)), column
    assert found.lanes == expected.lanes


@needs_kernel
@pytest.mark.parametrize("sends", SENDS)
@pytest.mark.parametrize("name", SHAPES)
def test_compiled_waits_are_the_plain_ones_for_every_schedule(name, sends):
    for pp in (2, 4):
        for recv_buffers in (0, 1, 2, 5, 10**9):
            assert_same_graph(lowered(name, pp, 3), sends, recv_buffers)


@needs_kernel
@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_compiled_waits_are_the_plain_ones_where_parameters_are_gathered(name):
    schedule = lowered(name, 4, 2, active=1)
    assert (schedule.actions.kind == Kind.UNSHARD).any()
    assert_same_graph(schedule, "rendezvous", 2)


@needs_kernel
@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(SHAPES)),
    pp=st.sampled_from([2, 4, 6]),
    rounds=st.integers(1, 3),
    sends=st.sampled_from(SENDS),
    recv_buffers=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
    led=st.booleans(),
)
def test_compiled_times_are_the_plain_ones_to_the_last_bit(name, pp, rounds, sends, recv_buffers, seed, led):
    graph = build_graph(lowered(name, pp, rounds), sends=sends, recv_buffers=recv_buffers)
    random = np.random.default_rng(seed)
    duration_s = random.exponential(size=len(graph.rank)) * random.integers(0, 2, size=len(graph.rank))
    extra = {}
    if led:
        extra = {key: random.exponential(size=len(graph.rank)) for key in ("lead_s", "tail_s")}
    found, expected = execute(graph, duration_s, **extra), plain_run(graph, duration_s, **extra)
    assert np.array_equal(found.start_s, expected.start_s)
    assert np.array_equal(found.end_s, expected.end_s)


def outcome(make) -> object:
    """What a function returns, or the text of its `ScheduleError`."""
    try:
        return make()
    except ScheduleError as error:
        return str(error)


@needs_kernel
@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipe"]),
    sends=st.sampled_from(SENDS),
    active=st.sampled_from([None, 1]),
    data=st.data(),
)
def test_damaged_schedules_give_the_same_graph_or_the_same_words(name, sends, active, data):
    """Actions dropped, doubled, or moved within their row, as a hostile CSV could have them."""
    whole = lowered(name, 2, 2, None if name == "DualPipe" else active)
    rows = [list(row) for row in whole.rows()]
    for _ in range(data.draw(st.integers(1, 4))):
        row = data.draw(st.sampled_from(rows))
        place = data.draw(st.integers(0, max(0, len(row) - 1)))
        match data.draw(st.sampled_from(["drop", "double", "move"])) if row else "none":
            case "drop":
                del row[place]
            case "double":
                row.insert(data.draw(st.integers(0, len(row))), row[place])
            case "move":
                row.insert(data.draw(st.integers(0, len(row) - 1)), row.pop(place))
    damaged = Schedule.from_rows(name, whole.placement, rows)
    found, expected = (outcome(lambda make=make: make(damaged, sends=sends)) for make in (build_graph, plain_graph))
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected
        return
    for column in COLUMNS[:4]:
        assert np.array_equal(getattr(found, column), getattr(expected, column)), column
    duration_s = np.arange(len(damaged), dtype=float)
    ran, plain = (outcome(lambda run=run: run(found, duration_s).end_s.tolist()) for run in (execute, plain_run))
    assert ran == plain


@needs_kernel
def test_integers_take_the_compiled_path_while_their_sums_fit_53_bits_and_fractions_never():
    schedule = lowered("1F1B", 2, 2)
    size = len(schedule)
    taken = []

    def watched(graph, duration_s, **more):
        taken.append(duration_s.dtype)
        return plain_run(graph, duration_s, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardproof.simulator.engine.engine.plain_run", watched)
        for duration in (1, 1.5, 2**53 // size):
            execute(build_graph(schedule), [duration] * size)
        assert not taken
        execute(build_graph(schedule), [2**53 // size + 1] * size)
        run_schedule(schedule, forward_s=Fraction(1, 3))
        assert taken == [object, object]


@needs_kernel
def test_durations_of_another_count_are_refused():
    graph = build_graph(lowered("1F1B", 2, 2))
    with pytest.raises(ValueError, match=r"shape \(3,\) for \d+ actions"):
        execute(graph, np.ones(3))


def without_kernel(code: str) -> str:
    """What a program prints in a process where the extension cannot be imported."""
    start = "import sys; sys.modules['shardproof.simulator.engine._kernel'] = None\n"
    return subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True, check=True).stdout


def test_everything_runs_without_the_extension():
    code = """
from shardproof import build, run_schedule
from shardproof.simulator.engine import kernel
timeline = run_schedule(build("Interleaved1F1B", pp=4, vpp=2, num_microbatches=8), send_s=0.5, sends="rendezvous")
print(kernel.IS_COMPILED, timeline.makespan_s)
"""
    timeline = run_schedule(build("Interleaved1F1B", pp=4, vpp=2, num_microbatches=8), send_s=0.5, sends="rendezvous")
    assert without_kernel(code).split() == ["False", str(timeline.makespan_s)]


def test_a_build_of_another_version_is_not_used():
    code = """
import types
stale = types.ModuleType("shardproof.simulator.engine._kernel")
stale.VERSION = -1
sys.modules["shardproof.simulator.engine._kernel"] = stale
from shardproof.simulator.engine import kernel
print(kernel.IS_COMPILED)
"""
    assert without_kernel(code).strip() == "False"


def parse(text: str, num_stages: int, num_microbatches: int) -> Schedule:
    from shardproof.core.schedule.action import Action

    rows = [[Action.from_str(cell) for cell in row.split(",")] for row in text.split(";")]
    return Schedule.from_rows("given", Placement.loop(len(rows), num_stages, num_microbatches), rows)


def test_a_blocking_send_keeps_its_rank_from_computing():
    schedule = parse(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1;1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1", 2, 2
    )
    times = {}
    for sends in SENDS:
        timeline = run_schedule(schedule, send_s=5, sends=sends, recv_buffers=0)
        times[sends] = {
            str(span.action): (span.start_s, span.end_s) for span in timeline.spans if span.lane == "compute"
        }
    assert times["rendezvous"]["0F1"] == (1, 2), "0SEND_F0 overlaps with it"
    assert times["blocking"]["0F1"] == (6, 7), "0SEND_F0 runs until 6"
    # 1F0 6-7, 1B0 7-9, 1SEND_B0 9-14 meanwhile rank 1 stands still, and 1RECV_F1 is posted at 9
    assert times["rendezvous"]["1F1"] == (14, 15)
    assert times["blocking"]["1F1"] == (14, 15)
    assert times["blocking"]["0B0"] == (14, 16)


@pytest.mark.parametrize("name", [name for name in SHAPES if not name.startswith("DualPipe")])
def test_blocking_is_never_faster_than_rendezvous_nor_that_than_buffered(name):
    spans = [run_schedule(lowered(name, 4, 2), send_s=0.25, sends=sends).makespan_s for sends in SENDS]
    assert spans == sorted(spans)
    without = [run_schedule(lowered(name, 4, 2), sends=sends).makespan_s for sends in SENDS]
    assert without[0] == without[1]


def test_a_blocking_send_listed_before_its_payload_is_refused():
    schedule = parse("0SEND_F0,0F0,0RECV_B0,0B0;1RECV_F0,1F0,1B0,1SEND_B0", 2, 1)
    with pytest.raises(ScheduleError, match="0SEND_F0 on pipeline rank 0 comes before what makes its payload"):
        build_graph(schedule, sends="blocking")


def reduction_under_backward(lead_s: float, tail_s: float, reduce_s: float) -> tuple[float, float]:
    """Start and end of a reduction after F 0-1 and B 1-5, with a step behind it."""
    graph = build_graph(parse("0F0,0B0,0REDUCE_GRAD,0STEP", 1, 1))
    run = execute(
        graph,
        np.array([1.0, 4.0, reduce_s, 1.0]),
        lead_s=np.array([0, 0, lead_s, 0.0]),
        tail_s=np.array([0, 0, tail_s, 0.0]),
    )
    assert run.start_s[3] == run.end_s[2]
    return run.start_s[2], run.end_s[2]


def test_a_reduction_starts_lead_s_before_the_last_backward_ends_and_ends_tail_s_after_it():
    assert reduction_under_backward(0, 0, 2) == (5, 7)
    assert reduction_under_backward(3, 0, 2) == (2, 5), "not before its last gradient is there"
    assert reduction_under_backward(3, 0.5, 2) == (2, 5.5)
    assert reduction_under_backward(3, 0.5, 6) == (2, 8), "the network is the bottleneck"
    assert reduction_under_backward(99, 0, 1) == (1, 5), "never before the backward"


def test_reductions_of_two_replicas_run_under_both_last_backwards():
    schedule = lowered("DualPipe", 2, 1)
    graph = build_graph(schedule)
    kind, stage = schedule.actions.kind, schedule.actions.stage
    rng = np.random.default_rng(7)
    duration_s = rng.integers(1, 9, size=len(schedule)).astype(float)
    reduce = np.flatnonzero(kind == Kind.REDUCE_GRAD)
    lead_s, tail_s = np.where(kind == Kind.REDUCE_GRAD, 2.0, 0.0), np.where(kind == Kind.REDUCE_GRAD, 0.5, 0.0)
    run = execute(graph, duration_s, lead_s=lead_s, tail_s=tail_s)
    for s in range(2):
        pair = reduce[stage[reduce] == s]
        last = max(run.end_s[graph.waits[1, pair]])
        assert len(set(run.start_s[pair])) == 1
        assert (run.start_s[pair] >= last - 2).all()
        assert (run.end_s[pair] == np.maximum(run.start_s[pair] + duration_s[pair], last + 0.5)).all()
