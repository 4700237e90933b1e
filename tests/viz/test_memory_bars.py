"""Memory by component and rank: bars as long as what is held, and the verb's numbers those of the simulator."""

from __future__ import annotations

import json

import pytest

from helpers.plans import product_plan
from shardproof import Layout, simulate
from shardproof.core.commands.cli import main
from shardproof.viz.memory_bars import MemoryBars, RankBar, bars_of, bars_text, lay_out_bars
from shardproof.viz.picture import Line, Rect, Text
from shardproof.viz.scene import palette

GIB = 2**30


@pytest.fixture
def bars():
    """Two ranks of a device of 10 GiB: one holds 1 GiB of weights and 7 of activations, one 2 and 3."""
    parts = ({"weights": 1, "buffers": 0, "activations": 7}, {"weights": 2, "buffers": 0, "activations": 3})
    held = [{name: gib * GIB for name, gib in each.items()} for each in parts]
    return MemoryBars("t", 10 * GIB, (RankBar(0, held[0], "0B1"), RankBar(4, held[1], "")))


def test_bars_are_as_long_as_what_is_held_and_the_limit_lies_where_it_is(bars):
    marks = lay_out_bars(bars, 1200.0).marks
    held = {mark.title: mark for mark in marks if isinstance(mark, Rect) and mark.title}
    assert set(held) == {
        "rank 0: weights 1 GiB",
        "rank 0: activations 7 GiB",
        "rank 4: weights 2 GiB",
        "rank 4: activations 3 GiB",
    }
    one, seven = held["rank 0: weights 1 GiB"], held["rank 0: activations 7 GiB"]
    assert seven.width == pytest.approx(7 * one.width) and seven.x == pytest.approx(one.x + one.width)
    (limit,) = [mark for mark in marks if isinstance(mark, Line) and mark.dashed]
    assert limit.points[0][0] - one.x == pytest.approx(10 * one.width)
    texts = [mark.text for mark in marks if isinstance(mark, Text)]
    assert {"8 GiB during 0B1", "5 GiB", "usable: 10 GiB", "weights", "activations"} <= set(texts)
    assert "buffers" not in texts and one.fill == palette.COMPONENTS["weights"]


def test_a_limit_far_away_is_a_number_and_no_line(bars):
    far = MemoryBars("t", 1000 * GIB, bars.bars)
    marks = lay_out_bars(far, 1200.0).marks
    assert not [mark for mark in marks if isinstance(mark, Line) and mark.dashed]
    assert "usable: 1000 GiB, beyond this axis" in [mark.text for mark in marks if isinstance(mark, Text)]
    longest = max(mark.x + mark.width for mark in marks if isinstance(mark, Rect) and mark.title)
    assert longest > 900


def test_bars_are_those_of_the_simulation():
    step = simulate(product_plan(Layout(pp=2, dp=2), model="gpt2", cluster="dgx-h100"))
    found = bars_of(step)
    assert [bar.global_rank for bar in found.bars] == list(step.global_ranks) == [0, 2]
    assert [bar.peak_bytes for bar in found.bars] == [each.peak_bytes for each in step.memory]
    assert found.report()["per_rank"][0]["components"] == step.memory[0].components()
    assert bars_text(found).count("GiB") + bars_text(found).count("MiB") > 8


def test_the_verb_draws_memory(tmp_path, capsys):
    options = ["--model", "gpt2", "--cluster", "dgx-h100", "--devices", "2", "--pp", "2", "--global-batch", "4"]
    assert main(["draw", *options, "--what", "memory", "-o", str(tmp_path / "m.svg"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [each["global_rank"] for each in report["per_rank"]] == [0, 1] and report["capacity_bytes"] > 60 * GIB
    assert "Memory of each rank at its peak" in (tmp_path / "m.svg").read_text()
    assert main(["draw", *options, "--what", "memory", "--axis", "pp"]) == 2
    assert "--axis has no effect on --what memory" in capsys.readouterr().err
