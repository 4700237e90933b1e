"""A run that is asked to stop finishes its step, saves, and leaves; resumed, it has the bits of one that nobody asked.
Signals are real ones, to whichever process of the run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from helpers.gates import sampled
from helpers.processes import Started, processes_of
from shardproof.backend.checkpoint.resume import saved_in
from shardproof.core.commands.cli import main

PLAN = ["--model", "tiny-llama", "--dtype", "fp32", "--sequence", "16", "--global-batch", "4"]
PLAN += ["--set", "numerics.mode=exact", "--set", "model.num_layers=2", "--set", "model.hidden_size=32"]
TRAIN = ["train", *PLAN, "--set", "train.steps=1000000", "--set", "checkpoint.folder=saved"]
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shardproof"]


@pytest.fixture
def start(tmp_path):
    """`start(*arguments)`: a program, of which nothing stays when the test is over."""
    started = []

    def start_one(*arguments: str) -> Started:
        started.append(Started(tmp_path, arguments))
        return started[-1]

    yield start_one
    for run in started:
        for pid in (run.process.pid, *processes_of(run.mark)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait()


def ranks_of(run: Started) -> list[int]:
    """The processes that are neither who started them nor the server: those that the server has forked."""
    found = processes_of(run.mark)
    parents = {pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in found}
    return sorted(pid for pid, parent in parents.items() if parents.get(parent) == run.process.pid)


def losses(folder: Path, capfd: pytest.CaptureFixture, *options: str) -> list[float]:
    """Those of a run to its end in this process."""
    assert main(["train", *PLAN, "--set", f"checkpoint.folder={folder}", "--transport", "memory", *options]) == 0
    return json.loads(capfd.readouterr().out)["losses"]


@sampled(("number", "to_rank"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)], on_push=1)
def test_a_signal_to_the_parent_or_to_a_rank_saves_what_a_resumed_run_goes_on_from(
    number, to_rank, start, tmp_path, capfd
):
    run = start("shardproof", *TRAIN, "--dp", "2")
    run.wait_for("step 2/")
    if to_rank:
        os.kill(ranks_of(run)[1], number)
        assert run.process.wait(60) == 128 + number
    else:
        assert run.end(number) == 128 + number
    (saved,) = saved_in(run.folder / "saved")
    assert run.left() == [] and run.errors.splitlines()[-1] == (
        f"shardproof train: ended by {number.name} after {saved.steps} of 1000000 steps: "
        f"saved in saved/{saved.path.name}; --resume goes on."
    )
    end = ["--tp", "2", "--json", "--set", f"train.steps={saved.steps + 2}"]
    assert losses(run.folder / "saved", capfd, *end, "--resume") == losses(tmp_path / "other", capfd, *end)[-2:]


def test_a_run_that_cannot_save_in_its_budget_is_ended_and_says_so(start):
    run = start("shardproof", *TRAIN, "--dp", "2", "--set", "checkpoint.stop_budget_s=0.001")
    run.wait_for("step 1/")
    assert (run.end(signal.SIGTERM), run.left()) == (143, [])
    assert run.errors.splitlines()[-2:] == [
        "SIGTERM: step and checkpoint were not done within checkpoint.stop_budget_s=0.001, so --resume goes on "
        "from the checkpoint before it, if there is one.",
        "shardproof train: ended by SIGTERM.",
    ]


@pytest.mark.full
def test_what_torchrun_passes_on_saves_too(start, tmp_path, capfd):
    run = start(*TORCHRUN, *TRAIN, "--dp", "2", "--transport", "gloo")
    run.wait_for("step 2/")
    run.end(signal.SIGTERM)
    (saved,) = saved_in(run.folder / "saved")
    assert f"shardproof train: ended by SIGTERM after {saved.steps} of 1000000 steps: saved in saved/" in run.errors
    assert run.left() == []
    end = ["--json", "--set", f"train.steps={saved.steps + 1}"]
    assert losses(run.folder / "saved", capfd, *end, "--resume") == losses(tmp_path / "other", capfd, *end)[-1:]
