"""The scene as data: what is shown where, in seconds and bytes."""

import pytest

from shardproof.core.base.errors import TimelineError
from shardproof.core.schedule.action import Kind
from shardproof.viz.scene.panels import Box, LegendEntry
from shardproof.viz.scene.scene import Resolution, build_scene

GIB = 2**30
PAPER = Resolution(1000)


def boxes(track):
    return [(box.action, box.start_s, box.end_s, box.label) for box in track.boxes]


def test_each_compute_span_is_one_box_labelled_by_its_microbatch(tiny):
    (panel,) = build_scene(tiny, PAPER).panels
    first, second = panel.rows
    assert (first.name, first.global_ranks, second.name) == ("rank 0", (0,), "rank 1")
    assert boxes(first.tracks[0]) == [("0F0", 0, 1, "0"), ("0F1", 1, 2, "1"), ("0B0", 4, 6, "0"), ("0B1", 7, 9, "1")]
    assert [box.kind for box in second.tracks[0].boxes] == [Kind.F, Kind.B, Kind.F, Kind.B]


def test_heading_has_makespan_and_bubble_one_third(tiny):
    (panel,) = build_scene(tiny, PAPER, time_unit="unit").panels
    assert panel.heading == "Predicted: 9 units, bubble 33.3% on every rank"
    assert (panel.makespan_s, panel.bubble_fraction, panel.bubble_rank) == (9.0, pytest.approx(1 / 3), 0)
    assert [row.idle_fraction for row in panel.rows] == pytest.approx([1 / 3, 1 / 3])


def test_worst_rank_is_named_where_ranks_differ(make_timeline):
    timeline = make_timeline([(4, "compute", "0F0", 0, 4), (7, "compute", "1F0", 3, 6), (7, "compute", "1B0", 6, 8)])
    assert build_scene(timeline, PAPER).panels[0].heading == "Predicted: 8 s, bubble 50.0% on rank 4"


def test_message_lanes_lie_under_compute_forward_first_and_receives_before_sends(full):
    rows = build_scene(full, PAPER).panels[0].rows
    assert [[track.name for track in row.tracks] for row in rows] == [
        ["compute", "F>1", "B<1"],
        ["compute", "F<0", "B>0", "dp"],
    ]
    assert [track.role for track in rows[1].tracks] == ["compute", "receive", "send", "collective"]


def test_spans_without_length_are_not_drawn(full):
    assert boxes(build_scene(full, PAPER).panels[0].rows[0].tracks[1]) == [("0SEND_F0", 1, 1.5, "")]


def test_legend_names_what_is_there_in_order(full):
    legend = build_scene(full, PAPER).legend
    assert [entry.kind for entry in legend] == [
        Kind.F,
        Kind.B,
        Kind.SEND_F,
        Kind.RECV_F,
        Kind.SEND_B,
        Kind.RECV_B,
        Kind.REDUCE_GRAD,
        None,
    ]
    assert legend[-1] == LegendEntry(None, "idle (bubble)")


def test_stages_of_one_rank_are_chunks_in_ascending_order(make_timeline):
    timeline = make_timeline([(0, "compute", "0F0", 0, 1), (0, "compute", "6F0", 1, 2), (0, "compute", "3F0", 2, 3)])
    scene = build_scene(timeline, PAPER)
    assert [box.chunk for box in scene.panels[0].rows[0].tracks[0].boxes] == [0, 2, 1]
    assert (scene.num_chunks, scene.legend[0]) == (3, LegendEntry(Kind.F, "forward, chunks 0-2", 3))


def test_overlapped_pair_is_a_forward_above_a_backward(make_timeline):
    timeline = make_timeline([(0, "compute", "(0F3;1B2)OVERLAP_F_B", 0, 2)])
    assert build_scene(timeline, PAPER).panels[0].rows[0].tracks[0].boxes == (
        Box(0.0, 2.0, Kind.F, 0, "3", "(0F3;1B2)OVERLAP_F_B", 0.5, 1.0),
        Box(0.0, 2.0, Kind.B, 1, "2", "(0F3;1B2)OVERLAP_F_B", 0.0, 0.5),
    )


def test_memory_curves_hold_the_last_value_to_the_end(full):
    memory = build_scene(full, PAPER).panels[0].memory
    assert [(c.global_rank, c.times_s, c.num_bytes) for c in memory.curves] == [
        (0, (0.0, 2.0, 6.0, 9.0), (GIB, 3 * GIB, 2 * GIB)),
        (1, (0.0, 9.0), (2 * GIB,)),
    ]
    assert (memory.peak_rank, memory.peak_bytes, memory.axis.end) == (0, 3 * GIB, 3 * GIB)
    assert build_scene(full, PAPER, memory=False).panels[0].memory is None


