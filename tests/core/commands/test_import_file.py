"""The verb `import`, and other verbs with somebody else's file in the place of a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardproof
from shardproof.core.commands.cli import main
from shardproof.core.plan.plan import Plan

CONFIGS = Path(shardproof.__file__).parent / "tests" / "core" / "imports" / "configs"
PIPELINE = str(CONFIGS / "titan_pipeline.toml")
LEFT_OPEN = str(CONFIGS / "titan_8b_fsdp.toml")


def test_import_prints_the_plan_and_every_setting_as_json(capsys: pytest.CaptureFixture[str]):
    assert main(["import", PIPELINE, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["format"], report["version"]) == ("torchtitan", "v0.1")
    assert Plan.from_toml(report["plan"]).layout.pp == 4
    flags = {each["flag"]: each for each in report["flags"]}
    assert flags["training.seq_len"] == {
        "flag": "training.seq_len",
        "value": "4096",
        "line": 6,
        "status": "mapped",
        "key": "batch.sequence",
        "why": "",
    }


def test_a_refused_setting_ends_with_2_and_its_line(capsys: pytest.CaptureFixture[str]):
    assert main(["import", LEFT_OPEN]) == 2
    error = capsys.readouterr().err
    assert f"{LEFT_OPEN}:13: parallelism.data_parallel_shard_degree -1" in error
    assert "--devices N" in error
    assert main(["import", LEFT_OPEN, "--explain"]) == 2
    assert "1 refused" in capsys.readouterr().out


def test_what_is_assumed_is_said_once_by_verbs_that_take_the_file(capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", PIPELINE, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["num_devices"] == 16
    assert printed.err.count("dgx-h100 is assumed") == 1


def test_options_go_over_the_file_and_a_cluster_of_the_users_over_the_assumed_one(capsys: pytest.CaptureFixture[str]):
    assert main(["import", LEFT_OPEN, "--devices", "32", "--tp", "2", "--cluster", "dgx-a100-80g"]) == 0
    plan = Plan.from_toml(capsys.readouterr().out)
    assert (plan.layout.tp, plan.layout.dp, plan.cluster.name) == (2, 16, "dgx-a100-80g")


def test_a_format_that_is_none_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]):
    assert main(["import", PIPELINE, "--from", "torchtian"]) == 2
    assert "did you mean 'torchtitan'?" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "text"), [("run.sh", "echo hello\n"), ("run.json", '{"a": 1}')])
def test_a_file_of_no_format_says_which_there_are(name, text, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    assert main(["simulate", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert "in none of the formats that are imported" in error and "Megatron-LM" in error and "TOML" in error


def test_a_broken_plan_is_no_file_of_others(tmp_path, capsys):
    (tmp_path / "plan.toml").write_text("[layout]\ntp = \n")
    assert main(["simulate", str(tmp_path / "plan.toml")]) == 2
    assert "plan.toml:2: this is not TOML" in capsys.readouterr().err
