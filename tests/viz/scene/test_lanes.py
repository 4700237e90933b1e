"""A prediction and a measurement lane by lane: which lanes stand above each other, and what is said about them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardproof.core.schedule.action import Action
from shardproof.core.schedule.timeline import MemorySample, Span, Timeline
from shardproof.viz.draw import draw
from shardproof.viz.picture import LEFT, Rect, Text, lay_out, plot_width
from shardproof.viz.scene.lanes import compare_lanes
from shardproof.viz.scene.scene import Resolution, build_scene

PAPER = Resolution(900)


@pytest.fixture
def measured(full):
    """The same actions, each lasting a quarter longer."""
    spans = [replace(span, start_s=1.25 * span.start_s, end_s=1.25 * span.end_s) for span in full.spans]
    return Timeline.from_spans(spans, "measured", [MemorySample(0, 0.0, 2**30)], "real")


def test_every_lane_of_a_prediction_has_the_measured_one_below_it(full, measured):
    lanes, *memories = build_scene(full, PAPER, compare=measured).panels
    assert [(track.name, track.source) for track in lanes.rows[1].tracks] == [
        ("compute", "predicted"),
        ("compute", "measured"),
        ("F<0", "predicted"),
        ("F<0", "measured"),
        ("B>0", "predicted"),
        ("B>0", "measured"),
        ("dp", "predicted"),
        ("dp", "measured"),
    ]
    assert [track.end_s for track in lanes.rows[0].tracks[:2]] == [9.0, 11.25] and lanes.makespan_s == 11.25
    assert lanes.heading == (
        "Predicted: 9 s, bubble 33.3% on every rank; measured: 11.25 s, bubble 33.3% on every rank, 1.25 x predicted"
    )
    assert lanes.notes == ("the same 14 actions in the same order on all 7 lanes",)
    assert [panel.heading for panel in memories] == ["Memory, predicted", "Memory, measured"]
    assert not any(panel.rows for panel in memories)


def test_other_pairs_stay_one_above_the_other(full, measured):
    late = [span if str(span.action) != "0B1" else replace(span, start_s=2.5, end_s=3.0) for span in measured.spans]
    otherwise = Timeline.from_spans(late, "measured")
    for other, scale in ((replace(measured, source="predicted"), "auto"), (otherwise, "auto"), (measured, "own")):
        panels = build_scene(full, PAPER, compare=other, scale=scale).panels
        assert [len(panel.rows) for panel in panels] == [2, 2]
    reported = build_scene(full, PAPER, compare=otherwise).panels[1].notes
    assert reported == ("other actions or another order on rank 0, lane compute",)


def test_lanes_are_compared_one_by_one(full, measured):
    fewer = Timeline.from_spans([span for span in measured.spans if str(span.action) != "1REDUCE_GRAD"], "measured")
    found = {(lane.global_rank, lane.lane): lane for lane in compare_lanes(full, fewer)}
    assert (
        found[1, "dp"].num_actions == (1, 0) and not found[1, "dp"].same_order and found[1, "dp"].busy_s == (1.0, 0.0)
    )
    assert found[0, "compute"].same_order and found[0, "compute"].busy_s == (6.0, 7.5)
    assert len(found) == 7
    waits = Span(0, "B:ep", Action.from_str("0B0"), 5.0, 5.5)  # a part of what the compute lane shows
    assert compare_lanes(full, Timeline.from_spans([*measured.spans, waits], "measured")) == compare_lanes(
        full, measured
    )


def test_collectives_inside_a_pair_have_a_lane_and_do_not_count_as_actions(full, measured):
    # thinner than a pixel
    parts = [Span(0, "B:ep", Action.from_str("0B0"), 5.0 + i / 100, 5.005 + i / 100) for i in range(50)]
    shown = Timeline.from_spans([*measured.spans, *parts], "measured")
    (lanes,) = build_scene(full, PAPER, compare=shown, memory=False).panels
    assert not lanes.as_shares and lanes.notes == ("the same 14 actions in the same order on all 7 lanes",)
    last = lanes.rows[0].tracks[-1]
    assert (last.name, last.role, last.source, len(last.boxes)) == ("B:ep", "collective", "measured", 50)


def test_text_has_a_line_for_each(full, measured):
    lines = draw(full, width=70, memory=False, compare=measured).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("rank 0"))
    assert [line[-9:].strip() for line in lines[first : first + 2]] == ["predicted", "measured"]
    assert lines[first].index("B1") < lines[first + 1].index("B1")
    assert max(map(len, lines[first : first + 6])) <= 70
    wires = lines[first + 2], lines[first + 3]
    assert wires[0].index(">") < wires[1].index(">")


def test_picture_shades_each_compute_lane_up_to_its_own_end(full, measured):
    picture = lay_out(build_scene(full, PAPER, compare=measured), 1100)
    shades = [
        mark.width
        for mark in picture.marks
        if isinstance(mark, Rect) and mark.x == LEFT and mark.crisp and mark.height == 26.0
    ]
    whole = plot_width(1100)
    assert shades == pytest.approx([whole * 9 / 11.25, whole] * 2)
    texts = [mark.text for mark in picture.marks if isinstance(mark, Text)]
    assert texts.count("predicted") == texts.count("measured") == 2 and texts.count("rank 0") == 1
    assert any(
        mark.title.startswith("0F0 on rank 0, compute, measured: 0 s to 1.25 s")
        for mark in picture.marks
        if isinstance(mark, Rect)
    )
