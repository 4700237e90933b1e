"""Loss curves of runs, by the data of the picture and as a user asks for them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from shardproof.core.commands.cli import main
from shardproof.viz.curves import curves_scene, read_curve
from shardproof.viz.curves_picture import color_of, lay_out_curves
from shardproof.viz.picture import Line, Text


def written(path, losses, validations=(), first=None):
    held = dict(validations)
    rows = [{"step": step, "loss": loss, "tokens": 10, "step_time_s": 0.5} for step, loss in enumerate(losses, 1)]
    rows = [row | ({"validation_loss": held[row["step"]]} if row["step"] in held else {}) for row in rows]
    rows[0] |= {"validation_loss_before": first} if first is not None else {}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def runs(tmp_path):
    one = written(tmp_path / "one.jsonl", [5.0, 4.0, None, 2.0], [(2, 4.5), (4, 2.5)], first=5.5)
    return one, written(tmp_path / "two.jsonl", [4.0 - 0.01 * step for step in range(200)])


def test_a_curve_has_the_losses_that_are_numbers_and_the_held_out_ones(runs):
    curve = read_curve(runs[0], "one")
    assert curve.losses.tolist() == [[1, 5.0], [2, 4.0], [4, 2.0]]
    assert curve.validations.tolist() == [[0, 5.5], [2, 4.5], [4, 2.5]]
    assert curve.caption == "one: 4 steps, loss 2.0000, held-out 2.5000"
    assert curve.smoothed is curve.losses


def test_a_smoothed_curve_of_a_straight_line_is_that_line(runs):
    curve = read_curve(runs[1], "two")
    assert curve.smoothed is not curve.losses
    np.testing.assert_allclose(curve.smoothed, curve.losses[1:-1], rtol=1e-12)


def test_a_smoothed_curve_ends_with_the_mean_of_half_a_window_and_not_with_the_last_loss(tmp_path):
    curve = read_curve(written(tmp_path / "noisy.jsonl", [3.0, 5.0] * 400 + [9.0]), "noisy")
    assert curve.smoothed[-1].tolist() == [796, pytest.approx((5 * 5.0 + 5 * 3.0 + 9.0) / 11)]
    assert curve.smoothed[0, 0] == 6


def test_a_picture_has_each_run_in_its_colour_within_the_axes(runs):
    scene = curves_scene([read_curve(path, path) for path in runs])
    picture = lay_out_curves(scene, 800.0)
    for index in range(2):
        (line,) = [mark for mark in picture.marks if isinstance(mark, Line) and mark.stroke == color_of(index)]
        xs, ys = zip(*line.points, strict=True)
        assert min(xs) >= 64 and max(xs) <= 776 and min(ys) > 0 and max(ys) < picture.height
    discs = [mark for mark in picture.marks if isinstance(mark, Line) and mark.fill == color_of(0)]
    assert len(discs) == 3
    labels = [mark.text for mark in picture.marks if isinstance(mark, Text)]
    assert "loss (nats per token)" in labels and "step" in labels
    assert {"2", "3", "4", "5"} <= set(labels) and {"0", "50", "100", "150", "200"} <= set(labels)


def test_a_terminal_shows_both_runs_and_held_out_losses(runs, capsys):
    assert main(["draw", runs[0], "--compare", runs[1], "--width", "60"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 60
    assert "* one: 4 steps, loss 2.0000, held-out 2.5000" in text and "+ two: 200 steps" in text
    assert text.split("held-out loss")[1].count("O") == 3


@pytest.mark.parametrize(("suffix", "begins"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".txt", b"Training loss")])
def test_files_are_the_same_each_time(runs, suffix, begins, tmp_path, capsys):
    files = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for file in files:
        assert main(["draw", *runs[:1], "--compare", runs[1], "--compare", runs[0], "-o", str(file)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes() and files[0].read_bytes().startswith(begins)


def test_json_has_the_numbers_of_the_runs(runs, capsys):
    assert main(["draw", runs[0], "--compare", runs[1], "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out)["runs"]
    assert one == {
        "name": "one",
        "steps": 4,
        "tokens": 40,
        "mean_step_time_s": 0.5,
        "first_loss": 5.0,
        "least_loss": 2.0,
        "last_loss": 2.0,
        "last_validation_loss": 2.5,
    }
    assert two["last_validation_loss"] is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--compare", "other.csv"], "compares with another's metrics"),
        (["--tp", "2"], "plan options have no effect"),
        (["-o", "run.html"], "picture suffix"),
        (["--compare", "none.jsonl"], "none.jsonl"),
    ],
)
def test_what_is_no_run_ends_with_2(runs, arguments, sentence, capsys):
    assert main(["draw", runs[0], *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_timeline_compares_with_one_other(tmp_path, capsys):
    file = tmp_path / "two.csv"
    file.write_text("0F0,0B0\n")
    assert main(["draw", str(file), "--compare", str(file), "--compare", str(file)]) == 2
    assert main(["draw", str(file), "--compare", "run.jsonl"]) == 2
    assert main(["draw", str(file), "--compare", str(file)]) == 0
