"""The file of metrics: the keys of the interface, every step once after a kill, and the step that was expected."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from helpers.paths import DATA
from helpers.plans import training_plan
from shardproof import Trainer, simulate
from shardproof.backend.checkpoint.resume import path_of
from shardproof.backend.monitoring.metrics import check_metrics_file, metrics_file
from shardproof.backend.monitoring.prediction import predicted
from shardproof.core.base.errors import FileError, PlanError
from shardproof.core.base.metrics import read_metrics
from shardproof.core.commands.cli import main
from shardproof.core.plan.log import Log
from shardproof.core.plan.train import Checkpoint, Train

KEYS = (
    *("step", "loss", "grad_norm", "learning_rate", "num_microbatches", "tokens", "step_time_s"),
    *("predicted_step_time_s", "tokens_per_s", "mfu"),
)
"""Those that scripts are written against."""

SMALL = training_plan(samples=4, sequence=16)
MEASURED = str(DATA / "files_of_2026_11" / "cluster.toml")


def test_a_row_has_the_keys_of_the_interface_and_what_the_run_found(tmp_path):
    plan = replace(SMALL, train=Train(steps=3, eval_every=2), log=Log(file=str(tmp_path / "run.jsonl")))
    result = Trainer(plan, transport="memory").fit()
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert all(tuple(row)[: len(KEYS)] == KEYS for row in rows)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert tuple(row["loss"] for row in rows) == result.losses
    assert tuple(row["grad_norm"] for row in rows) == result.grad_norms
    assert {(row["tokens"], row["num_microbatches"], row["learning_rate"]) for row in rows} == {(64, 4, 3e-4)}
    assert all(row["tokens_per_s"] == row["tokens"] / row["step_time_s"] for row in rows)
    validations = (rows[0]["validation_loss_before"], rows[1]["validation_loss"], rows[2]["validation_loss"])
    assert validations == result.validation_losses and result.validation_steps == (0, 2, 3)
    # nobody has measured this machine
    assert {(row["predicted_step_time_s"], row["mfu"]) for row in rows} == {(None, None)}


def test_a_run_on_a_measured_machine_has_the_step_that_simulate_says(tmp_path, capsys):
    options = ["--model", "tiny-gpt", "--dtype", "fp32", "--global-batch", "4", "--sequence", "16", "--devices", "1"]
    options += ["--set", f"cluster.file={MEASURED}", "--set", "train.steps=1"]
    file = tmp_path / "run.jsonl"
    assert main(["train", *options, "--transport", "memory", "--set", f"log.file={file}"]) == 0
    capsys.readouterr()
    assert main(["simulate", *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (row,) = read_metrics(file)
    assert row["predicted_step_time_s"] == report["step_time_s"]
    assert row["mfu"] == pytest.approx(report["mfu"] * report["step_time_s"] / row["step_time_s"], rel=1e-12)


def test_on_processors_a_cluster_that_was_not_measured_predicts_nothing():
    on_gpus = training_plan(cluster="dgx-h100")
    assert predicted(on_gpus, "shm") is None and predicted(SMALL, "nccl") is None
    found = predicted(on_gpus, "nccl")
    assert found is not None and found.step_time_s == simulate(on_gpus).report["step_time_s"]


def test_a_run_that_was_killed_and_resumed_has_every_step_once(tmp_path):
    plan = replace(SMALL, train=Train(steps=5), checkpoint=Checkpoint(folder=str(tmp_path), every=2))
    Trainer(plan, transport="memory").fit()
    file = tmp_path / "metrics.jsonl"
    before = file.read_text().splitlines(keepends=True)
    # as a kill leaves it: the newest checkpoint is of step 4, and the line of step 6 is torn
    shutil.rmtree(path_of(tmp_path, 5))
    file.write_text("".join(before) + before[0] + before[-1].replace('"step": 5', '"step": 6')[:40])
    Trainer(replace(plan, train=Train(steps=6)), transport="memory", resume=True).fit()
    after = file.read_text().splitlines(keepends=True)
    assert [json.loads(line)["step"] for line in after] == [1, 2, 3, 4, 5, 6]
    assert after[:4] == before[:4] and json.loads(after[4])["loss"] == json.loads(before[4])["loss"]


def test_where_the_file_lies(tmp_path):
    assert metrics_file(SMALL) is None and metrics_file(SMALL, "here.jsonl") == "here.jsonl"
    saved = replace(SMALL, checkpoint=Checkpoint(folder=str(tmp_path)))
    assert metrics_file(saved, "here.jsonl") == str(tmp_path / "metrics.jsonl")
    assert metrics_file(replace(saved, log=Log(file="own.jsonl"))) == "own.jsonl"
    assert metrics_file(replace(SMALL, checkpoint=Checkpoint(folder="s3://bucket/run")), "here.jsonl") == "here.jsonl"


def test_a_file_of_something_else_is_not_written_over(tmp_path):
    file = tmp_path / "thesis.txt"
    file.write_text("Chapter 1\n")
    plan = replace(SMALL, log=Log(file=str(file)))
    with pytest.raises(PlanError, match="holds something else"):
        Trainer(plan)
    with pytest.raises(PlanError, match="folder that is not there"):
        check_metrics_file(replace(plan, log=Log(file=str(tmp_path / "none" / "run.jsonl"))))
    with pytest.raises(FileError, match=r"thesis.txt:1: this is no metrics"):
        read_metrics(file)
    assert file.read_text() == "Chapter 1\n"


def test_metrics_that_cannot_be_written_end_no_run(tmp_path):
    (tmp_path / "taken").write_text("")
    assert Trainer(SMALL, transport="memory", metrics=str(tmp_path / "taken" / "run.jsonl")).fit().steps == 2
