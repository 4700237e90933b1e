"""Predictions against published steps that come with the repository, so that CI sees it when a change costs accuracy.

`tests/data/published_sample.jsonl` holds 44 published rows with their sources: SC21 table 1, Korthikanti table 5,
MLPerf Training v4.1 and v5.0, SimuMax on 8 B200. `python benchmarks/validate.py` judges all published rows.
"""

from __future__ import annotations

import json

import pytest

from helpers.paths import DATA
from shardproof.benchmarks.published.row import Row
from shardproof.benchmarks.published.validation import Prediction, predict_row
from shardproof.benchmarks.published.validation.targets import TARGETS

SAMPLE = DATA / "published_sample.jsonl"


@pytest.fixture(scope="module")
def predictions() -> list[Prediction]:
    return [predict_row(Row(json.loads(line))) for line in SAMPLE.read_text().splitlines()]


def test_every_row_of_the_sample_is_predicted_and_none_runs_out_of_memory(predictions):
    assert len(predictions) == 44
    assert [one.row.id for one in predictions if one.refused or one.error is None] == []


@pytest.mark.parametrize(
    "name", ["SC21 Table 1", "Korthikanti Table 5", "SimuMax B200, time", "SimuMax B200, allocated memory"]
)
def test_the_mean_error_is_within_what_is_asked(predictions, name):
    (target,) = [target for target in TARGETS if target.name == name]
    errors = target.errors(predictions)
    assert len(errors) >= 6
    assert sum(map(abs, errors)) / len(errors) <= target.mape


def test_mlperf_steps_on_hopper_and_blackwell_are_within_4_percent_on_average_and_8_at_worst(predictions):
    errors = [abs(one.error) for one in predictions if one.row.source.startswith("MLPerf")]
    assert len(errors) == 11
    assert sum(errors) / len(errors) <= 0.04 and max(errors) <= 0.08