def test_actions_thinner_than_three_columns_become_shares_of_one_third_and_two_thirds(long):
    (panel,) = build_scene(long, Resolution(1000)).panels  # a median action has half a column
    assert panel.as_shares and panel.notes == ("share of each kind per 18 s, idle time on top",)  # 12 actions of 1.5 s
    for row in panel.rows:
        shares = {box.kind: (box.low, box.high) for box in row.tracks[0].boxes}
        assert shares == {Kind.F: (0.0, 5 / 16), Kind.B: (5 / 16, 1.0)}  # sixteenths
    assert not build_scene(long, Resolution(9000)).panels[0].as_shares


def test_shares_keep_the_busy_time_of_a_rank(make_timeline):
    rows = [(0, "compute", f"0F{i}", 2 * i, 2 * i + 1) for i in range(400)]
    (panel,) = build_scene(make_timeline(rows), Resolution(100)).panels
    area_s = sum((box.end_s - box.start_s) * (box.high - box.low) for box in panel.rows[0].tracks[0].boxes)
    assert area_s == pytest.approx(400, rel=0.01)


def test_more_ranks_than_rows_share_rows(make_timeline):
    timeline = make_timeline([(rank, "compute", f"{rank}F0", rank, rank + 1) for rank in range(10)])
    (panel,) = build_scene(timeline, Resolution(1000, max_rows=4)).panels
    assert [row.name for row in panel.rows] == ["ranks 0-2", "ranks 3-5", "ranks 6-8", "rank 9"]
    assert panel.as_shares


def test_many_rows_leave_out_receives_and_then_sends(full):
    few, many = (
        Resolution(1000, max_rows_with_receives=1),
        Resolution(1000, max_rows_with_receives=1, max_rows_with_sends=1),
    )
    first, second = build_scene(full, few).panels[0], build_scene(full, many).panels[0]
    assert [track.name for track in first.rows[1].tracks] == ["compute", "B>0", "dp"]
    assert [track.name for track in second.rows[1].tracks] == ["compute", "dp"]
    assert (first.notes, second.notes) == (("receives not drawn",), ("messages not drawn",))


def slower(timeline, factor, make_timeline, ranks=(0, 1)):
    rows = [
        (s.global_rank, s.lane, str(s.action), s.start_s * factor, s.end_s * factor)
        for s in timeline.spans
        if s.global_rank in ranks
    ]
    return make_timeline(rows, source="measured")


def test_compared_timelines_share_the_longer_time_axis(tiny, make_timeline):
    scene = build_scene(tiny, PAPER, compare=slower(tiny, 1.5, make_timeline), by="timeline")
    assert [panel.axis.end for panel in scene.panels] == [13.5, 13.5]
    assert [panel.makespan_s for panel in scene.panels] == [9.0, 13.5]
    assert scene.panels[1].heading == "Measured: 13.5 s, bubble 33.3% on every rank, 1.5 x predicted"


@pytest.mark.parametrize(
    ("factor", "scale", "ends"),
    [(4, "auto", [9, 36]), (4, "time", [36, 36]), (2, "own", [9, 18]), (3, "auto", [27, 27])],
)
def test_own_scales_from_a_factor_of_three_on(tiny, make_timeline, factor, scale, ends):
    scene = build_scene(tiny, PAPER, compare=slower(tiny, factor, make_timeline), scale=scale, by="timeline")
    assert [panel.axis.end for panel in scene.panels] == ends
    assert ("own time scale" in scene.panels[0].notes) == (ends[0] != ends[1])


def test_ranks_that_only_one_timeline_has_are_left_out_and_counted(tiny, make_timeline):
    scene = build_scene(slower(tiny, 1, make_timeline, ranks=(1,)), PAPER, compare=tiny, by="timeline")
    assert [[row.name for row in panel.rows] for panel in scene.panels] == [["rank 1"], ["rank 1"]]
    assert [panel.notes for panel in scene.panels] == [
        (),
        ("1 of 2 ranks shown", "the same 4 actions in the same order on all 1 lanes"),
    ]


def test_an_empty_timeline_is_refused(make_timeline):
    with pytest.raises(TimelineError, match="without any span of positive length"):
        build_scene(make_timeline([]), PAPER)


def test_title_falls_back_to_what_the_timeline_holds(make_timeline):
    timeline = make_timeline([(0, "compute", "0F0", 0, 1), (2, "compute", "1F4", 0, 1)], title="")
    assert build_scene(timeline, PAPER).title == "2 ranks, 5 microbatches"
