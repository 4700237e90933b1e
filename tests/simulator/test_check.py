"""The verb `check`, what it says would be better, and the interval of its step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardproof import Plan, simulate
from shardproof.benchmarks.published.row import read_rows
from shardproof.benchmarks.published.validation import predict_row
from shardproof.benchmarks.published.validation.intervals import ratios_by_kind
from shardproof.core.commands.cli import main
from shardproof.simulator.search.changes import changed
from shardproof.simulator.search.margins import margins_of
from shardproof.simulator.search.neighbours import LEAST_GAIN, better_plans
from shardproof.simulator.simulation.interval import LEAST_SETTINGS, RunKind, interval_of
from shardproof.simulator.simulation.validated import RATIOS

LLAMA = """
[model]
preset = "llama3-70b"
[cluster]
preset = "dgx-h100"
num_devices = 64
[runtime]
profile = "megatron-te"
[layout]
tp = 8
pp = 4
sequence_parallel = true
zero = 1
[batch]
global = 256
sequence = 8192
[recompute]
mode = "full"
"""


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    file = tmp_path / "plan.toml"
    file.write_text(LLAMA)
    return str(file)


def test_check_has_the_keys_of_the_interface_and_draws_the_step(plan_file, tmp_path, capsys):
    picture = tmp_path / "step.svg"
    assert main(["check", plan_file, "--json", "--picture", str(picture)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == {"ok", "findings", "import", "fit", "simulate", "better"}
    assert report["ok"] and not report["findings"] and report["import"] is None
    interval = report["simulate"]["step_time_interval_s"]
    assert interval["low"] < interval["high"] and interval["settings"] >= LEAST_SETTINGS
    assert report["simulate"]["step_time_s"] == simulate(Plan.from_toml(LLAMA)).report["step_time_s"]
    assert report["fit"]["fits"] and picture.read_text().startswith("<?xml")


def test_a_plan_that_does_not_fit_ends_with_1_and_says_what_would(plan_file, capsys):
    assert main(["check", plan_file, "--set", "recompute.mode=none", "--set", "layout.pp=1"]) == 1
    said = capsys.readouterr().out
    assert "out-of-memory" in said and "it fits with one of these" in said


def test_annotations_name_the_line_of_the_plan(plan_file, capsys):
    assert main(["check", plan_file, "--set", "layout.pp=1", "--format", "github", "--set", "recompute.mode=none"]) == 1
    assert f"::error file={plan_file},line=5,title=shardproof%3A out-of-memory" in capsys.readouterr().out


def test_little_to_spare_is_a_warning(plan_file, capsys):
    plan = Plan.from_toml(LLAMA)
    least, most = 1e10, 80e9  # bytes of a device: the plan does not fit, and fits
    for _ in range(12):
        middle = (least + most) / 2
        fits = margins_of(changed(plan, {"cluster.device_memory_bytes": middle})).fits
        least, most = (least, middle) if fits else (middle, most)
    assert main(["check", plan_file, "--json", "--set", f"cluster.device_memory_bytes={most}"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and [each["rule"] for each in report["findings"]] == ["memory-margin"]


def test_better_plans_are_what_their_changes_give():
    plan = Plan.from_toml(LLAMA)
    step_s = simulate(plan).report["step_time_s"]
    found = better_plans(plan, step_s)
    assert found
    for each in found:
        other = changed(plan, each.changes)
        assert other == each.plan and margins_of(other).fits
        assert simulate(other).report["step_time_s"] == each.step_s < step_s * (1 - LEAST_GAIN)
    several, *singles = found
    assert len(several.changes) > 1 and all(several.step_s < each.step_s for each in singles)


def test_a_kind_with_few_settings_takes_a_wider_one():
    counted = {RunKind(*kind): len(ratios) for kind, ratios in RATIOS}
    plan = Plan.from_toml(LLAMA)
    own = interval_of(plan)
    assert own.num_settings == sum(count for kind, count in counted.items() if own.kind.holds(kind)) >= LEAST_SETTINGS
    alone = changed(plan, {"cluster.preset": "dgx-h200"})  # one published setting
    assert interval_of(alone).kind == RunKind("megatron-te")
    assert interval_of(alone).low < own.low


def test_the_table_of_ratios_is_what_published_rows_give():
    predictions = [predict_row(row) for row in read_rows() if row.source == "torchtitan benchmarks"]
    stored = {RunKind(*kind): ratios for kind, ratios in RATIOS}
    for kind, ratios in ratios_by_kind(predictions).items():
        assert set(ratios) <= set(stored[kind]), "python benchmarks/validate.py --write-intervals writes it again"
