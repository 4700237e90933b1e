"""What a notebook shows of schedules and timelines: it asks for `_repr_svg_`, and takes None for nothing."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

from shardproof import build, draw, lower, run_schedule
from shardproof.core.schedule import schedule as module
from shardproof.core.schedule.schedule import read_csv
from shardproof.core.schedule.timeline import Timeline


def texts(svg):
    return [node.text for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_a_timeline_shows_what_draw_writes(full, tmp_path):
    draw(full, tmp_path / "full.svg")
    assert full._repr_svg_() == (tmp_path / "full.svg").read_text()
    assert Timeline.from_spans([], "predicted")._repr_svg_() is None


def test_a_schedule_shows_itself_with_unit_costs():
    schedule = build("1F1B", pp=2, num_microbatches=2)
    assert any("9 units" in text for text in texts(schedule._repr_svg_()))
    lowered = lower(schedule)
    svg = lowered._repr_svg_()
    assert {"rank 0", "rank 1"} <= set(texts(svg)) and "1B1 on rank 1" in svg
    assert f"{run_schedule(lowered).makespan_s:g} units" in "".join(texts(svg))


def test_a_schedule_that_cannot_run_or_is_large_shows_nothing(monkeypatch, tmp_path):
    schedule = build("1F1B", pp=2, num_microbatches=2)
    (tmp_path / "crossed.csv").write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    assert read_csv(tmp_path / "crossed.csv")._repr_svg_() is None
    nothing = replace(schedule, actions=schedule.actions.take([]), offsets=0 * schedule.offsets)
    assert nothing._repr_svg_() is None
    monkeypatch.setattr(module, "MOST_SHOWN", 7)
    assert schedule._repr_svg_() is None
