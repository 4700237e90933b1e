"""Maps of ranks and their traffic, by the marks on paper and as a user asks for them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from helpers.paths import EXAMPLES
from shardproof import Layout
from shardproof.core.commands.cli import main
from shardproof.core.layout.rank_map import rank_map
from shardproof.core.layout.rank_traffic import AxisTraffic, RankTraffic
from shardproof.viz.layout_picture import FIRST_GROUP, lay_out_map
from shardproof.viz.layout_text import map_text
from shardproof.viz.picture import Line, Rect, Text, text_width
from shardproof.viz.scene import palette
from shardproof.viz.traffic_picture import color_of, lay_out_traffic
from shardproof.viz.traffic_text import traffic_text

PLAN = ["--model", "gpt2", "--cluster", "dgx-h100", "--devices", "16", "--pp", "2", "--tp", "4", "--global-batch", "8"]
SIZES = {
    "one node": (Layout(tp=2, pp=2, dp=2), 8, 0),
    "racks": (Layout(tp=4, pp=8, dp=16), 8, 32),
    "many": (Layout(tp=8, pp=8, cp=2, dp=8), 8, 4),
    "wide nodes": (Layout(tp=8, dp=18), 72, 0),
    "uneven": (Layout(tp=3, dp=7), 8, 2),
}


@pytest.fixture(params=SIZES)
def found(request):
    layout, per_node, per_rack = SIZES[request.param]
    return rank_map([layout], devices_per_node=per_node, nodes_per_leaf=per_rack, title=request.param)


def inside(picture):
    """All marks are on the paper, and no text is wider than what is left of it."""
    for mark in picture.marks:
        if isinstance(mark, Rect):
            assert mark.x >= 0 and mark.y >= 0
            assert mark.x + mark.width <= picture.width and mark.y + mark.height <= picture.height
        elif isinstance(mark, Text):
            left = {"start": 0.0, "middle": 0.5, "end": 1.0}[mark.anchor] * text_width(mark.text, mark.size)
            assert mark.x - left >= -1 and mark.x - left + text_width(mark.text, mark.size) <= picture.width
            assert 0 < mark.y <= picture.height
        else:
            assert all(0 <= x <= picture.width and 0 <= y <= picture.height for x, y in mark.points)


def test_a_map_has_each_device_once_for_every_axis_and_nothing_over_another(found):
    picture = lay_out_map(found, 1200.0)
    inside(picture)
    devices = [mark for mark in picture.marks if isinstance(mark, Rect) and mark.width == mark.height]
    assert len(devices) == found.num_ranks * len(found.axes)
    boxes = np.array([(mark.x, mark.y, mark.x + mark.width, mark.y + mark.height) for mark in devices])
    order = np.lexsort((boxes[:, 0], boxes[:, 1].round(3)))
    rows = boxes[order]
    same = np.isclose(rows[1:, 1], rows[:-1, 1])
    assert (rows[1:, 0][same] >= rows[:-1, 2][same] - 1e-6).all()


def test_the_group_of_the_first_rank_has_rings_or_a_colour_of_its_own(found):
    marks = lay_out_map(found, 1200.0).marks
    rings = [mark for mark in marks if isinstance(mark, Line) and mark.stroke == palette.INK]
    colored = [mark for mark in marks if isinstance(mark, Rect) and mark.fill == FIRST_GROUP]
    assert len(rings) + len(colored) == sum(len(axis.first) for axis in found.axes)


def test_a_map_in_characters_has_places_of_each_node_in_their_order():
    layout = Layout(tp=2, pp=2, dp=4)
    text = map_text(rank_map([layout], devices_per_node=4, nodes_per_leaf=2, title="t"))
    rows = [line.split() for line in text.splitlines() if line.startswith(("  0", "  1", "  2", "  3"))]
    assert rows == [
        ["0", "0", "0-3", "0-1", "0-1", "0-1", "0"],
        ["1", "0", "4-7", "0-1", "0-1", "2-3", "0"],
        ["2", "1", "8-11", "0-1", "0-1", "0-1", "1"],
        ["3", "1", "12-15", "0-1", "0-1", "2-3", "1"],
    ]


@pytest.fixture
def traffic():
    """Four ranks on two nodes: rank 0 sends 1000 bytes to rank 1 over tp and 10 to rank 2 over pp."""
    tp, pp = np.zeros((4, 4)), np.zeros((4, 4))
    tp[0, 1], pp[0, 2] = 1000.0, 10.0
    axes = (AxisTraffic("tp", 1000.0, 0.0, 0.0, 1000.0), AxisTraffic("pp", 10.0, 10.0, 0.0, 10.0))
    return RankTraffic("t", 4, 2, 2, 1, {"tp": tp, "pp": pp}, axes)


def test_traffic_is_a_square_of_senders_by_receivers_darker_for_more(traffic):
    picture = lay_out_traffic(traffic, 1200.0)
    inside(picture)
    cells = {mark.title: mark for mark in picture.marks if isinstance(mark, Rect) and mark.title}
    assert set(cells) == {"rank 0 to rank 1: tp 1000 B", "rank 0 to rank 2: pp 10 B"}
    many, few = cells["rank 0 to rank 1: tp 1000 B"], cells["rank 0 to rank 2: pp 10 B"]
    assert many.y == few.y and few.x - many.x == 40.0
    assert (many.fill, few.fill) == (palette.ramp(0.0), palette.ramp(0.5)) == (color_of(5.0, 5.0), color_of(1.0, 100.0))
    assert {"tp", "pp", "0%", "100%"} <= {mark.text for mark in picture.marks if isinstance(mark, Text)}


def test_lines_of_nodes_are_said_where_there_are_several(traffic):
    for devices, is_said in ((2, True), (4, False)):
        marks = lay_out_traffic(replace(traffic, devices_per_node=devices)).marks
        assert any("lines are nodes" in mark.text for mark in marks if isinstance(mark, Text)) == is_said


def test_traffic_in_characters(traffic):
    lines = traffic_text(traffic, 60).splitlines()
    wide = replace(traffic, num_ranks=99, matrices={"tp": np.ones((99, 99))})
    assert [line for line in lines if line.endswith("|")] == [" 0 | @+ |", " 1 |    |", " 2 |    |", " 3 |    |"]
    assert "-o traffic.svg has it" in traffic_text(wide, 60)


@pytest.mark.parametrize("what", ["layout", "traffic"])
def test_the_verb_draws_a_plan_in_every_form(tmp_path, capsys, what):
    for suffix in (".txt", ".svg", ".png"):
        file = tmp_path / f"drawn{suffix}"
        assert main(["draw", *PLAN, "--what", what, "-o", str(file)]) == 0
        assert capsys.readouterr() == ("", f"written: {file}\n") and file.stat().st_size > 200
    assert main(["draw", *PLAN, "--what", what, "--width", "100"]) == 0
    assert capsys.readouterr().out == (tmp_path / "drawn.txt").read_text()
    assert main(["draw", *PLAN, "--what", what, "--axis", "pp", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["axes"]) == ["pp"] and report["num_ranks"] == 16


def test_traffic_of_modules_has_their_bridge(capsys):
    assert (
        main(["draw", str(EXAMPLES / "encoder_decoder.toml"), "--what", "traffic", "--axis", "bridge", "--json"]) == 0
    )
    report = json.loads(capsys.readouterr().out)
    sent = {(cell["from"] < 4, cell["to"] < 4) for cell in report["bytes_between_units"]}
    assert list(report["axes"]) == ["bridge"] and sent == {(True, False), (False, True)}


def test_a_map_of_3840_pixels_is_that_of_1600_with_larger_type(tmp_path):
    heads = []
    for width in (1600, 3840):
        assert main(["draw", *PLAN, "--what", "layout", "--width", str(width), "-o", str(tmp_path / "x.svg")]) == 0
        heads.append((tmp_path / "x.svg").read_text().partition("<svg")[2])
    small, large = heads
    assert 'width="1600"' in small and 'width="3840"' in large
    assert small.partition("viewBox")[2] == large.partition("viewBox")[2]


@pytest.mark.parametrize(
    "options, said",
    [
        (["--what", "layout", "--axis", "cp"], "no rank has a neighbour over cp here"),
        (["--what", "traffic", "--axis", "cp"], "nothing is sent over cp"),
        (["--axis", "pp"], "--axis pp has no effect on a step"),
        (["--what", "layout", "--no-memory", "--scale", "own"], "--scale, --no-memory has no effect on --what layout"),
        (["--what", "traffic", "-o", "x.html"], "unknown picture suffix"),
    ],
)
def test_what_has_no_meaning_is_refused(capsys, options, said):
    assert main(["draw", *PLAN, *options]) == 2
    assert said in capsys.readouterr().err


def test_only_a_plan_has_a_map(capsys, tmp_path):
    (tmp_path / "two.csv").write_text("0F0,0B0\n")
    assert main(["draw", str(tmp_path / "two.csv"), "--what", "layout"]) == 2
    assert "is about a plan" in capsys.readouterr().err
