"""The Chrome trace against a schema written from the trace event format document (Google, "Trace Event Format")."""

import json

from shardproof import build, lower, run_schedule
from shardproof.viz.trace import to_trace

NUMBER = (int, float)
SCHEMA = {
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": NUMBER, "dur": NUMBER},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "s": {"id": int, "name": str, "cat": str, "pid": int, "tid": int, "ts": NUMBER},
    "f": {"bp": str, "id": int, "name": str, "cat": str, "pid": int, "tid": int, "ts": NUMBER},
    "C": {"name": str, "pid": int, "tid": int, "ts": NUMBER, "args": dict},
}


def check(text):
    document = json.loads(text)
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"} and document["displayTimeUnit"] in (
        "ms",
        "ns",
    )
    for event in document["traceEvents"]:
        fields = SCHEMA[event["ph"]]
        assert set(event) == {"ph", *fields}
        assert all(isinstance(event[name], kind) for name, kind in fields.items())
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, NUMBER) for value in event["args"].values())
    named = {(e["pid"], e["tid"]) for e in document["traceEvents"] if e["name"] == "thread_name"}
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert {(e["pid"], e["tid"]) for e in slices} <= named
    check_nesting(slices)
    for phase in "sf":
        ids = [event["id"] for event in document["traceEvents"] if event["ph"] == phase]
        assert ids == sorted(set(ids)) == list(range(len(ids)))
    return document["traceEvents"]


def check_nesting(slices):
    """Viewers count nanoseconds: of two slices of a thread the second begins after the first, or ends in it."""
    ends = {}
    for event in sorted(slices, key=lambda each: (each["ts"], -each["dur"])):
        open_until = ends.setdefault((event["pid"], event["tid"]), [])
        begin, end = round(event["ts"] * 1000), round(event["ts"] * 1000) + round(event["dur"] * 1000)
        while open_until and open_until[-1] <= begin:
            open_until.pop()
        assert not open_until or end <= open_until[-1], event
        open_until.append(end)


def test_slices_that_follow_each_other_do_not_overlap_by_a_nanosecond():
    """Times that no number of nanoseconds is."""
    timeline = run_schedule(lower(build("1F1B", pp=4, num_microbatches=16)), 2e-3 / 3, 4e-3 / 3, 1e-4, 1e-5 / 9)
    check(to_trace([timeline]))


def test_every_span_is_a_complete_event_in_microseconds(full):
    events = [event for event in check(to_trace([full])) if event["ph"] == "X"]
    assert len(events) == len(full.spans) == 14
    assert {
        "ph": "X",
        "name": "0B0",
        "cat": "B",
        "pid": 0,
        "tid": 0,
        "ts": 4e6,
        "dur": 2e6,
    } in events


def test_an_arrow_joins_every_send_and_its_receive_inside_their_spans(full):
    timeline = run_schedule(lower(build("ZBVZeroBubble", pp=3, vpp=2, num_microbatches=6)), send_s=0.5)
    events = check(to_trace([timeline, full]))
    spans = {}
    for event in events:
        if event["ph"] == "X":
            spans.setdefault((event["pid"], event["tid"]), []).append(event)
    ends = {}
    for event in events:
        if event["ph"] in "sf":
            at = [x["name"] for x in spans[event["pid"], event["tid"]] if x["ts"] <= event["ts"] <= x["ts"] + x["dur"]]
            ends.setdefault(event["id"], {})[event["ph"]] = event["ts"], at
    sends = [event["name"] for event in events if event["ph"] == "X" and "SEND" in event["name"]]
    recorded = [*timeline.spans, *full.spans]
    assert len(ends) == sum("RECV" in str(span.action) for span in recorded) and len(sends) >= len(ends) > 20
    for both in ends.values():
        (begins, sent), (arrives, received) = both["s"], both["f"]
        assert begins <= arrives
        assert any(
            step == int(theirs[0]) - int(mine[0]) and mine[1:] == theirs[1:].replace("RECV", "SEND")
            for mine in sent
            for theirs in received
            for step in (1, -1)
        )


def test_a_span_and_an_end_of_an_arrow_take_less_than_95_bytes():
    timeline = run_schedule(lower(build("1F1B", pp=8, num_microbatches=64)), 0.00123, 0.00217, 0.0011, 0.00003)
    text = to_trace([timeline])
    arrows = text.count('"ph":"s"') + text.count('"ph":"f"')
    assert len(text) / (len(timeline.spans) + arrows) < 95


def test_memory_is_a_counter_per_rank(full):
    counters = [(e["pid"], e["ts"], e["args"]["bytes"]) for e in check(to_trace([full])) if e["ph"] == "C"]
    assert counters == [(0, 0, 2**30), (0, 2e6, 3 * 2**30), (0, 6e6, 2 * 2**30), (1, 0, 2 * 2**30)]


def test_two_timelines_have_processes_of_their_own(tiny, full):
    events = check(to_trace([tiny, full]))
    names = [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"]
    assert names == [(0, "predicted rank 0"), (1, "predicted rank 1"), (2, "predicted rank 0"), (3, "predicted rank 1")]


def test_lanes_are_threads_with_compute_first(full):
    names = [
        (e["tid"], e["args"]["name"]) for e in check(to_trace([full])) if e["name"] == "thread_name" and e["pid"] == 1
    ]
    assert names == [(0, "compute"), (1, "B<1"), (2, "B>0"), (3, "F<0"), (4, "F>1"), (5, "dp")]
