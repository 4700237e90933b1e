"""Traces of profilers as timelines: our own read back, torch's by their annotations, and files that are neither."""

import gzip
import json

import pytest

from shardproof import build, draw, lower, run_schedule
from shardproof.core.base.errors import TimelineError
from shardproof.core.schedule.timeline import Timeline
from shardproof.core.traces.load import load


def event(name, start, end, category="user_annotation", thread=7):
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": start, "dur": end - start}


def written(folder, rank, events, **more):
    document = {"traceEvents": events, "distributedInfo": {"rank": rank}, **more}
    path = folder / f"trace_{rank}.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return path


def test_a_trace_of_ours_is_the_timeline_it_was_made_of(tmp_path):
    timeline = run_schedule(lower(build("DualPipe", pp=4, num_microbatches=8)), send_s=0.25)
    measured = Timeline.from_spans([*timeline.spans][:3], "measured", title="another")
    again = load(draw(timeline, tmp_path / "step.json.gz", compare=measured))

    def times(of):
        return {(s.global_rank, s.lane, str(s.action)): (s.start_s, s.end_s) for s in of.spans}

    expected = {key: pytest.approx(value, abs=1e-9) for key, value in times(timeline).items()}
    assert len(again.spans) == len(timeline.spans) and times(again) == expected
    assert again.source == "predicted" and load(draw(measured, tmp_path / "run.json")).source == "measured"


def test_a_recorded_timeline_is_still_one(tmp_path):
    timeline = run_schedule(lower(build("1F1B", pp=2, num_microbatches=2)))
    timeline.save(tmp_path / "run.timeline.json")
    assert load(tmp_path / "run.timeline.json").to_json() == timeline.to_json()


def test_the_last_whole_step_of_torch_s_annotations_without_the_waits_inside_of_them(tmp_path):
    """Two steps of two stages, and a third that was cut off; a forward waits for its input before it computes."""

    def step(at):
        return [
            event("PP:1RECV_F0", at, at + 1),
            event("PP:1F0", at + 1, at + 20),
            event("c10d::recv_", at + 2, at + 11, "cpu_op"),
            event("aten::mm", at + 12, at + 15, "cpu_op"),
            event("aten::add", at + 16, at + 18, "cpu_op"),
            event("aten::mm", at + 3, at + 5, "cpu_op", thread=8),
            event("PP:1B0", at + 20, at + 30),
            event("PP:1SEND_B0", at + 30, at + 31),
        ]

    written(tmp_path, 1, [*step(0), *step(100), *step(200)[:2]], baseTimeNanoseconds=10**18 + 5000)
    written(
        tmp_path,
        0,
        [
            event("PP:0F0", 100, 106),
            event("PP:0SEND_F0", 106, 107),
            event("PP:0RECV_B0", 140, 141),
            event("PP:0B0", 141, 150),
        ],
        baseTimeNanoseconds=10**18,
    )
    timeline = load(tmp_path)
    spans = {
        (s.global_rank, str(s.action)): (s.lane, round(s.start_s * 1e6, 3), round(s.end_s * 1e6, 3))
        for s in timeline.spans
    }
    assert spans == {
        (0, "0F0"): ("compute", 0, 6),
        (0, "0SEND_F0"): ("F>1", 6, 7),
        (0, "0RECV_B0"): ("B<1", 40, 41),
        (0, "0B0"): ("compute", 41, 50),
        (1, "1RECV_F0"): ("F<0", 5, 6),
        (1, "1F0"): ("compute", 17, 23),  # 5 microseconds later by its clock's base; from its first product on
        (1, "1B0"): ("compute", 25, 35),
        (1, "1SEND_B0"): ("B>0", 35, 36),
    }
    assert timeline.source == "measured"


def test_annotations_of_a_device_count_before_those_of_the_host(tmp_path):
    events = [event("PP:0F0", 0, 5), event("PP:0F0", 8, 19, "gpu_user_annotation")]
    (span,) = load(written(tmp_path, 3, events)).spans
    assert (span.global_rank, span.end_s - span.start_s) == (3, pytest.approx(11e-6))


def test_traces_that_do_not_say_their_rank_have_that_of_their_name_s_place(tmp_path):
    for rank in range(12):
        document = {"traceEvents": [event(f"{rank}F0", rank, rank + 1)]}
        (tmp_path / f"rank{rank}_trace.json").write_text(json.dumps(document))
    assert {span.global_rank: str(span.action) for span in load(tmp_path).spans} == {r: f"{r}F0" for r in range(12)}


def test_an_event_that_ends_before_it_begins_has_no_length(tmp_path):
    spans = load(written(tmp_path, 0, [event("0F0", 3, 9), event("0B0", 12, 11)], baseTimeNanoseconds=10**400)).spans
    assert [(str(span.action), span.end_s - span.start_s) for span in spans] == [
        ("0F0", pytest.approx(6e-6)),
        ("0B0", 0),
    ]


def test_ranks_of_different_runs_are_refused_and_a_wait_for_each_other_is_not(tmp_path):
    written(tmp_path, 0, [event("0F0", 0, 6)], baseTimeNanoseconds=10**18)
    written(tmp_path, 1, [event("1F0", 9, 15)], baseTimeNanoseconds=10**18)
    written(tmp_path, 2, [], baseTimeNanoseconds=10**18)
    assert load(tmp_path).title == "2 ranks of a profiler's trace"
    written(tmp_path, 1, [event("1F0", 9, 15)], baseTimeNanoseconds=10**18 + 10**9)
    with pytest.raises(TimelineError, match="rank 1 begins its step 1 s after rank 0 has ended its own"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no .json or .json.gz in this folder"),
        ({"a.json": "[1]"}, "not a recorded timeline"),
        ({"a.json": "{"}, "this is not JSON"),
        ({"a.json": '{"traceEvents": []}'}, "no event names an action, such as PP:2F3"),
        ({"a.json": '{"traceEvents": [{"ph": "X", "name": 5}]}'}, "an event has no name, ts, dur"),
        (
            {"a.json": f'{{"traceEvents": [{{"ph": "X", "name": "F", "ts": 1{"0" * 400}}}]}}'},
            "an event has no name, ts",
        ),
        (
            {"a.json": '{"traceEvents": [{"ph": "X", "name": "F", "ts": 1, "tid": [7]}]}'},
            "pid or tid that could be read",
        ),
        (
            {"a.json": '{"traceEvents": [], "otherData": {"processes": []}}'},
            "otherData.processes names no rank",
        ),
        (
            {"a.json": '{"traceEvents": [], "otherData": {"processes": [{"pid": 0, "rank": "0"}]}}'},
            "no pid, rank or source that could be read",
        ),
        ({"a.json": '{"traceEvents": []}', "b.json": "{}"}, "b.json: this is no trace"),
        (dict.fromkeys(("a.json", "b.json"), '{"traceEvents": [], "distributedInfo": {"rank": 1}}'), "of rank 1 too"),
    ],
)
def test_what_is_no_trace_is_refused_with_what_to_do(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(TimelineError, match=message):
        load(tmp_path if len(files) != 1 else tmp_path / "a.json")
