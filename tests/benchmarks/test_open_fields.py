"""Fields that a source leaves open: predicted with every value, and what that says of its bias;
on a row typed in here."""

from __future__ import annotations

import pytest

from shardproof.benchmarks.published.row import Row, measured_of
from shardproof.benchmarks.published.validation import Prediction, predict_row
from shardproof.benchmarks.published.validation.bias import bias_tables
from shardproof.benchmarks.published.validation.open_fields import open_fields, open_table


def nemotron(seconds=0.57, micro=None) -> Row:
    """Row 1 of the Nemotron-4 15B report (arXiv 2402.16819, table 2), which names no microbatch."""
    model = {"layers": 32, "hidden": 6144, "ffn": 24576, "heads": 48, "kv_heads": 8, "vocab": 256000, "seq": 4096}
    return Row(
        {
            "id": "x",
            "source": "Nemotron-4 15B report",
            "source_ref": "Table 2",
            "family": "nemotron15_report",
            "kind": "train_step",
            "tier": "D",
            "model": {"name": "Nemotron-4 15B", **model},
            "hardware": {"gpu": "H100-80GB SXM5", "count": 768, "inter": "8x400 Gb/s InfiniBand per node"},
            "parallel": {"tp": 8, "pp": 1, "vpp": 1, "dp": 96, "cp": 1, "sharding": "distributed optimizer"},
            "batch": {"micro": micro, "global": 384},
            "precision": "bf16",
            "measured": {"step_s": seconds},
        }
    )


def test_a_row_is_predicted_with_another_value_of_a_field_that_it_does_not_publish_only():
    default, other = predict_row(nemotron()), predict_row(nemotron(), {"batch.micro": 1})
    assert "batch.micro=2" in default.assumed and "batch.micro=1" in other.assumed
    assert other.predicted_s > 1.05 * default.predicted_s
    assert predict_row(nemotron(micro=2), {"batch.micro": 1}).predicted_s == default.predicted_s


def test_every_value_of_an_open_field_has_a_bias_and_the_default_that_of_the_prediction():
    rows = [nemotron(), nemotron(0.58)]
    (found,) = open_fields(rows)
    assert (found.source, found.name, found.default) == ("Nemotron-4 15B report", "batch.micro", 2)
    biases = dict(found.biases)
    assert list(biases) == [1, 2, 4]
    errors = [predict_row(row).error for row in rows]
    assert biases[2] == pytest.approx(sum(errors) / 2)
    assert open_fields([nemotron(micro=2)]) == []
    assert [cells[:3] for cells in open_table([found]).rows] == [("Nemotron-4 15B report", "batch.micro", "2")]


def test_a_bias_that_another_value_would_explain_is_open():
    slow_s = predict_row(nemotron(), {"batch.micro": 1}).predicted_s  # what a run with the other value would have taken
    rows = [nemotron(slow_s), nemotron(slow_s)]
    sources, opened, _ = bias_tables(rows, [predict_row(row) for row in rows])
    assert [cells[-1] for cells in sources.rows] == ["open"] and len(opened.rows) == 1
    # 5% to 10% away from either value
    between = [nemotron(predict_row(nemotron(), {"batch.micro": 1}).predicted_s * 0.93)] * 2
    sources, _, _ = bias_tables(between, [predict_row(row) for row in between])
    assert [cells[-1] for cells in sources.rows] == ["open"]
    settled = [nemotron(slow_s, micro=2), nemotron(slow_s, micro=2)]
    sources, opened, _ = bias_tables(
        settled, [Prediction(row, measured_of(row), predicted_s=0.8 * slow_s) for row in settled]
    )
    assert [cells[-1] for cells in sources.rows] == ["no"] and opened.rows == ()
