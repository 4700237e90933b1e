"""What spans waited for and why ranks idled, against the engine that made the timeline and knows its own waits."""

from collections import defaultdict

import numpy as np
import pytest

from helpers.plans import plan
from shardproof import build, lower, run_schedule, simulate
from shardproof.core.schedule.action import Action
from shardproof.core.schedule.timeline import Span, Timeline
from shardproof.core.schedule.waits import gaps_of, waits_of
from shardproof.simulator.engine.bubbles import idle_of

SCHEDULES = [
    ("GPipe", 3, 1),
    ("1F1B", 4, 1),
    ("Interleaved1F1B", 3, 2),
    ("ZBH1", 3, 1),
    ("ZBVZeroBubble", 3, 2),
    ("DualPipe", 4, 1),
    ("DualPipeV", 3, 2),
]


@pytest.mark.parametrize(("name", "pp", "vpp"), SCHEDULES)
def test_waits_are_those_of_the_engine_and_no_span_starts_before_them(name, pp, vpp):
    timeline = run_schedule(lower(build(name, pp=pp, vpp=vpp, num_microbatches=12)), send_s=0.125)
    spans, known = timeline.spans, waits_of(timeline)
    sources = [known.of(i) for i in range(len(spans))]
    for i, waited in enumerate(sources):
        if not str(spans.actions[i]).startswith("(") and "RECV" not in str(spans.actions[i]):
            assert all(spans.end_s[wait] <= spans.start_s[i] + 1e-12 for wait in waited), spans[i]
    # the engine starts an action as soon as it may, so whatever begins late has a wait that ends then
    late = [i for i in range(len(spans)) if spans.start_s[i] > 0 and spans.lanes[spans.lane[i]] == "compute"]
    explained = [i for i in late if any(abs(spans.end_s[wait] - spans.start_s[i]) < 1e-9 for wait in sources[i])]
    steps = [i for i in late if "STEP" in str(spans.actions[i])]
    assert set(late) - set(explained) <= set(steps) and len(explained) > len(spans) // 8


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "ZBH1"])
def test_idle_time_has_the_causes_that_simulate_prints(schedule):
    step = simulate(plan(pp=3, dp=2, schedule=schedule, microbatches=6))
    seconds = defaultdict(float)
    for gap in gaps_of(step.timeline, waits_of(step.timeline)):
        assert gap.end_s > gap.start_s
        seconds[gap.global_rank, gap.cause] += gap.end_s - gap.start_s
    for pp_rank, rank in enumerate(step.global_ranks):
        expected = defaultdict(float)
        for idle in idle_of(step.run, pp_rank):
            expected[idle.cause] += idle.seconds
        assert {cause for other, cause in seconds if other == rank} == set(expected)
        for cause, idle_s in expected.items():
            assert seconds[rank, cause] == pytest.approx(idle_s, rel=1e-9)


def test_replicas_wait_among_themselves():
    """Two replicas of two stages with microbatches of the same numbers: rank 2 is one millisecond late."""
    rows = []
    for first, delay in ((0, 0.0), (1, 0.001)):
        rows += [
            Span(first, "compute", Action.from_str("0F0"), delay, 1 + delay),
            Span(first, "F>1", Action.from_str("0SEND_F0"), 1 + delay, 1.5 + delay),
            Span(first + 2, "F<0", Action.from_str("1RECV_F0"), 1 + delay, 1.5 + delay),
            Span(first + 2, "compute", Action.from_str("1F0"), 1.5 + delay, 2.5 + delay),
        ]
    timeline = Timeline.from_spans(rows, "measured")
    spans, known = timeline.spans, waits_of(timeline)
    for i, span in enumerate(spans):
        waited = {(spans[wait].global_rank, str(spans[wait].action)) for wait in known.of(i)}
        replica = span.global_rank % 2
        expected = {
            "0F0": set(),
            "0SEND_F0": {(replica, "0F0")},
            "1RECV_F0": {(replica, "0SEND_F0")},
            "1F0": {(replica + 2, "1RECV_F0")},
        }
        assert waited == expected[str(span.action)]


def test_what_was_not_recorded_is_a_wait_less():
    alone = Timeline.from_spans([Span(5, "compute", Action.from_str("3B7"), 0.5, 1.0)], "measured")
    assert waits_of(alone).sources.tolist() == []
    assert [(gap.cause, gap.start_s, gap.end_s, gap.span) for gap in gaps_of(alone, waits_of(alone))] == [
        ("warm-up", 0.0, 0.5, -1)
    ]
    empty = Timeline.from_spans([], "measured")
    assert len(waits_of(empty).offsets) == 1 and list(gaps_of(empty, waits_of(empty))) == []
    assert np.array_equal(waits_of(empty).sources, [])
