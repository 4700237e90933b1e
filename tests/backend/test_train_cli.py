"""`shardproof train` as users start it: alone, under torchrun, with bad input, and with a rank that dies."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers.gates import sampled
from shardproof import Timeline
from shardproof.backend import trainer
from shardproof.backend.launching.torchrun import under_torchrun
from shardproof.core.commands.cli import main

PLAN = ["--model", "tiny-gpt", "--dtype", "fp32", "--global-batch", "8", "--sequence", "16"]
PIPELINE = [*PLAN, "--pp", "2", "--devices", "2"]


def command(*arguments):
    return [sys.executable, "-m", "shardproof", "train", *arguments]


def test_json_has_the_keys_of_the_interface_and_the_timeline_is_written(tmp_path, capsys):
    file = tmp_path / "run.timeline.json"
    assert main(["train", *PIPELINE, "--transport", "memory", "--set", "train.steps=3", "--json", "-o", str(file)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (
        report["steps"] == 3
        and len(report["losses"]) == 3
        and report["world_size"] == 2
        and report["checkpoint"] is None
    )
    assert report["tokens_per_s"] > 0 and len(report["validation_losses"]) == 4
    timeline = Timeline.load(file)
    assert timeline.source == "measured" and timeline.global_ranks == (0, 1)


def test_text_says_ranks_speed_and_losses(capsys):
    assert main(["train", *PLAN, "--transport", "memory", "--devices", "1", "--set", "train.steps=2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("trained 2 steps on 1 ranks at ") and "validation loss" in text


def test_dry_run_groups_equal_ranks_within_the_terminals_width_and_starts_nothing(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["train", *PLAN, "--pp", "2", "--tp", "2", "--devices", "4", "--dry-run"]) == 0
    text = capsys.readouterr().out
    words = " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80 and "on 4 ranks" in words
    assert "ranks 0-1: stage 0: embedding, layers 0-1;" in words and "0F0" in words
    assert "ranks 2-3: stage 1: layers 2-3, head;" in words


def test_dry_run_reports_the_memory_of_fit_with_zero_and_whose_samples_are_whose(capsys):
    options = [*PLAN, "--devices", "4", "--pp", "2", "--zero", "1", "--global-batch", "6"]
    assert main(["fit", *options, "--json"]) == 0
    reported = {row["pp_rank"]: row["peak_memory_bytes"] for row in json.loads(capsys.readouterr().out)["per_rank"]}
    assert main(["train", *options, "--dry-run", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {group["pp"]: group["peak_memory_bytes"] for group in report["groups"]} == reported
    assert [group["ranks"] for group in report["groups"]] == [[[0, 1]], [[2, 3]]]
    assert [group["samples"] for group in report["groups"]] == [[0, 6], [0, 6]]
    assert [rank["samples"] for rank in report["ranks"]] == [[0, 3], [3, 6], [0, 3], [3, 6]]


def test_dry_run_of_a_million_ranks_is_groups_alone(capsys):
    options = ["--model", "llama3-8b", "--cluster", "dgx-h100", "--devices", "1000000", "--tp", "8"]
    assert main(["train", *options, "--dry-run", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ranks"] == [] and [group["ranks"] for group in report["groups"]] == [[[0, 999_999]]]


def test_dry_run_json_lists_the_ranks_of_a_small_world(capsys):
    assert main(["train", *PLAN, "--pp", "2", "--devices", "2", "--dry-run", "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert [rank["global_rank"] for rank in ranks] == [0, 1] and ranks[1]["first_actions"][0] == "1RECV_F0"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--recompute", "full", "--zero", "3"], "layer by layer"),
        (["--schedule", "1F2B"], "1F2B"),
        (["--set", "train.data=no-such-file"], "no-such-file"),
        (["-o", "no-such-folder/run.timeline.json"], "no-such-folder"),
    ],
)
def test_bad_input_ends_with_2_and_a_sentence(arguments, sentence, capsys):
    assert main(["train", *PLAN, "--devices", "1", "--transport", "memory", *arguments]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and captured.out == ""


def test_a_schedule_with_a_missing_receive_is_refused_before_anything_starts(tmp_path, capsys):
    file = tmp_path / "broken.csv"
    file.write_text("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n")
    arguments = ["--pp", "2", "--devices", "2", "--schedule", str(file), "--global-batch", "1"]
    assert main(["train", *PLAN, *arguments]) == 2
    assert "1RECV_F0" in capsys.readouterr().err or "0SEND_F0" in capsys.readouterr().err


def test_who_starts_ranks_reads_their_results_without_torch():
    code = (
        "import sys, shardproof.backend.cli, shardproof.backend.base.step_result, shardproof.backend.trainer; "
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def forked(process_id):
    """Process ids of the ranks of a command: they are forked from one that runs the same program text."""

    def text(each):
        return (Path("/proc") / str(each) / "cmdline").read_bytes()

    own = children(process_id)
    return [each for each in own if text(each) == text(parent_of(each))]


def parent_of(process_id):
    return int((Path("/proc") / str(process_id) / "stat").read_text().rpartition(")")[2].split()[1])


def children(process_id):
    """Process ids of all descendants that have no children of their own."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, pending = [], [process_id]
    while pending:
        current = pending.pop()
        below = [child for child, parent in parents.items() if parent == current]
        pending += below
        if not below and current != process_id:
            found.append(current)
    return sorted(found)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the ranks in /proc")
