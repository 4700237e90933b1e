"""Layouts by time and memory on paper, and predicted against published steps, by the marks of both."""

from __future__ import annotations

import json

import pytest

from shardproof.core.base.errors import PlanError, UnknownNameError
from shardproof.core.commands.cli import main
from shardproof.viz.front import draw_front, lay_out_front, layout_text
from shardproof.viz.picture import Line, Rect, Text, text_width
from shardproof.viz.scene import palette
from shardproof.viz.validation import Step, lay_out_validation

LAYOUT = {"tp": 1, "pp": 1, "vpp": 1, "dp": 8, "cp": 1, "ep": 1, "etp": 1, "sequence_parallel": False, "zero": 0}


def candidate(step_s, gib, **layout):
    return {
        "layout": {**LAYOUT, **layout},
        "batch": {"micro": 1},
        "recompute": "none",
        "schedule": "1F1B",
        "step_time_s": step_s,
        "peak_memory_bytes": gib * 2**30,
    }


FRONT = [candidate(1.0, 60), candidate(1.1, 70), candidate(2.0, 40), candidate(2.0, 40.2), candidate(3, 20)]
MECHANISMS = [3, 1, 2, 2, 0]
REPORT = {"candidates": FRONT, "picture": {"title": "t", "mechanisms": MECHANISMS}}
SEARCH = ["--model", "gpt2", "--cluster", "dgx-h100", "--devices", "2", "--global-batch", "8", "--pareto"]
SEARCH += [text for key in ("tp=1", "pp=1", "cp=1", "zero=0", "recompute=none") for text in ("--fix", key)]


def test_each_layout_is_a_disc_by_time_and_memory_darker_for_the_plainer():
    picture = lay_out_front(FRONT, MECHANISMS, "t")
    discs = [mark for mark in picture.marks if isinstance(mark, Line) and mark.fill not in ("", palette.PAPER)]
    legend, layouts = discs[:4], discs[4:]
    assert [mark.fill for mark in legend] == [palette.ramp(share / 3) for share in range(4)]
    assert [mark.fill for mark in layouts] == [palette.ramp(count / 3) for count in MECHANISMS]
    centres = [(sum(x for x, _ in mark.points) / 20, sum(y for _, y in mark.points) / 20) for mark in layouts]
    assert centres[0][0] < centres[1][0] < centres[2][0] == centres[3][0] < centres[4][0]
    assert centres[1][1] < centres[0][1] < centres[3][1] < centres[2][1] < centres[4][1]
    (stairs,) = [mark for mark in picture.marks if isinstance(mark, Line) and mark.dashed]
    assert len(stairs.points) == 5  # the second and the fourth hold more than what is as fast


def test_numbers_cover_neither_discs_nor_each_other():
    marks = lay_out_front(FRONT, MECHANISMS, "t").marks
    numbers = [mark for mark in marks if isinstance(mark, Text) and mark.anchor == "start" and mark.size == 10.5]
    boxes = [(m.x, m.y - 8.4, m.x + text_width(m.text, 10.5), m.y) for m in numbers if m.text in "12345" and m.y > 90]
    discs = [m.points for m in marks if isinstance(m, Line) and m.fill not in ("", palette.PAPER)][4:]
    boxes += [tuple(f(p[i] for p in disc) for f, i in ((min, 0), (min, 1), (max, 0), (max, 1))) for disc in discs]
    assert len(boxes) == 10
    for i, one in enumerate(boxes):
        for other in boxes[i + 1 :]:
            if one in boxes[:5]:
                apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
                assert apart, (one, other)


def test_a_layout_in_words_has_what_is_not_plainest():
    given = candidate(1, 1, tp=4, pp=2, sequence_parallel=True, zero=1, etp=4)
    assert layout_text({**given, "recompute": "full"}) == "tp4 pp2 dp8 sp zero1, recompute full"
    assert layout_text(candidate(1, 1, dp=1)) == "one device"


def test_the_verb_draws_its_answer(tmp_path, capsys):
    assert main(["plan", *SEARCH, "-o", str(tmp_path / "front.svg")]) == 0
    printed = capsys.readouterr()
    assert f"written: {tmp_path / 'front.svg'}" in printed.err and "layouts decided" in printed.out
    text = (tmp_path / "front.svg").read_text()
    assert "Layouts by time and memory: gpt2 on 2 devices" in text and "dp2" in text
    draw_front(REPORT, tmp_path / "front.png")
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_to_draw_and_other_suffixes_are_refused(tmp_path):
    with pytest.raises(PlanError, match="no layout fits"):
        draw_front({"candidates": [], "picture": {"title": "t", "mechanisms": []}}, tmp_path / "x.svg")
    with pytest.raises(UnknownNameError):
        draw_front(REPORT, tmp_path / "x.gif")
    assert not list(tmp_path.iterdir())


def test_a_saved_answer_is_drawn_as_the_verb_itself_draws_it(tmp_path, capsys):
    saved, own, again = (tmp_path / name for name in ("front.json", "own.svg", "again.svg"))
    assert main(["plan", *SEARCH, "-o", str(saved)]) == main(["plan", *SEARCH, "-o", str(own)]) == 0
    assert main(["draw", str(saved), "-o", str(again)]) == 0
    assert again.read_bytes() == own.read_bytes() and f"written: {again}" in capsys.readouterr().err


def damaged(**picture):
    return json.dumps({**REPORT, "picture": {"title": "t", "mechanisms": MECHANISMS, **picture}})


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (damaged(), ["--width", "900", "-o", "x.svg"], "--width has no effect on"),
        (damaged(), ["--pp", "2", "-o", "x.svg"], "--pp has no effect on"),
        (damaged(), [], "is drawn in a file"),
        (damaged(), ["-o", "x.html"], "unknown picture suffix"),
        (damaged(mechanisms=[1]), ["-o", "x.svg"], "its layouts are not what `plan` writes"),
        (json.dumps({"candidates": FRONT}), ["-o", "x.svg"], "does not say how plain its layouts are"),
        (damaged()[:400], ["-o", "x.svg"], "this is not JSON"),
    ],
)
def test_an_answer_that_cannot_be_drawn_is_refused(tmp_path, capsys, monkeypatch, text, options, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "front.json").write_text(text)
    assert main(["draw", "front.json", *options]) == 2
    assert said in capsys.readouterr().err and len(list(tmp_path.iterdir())) == 1


def test_a_prediction_lies_by_both_times_and_by_its_error():
    steps = [Step("one", 1.0, 1.1), Step("one", 10.0, 9.0), Step("two", 100.0, 300.0)]
    picture = lay_out_validation(steps)
    dots = [mark for mark in picture.marks if isinstance(mark, Rect) and (mark.width, mark.height) == (3.0, 3.0)]
    (one, ten, hundred), errors = dots[:3], dots[3:]
    # as far apart across, a factor of ten each; up by the logarithm of 9 / 1.1
    assert hundred.x - ten.x == pytest.approx(ten.x - one.x)
    assert (one.y - ten.y) / (ten.x - one.x) == pytest.approx(0.9129, abs=1e-3)
    right = max(error.x for error in errors)
    assert errors[-1].x == right == pytest.approx(picture.width - 24 - 1.5)  # 200% is at the edge
    texts = {mark.text for mark in picture.marks if isinstance(mark, Text)}
    assert {"one", "two", "Predicted and published: 3 training steps"} <= texts
    assert "error of each, its middle half, and the median; 1 beyond 50% at the edge" in texts
