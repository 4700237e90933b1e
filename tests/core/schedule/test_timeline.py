"""Timelines: selection, idle time, and the recorded format."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.core.base.errors import TimelineError
from shardproof.core.base.names import is_plain
from shardproof.core.schedule.action import Action, Kind
from shardproof.core.schedule.timeline import MemorySample, Span, Timeline, message_lane


def span(rank, lane, action, start, end):
    return Span(rank, lane, Action.from_str(action), start, end)


@pytest.fixture
def timeline():
    spans = [
        span(1, "compute", "1F0", 1.0, 2.0),
        span(0, "compute", "0B0", 3.0, 5.0),
        span(0, "compute", "0F0", 0.0, 1.0),
        span(0, message_lane("F", True, 1), "0SEND_F0", 1.0, 1.25),
        span(0, "dp", "0REDUCE_GRAD", 5.0, 6.0),
    ]
    return Timeline.from_spans(spans, "measured", [MemorySample(0, 0.0, 10), MemorySample(0, 0.5, 30)], "run 7")


def test_spans_are_ordered_by_rank_lane_and_start(timeline):
    assert [str(s.action) for s in timeline.spans] == ["0SEND_F0", "0F0", "0B0", "0REDUCE_GRAD", "1F0"]
    assert [str(s.action) for s in timeline.select(0)] == ["0F0", "0B0"]
    assert timeline.select(0, "F>7") == [] and timeline.global_ranks == (0, 1)


def test_bubble_is_idle_compute_over_makespan(timeline):
    assert (timeline.makespan_s, timeline.busy_s(0), timeline.busy_s(1)) == (6.0, 3.0, 1.0)
    assert timeline.bubble_fraction(0) == 0.5 and timeline.bubble_fraction(1) == pytest.approx(5 / 6)


def test_a_timeline_without_spans_takes_no_time():
    empty = Timeline.from_spans([], "predicted")
    assert (empty.makespan_s, empty.global_ranks, empty.bubble_fraction(0)) == (0.0, (), 0.0)
    assert Timeline.from_json(empty.to_json()).to_json() == empty.to_json()


def same(a, b):
    return list(a.spans) == list(b.spans) and (a.memory, a.source, a.title) == (b.memory, b.source, b.title)


def test_json_round_trip_is_exact(timeline):
    again = Timeline.from_json(timeline.to_json())
    assert same(again, timeline) and again.to_json() == timeline.to_json()


ACTIONS = st.one_of(
    st.builds(Action, st.integers(0, 99), st.sampled_from([Kind.F, Kind.B, Kind.RECV_B]), st.integers(0, 999)),
    st.builds(Action, st.integers(0, 99), st.sampled_from([Kind.STEP, Kind.REDUCE_GRAD])),
    st.builds(Action.overlap, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
)
TIMES = st.just(0.0) | st.floats(1e-12, 1e6)
TITLES = st.text(max_size=5).filter(is_plain)
SPANS = st.builds(
    lambda rank, lane, action, times: Span(rank, lane, action, min(times), max(times)),
    st.integers(0, 5000),
    st.sampled_from(["compute", "F>3", "dp", "\u03bb"]),
    ACTIONS,
    st.tuples(TIMES, TIMES),
)


SAMPLES = st.builds(MemorySample, st.integers(0, 9), TIMES, st.integers(0, 2**50))


@given(st.lists(SPANS, max_size=8), TITLES, st.lists(SAMPLES, max_size=3))
def test_any_timeline_survives_json_to_the_last_bit(spans, title, memory):
    timeline = Timeline.from_spans(spans, "predicted", memory, title)
    assert same(Timeline.from_json(timeline.to_json()), timeline)


def test_saved_files_load_again_and_gz_is_decided_by_the_suffix(timeline, tmp_path):
    plain, packed = tmp_path / "a.timeline.json", tmp_path / "a.timeline.json.gz"
    timeline.save(plain)
    timeline.save(packed)
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes() == timeline.to_json().encode()
    assert same(Timeline.load(plain), timeline) and same(Timeline.load(packed), timeline)
    first = packed.read_bytes()
    timeline.save(packed)
    assert packed.read_bytes() == first and sorted(path.name for path in tmp_path.iterdir()) == [
        plain.name,
        packed.name,
    ]


def broken(timeline, change):
    document = json.loads(timeline.to_json())
    change(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format="other"), "the top level must be an object"),
        (lambda d: d.update(version=2), "version 2 is unknown; this program reads version 1"),
        (lambda d: d.update(source="guessed"), "source is 'guessed'"),
        (lambda d: d.update(lanes=None), "lanes must be a list of texts"),
        (lambda d: d["spans"].pop("lane"), "spans must have the columns global_rank, lane, action, start_s, end_s"),
        (lambda d: d["spans"]["start_s"].pop(), "the columns of spans have different lengths"),
        (
            lambda d: d["memory"].update(num_bytes=["1", "2"]),
            ("memory.num_bytes must be a list of whole numbers .*, and holds '1'"),
        ),
        (lambda d: d["spans"]["lane"].__setitem__(3, 9), "span 3 names lane 9 of 3"),
        (lambda d: d["spans"]["end_s"].__setitem__(2, 1.0), "span 2 ends at 1.0 s, before it starts at 3.0 s"),
        (lambda d: d["spans"]["action"].__setitem__(0, "0X0"), "'0X0' is not an action"),
    ],
)
def test_what_is_wrong_with_a_recorded_timeline_is_said(timeline, change, message):
    with pytest.raises(TimelineError, match=message):
        Timeline.from_json(broken(timeline, change))


def test_all_problems_are_reported_together(timeline):
    with pytest.raises(TimelineError, match=r"source is None.*title must be text.*lanes must be"):
        Timeline.from_json(broken(timeline, lambda d: d.update(source=None, title=3, lanes=4)))


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"\x1f\x8bxx", b"[]"])
def test_a_file_that_is_no_timeline_is_named(tmp_path, content):
    path = tmp_path / "bad.timeline.json"
    path.write_bytes(content)
    with pytest.raises(TimelineError, match=r"bad\.timeline\.json"):
        Timeline.load(path)