def test_a_killed_rank_ends_the_command_with_2_and_only_why_is_written(tmp_path):
    file, why = tmp_path / "run.timeline.json", tmp_path / "why.json"
    arguments = [*PIPELINE, "--set", "train.steps=100000", "-o", str(file), "--failure-report", str(why)]
    with subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        header = list(itertools.takewhile(lambda line: not line.startswith("step 1/100000"), process.stderr))
        assert process.poll() is None, header
        try:
            os.kill(forked(process.pid)[-1], signal.SIGKILL)
            # far below the half hour that gloo waits for a peer that is gone
            out, err = process.communicate(timeout=300)
        finally:
            process.kill()  # else a run that goes on is waited for
    assert process.returncode == 2 and out == ""
    assert "was killed by SIGKILL" in err and "rank 1" in err
    for rank in range(2):  # whether the kill meets it in an action, in a wait or between two steps
        assert re.search(rf"^  rank {rank} (was at|waited for|had done)", err, re.MULTILINE), err
    assert f"written: {why}" in err, err
    assert list(tmp_path.iterdir()) == [why]
    report = json.loads(why.read_text())
    assert report["holders"] == [1] and [rank["global_rank"] for rank in report["ranks"]] == [0, 1]
    assert "rank 1 was killed by SIGKILL" in report["summary"] and report["ranks"][1]["lanes"][0]["lane"] == "compute"


def defective_train_rank(transport, job):
    """Training in which rank 1 pops from an empty list of ours in its second forward."""
    if transport.global_rank == 1:
        recorder = transport.recorder
        recorder.enabled = True
        broken = "def product(*_, **__):\n    if str(recorder.scope[0]) == '1F1': nodes.pop()\n"
        known = {"__name__": "shardproof.backend.defective", "recorder": recorder, "nodes": []}
        exec(compile(broken, "/shardproof/backend/defective.py", "exec"), known)
        recorder.product = known["product"]
    return trainer.run_steps(transport, job.plan)


def test_a_defect_in_a_rank_ends_the_command_with_3_and_names_rank_action_and_layer(tmp_path, monkeypatch, capfd):
    why = tmp_path / "why.json"
    monkeypatch.setattr(trainer, "train_rank", defective_train_rank)
    assert main(["train", *PIPELINE, "--transport", "memory", "--json", "--failure-report", str(why)]) == 3
    captured = capfd.readouterr()
    words = "shardproof train: rank 1 failed: IndexError: pop from empty list, in 1F1 (step 1, microbatch 1) at layers."
    assert captured.out == "" and words in captured.err and ("This is a defect of shardproof") in captured.err, (
        captured.err
    )
    assert json.loads(why.read_text())["holders"] == [1]
    monkeypatch.setenv("SHARDPROOF_TRACEBACK", "1")
    assert main(["train", *PIPELINE, "--transport", "memory", "--json", "--failure-report", str(why)]) == 3
    assert "defective.py" in capfd.readouterr().err


@sampled("transport", ["shm", "gloo"], on_push=1)  # ranks of torchrun over gloo: launching/test_endings.py
def test_under_torchrun_the_same_command_is_one_rank_and_rank_0_reports_the_losses_of_ranks_that_are_threads(
    transport, capsys
):
    options = ["train", *PIPELINE, "--set", "train.steps=2", "--json"]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "shardproof",
    ]
    command = [*torchrun, *options, "--transport", transport]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert "over gloo, not shared memory" not in done.stderr
    assert report["steps"] == 2 and report["world_size"] == 2 and not under_torchrun()
    assert main([*options, "--transport", "memory"]) == 0
    assert json.loads(capsys.readouterr().out)["losses"] == report["losses"]


TINY = ["train", "--model", "tiny-gpt", "--dtype", "fp32", "--sequence", "8", "--transport", "memory"]


def test_no_steps_are_trained_and_only_validated(capsys):
    assert main([*TINY, "--set", "train.steps=0"]) == 0
    assert "trained 0 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "train.steps=1", "--set", "train.learning_rate=1e30"], "Lower train.learning_rate"),
        (["--set", "train.steps=0", "-o", "run.timeline.json"], "no step of train.steps=0 is left to measure"),
        (["-o", "run.svg"], "writes .json, .txt or .timeline.json, not .svg"),
        (["-o", "."], "this is a folder. Name a file"),
    ],
)
def test_bad_input_of_training_is_reported_in_a_sentence(options, message, capsys):
    assert main([*TINY, *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_nccl_without_a_gpu_is_refused_before_ranks_start(capsys):
    assert main([*TINY, "--transport", "nccl"]) == 2
    assert "CUDA devices are needed (nccl: one for each rank), and torch finds 0" in capsys.readouterr().err
