"""What others look at runs with, read back: an event file of TensorBoard, and a run of Weights & Biases."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest

from helpers.plans import training_plan
from shardproof import Layout, Trainer
from shardproof.backend.checkpoint.resume import path_of
from shardproof.core.base.errors import MissingExtraError, PlanError
from shardproof.core.base.metrics import read_metrics
from shardproof.core.plan.log import Log
from shardproof.core.plan.train import Checkpoint


def plan_of(tmp_path, **log):
    return training_plan(
        Layout(pp=2),
        samples=4,
        sequence=16,
        steps=4,
        sample_every=4,
        sample_tokens=1,
        checkpoint=Checkpoint(folder=str(tmp_path / "run"), every=2),
        log=Log(timers=1, **log),
    )


@pytest.mark.full  # loads TensorBoard, five seconds of processor time
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the libraries that tensorboard loads
def test_an_event_file_has_the_numbers_of_the_metrics_each_step_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    plan, folder = plan_of(tmp_path, tensorboard=str(tmp_path / "events")), tmp_path / "run"
    Trainer(plan, transport="memory").fit()
    path_of(folder, 4).rename(folder / "lost")
    Trainer(plan, transport="memory", resume=True).fit()  # steps 3 and 4 again
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    rows = read_metrics(folder / "metrics.jsonl")
    for name in ("loss", "grad_norm", "learning_rate", "step_time_s"):
        found = [(each.step, each.value) for each in events.Scalars(name)]
        assert found == [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in rows]
    assert events.Scalars("timers/forward/most")[-1].value == pytest.approx(rows[-1]["timers"]["forward"][2])
    assert events.Scalars("validation_loss")[-1].value == pytest.approx(rows[-1]["validation_loss"])
    (text,) = events.Tensors("sample/text_summary")[-1].tensor_proto.string_val
    assert rows[-1]["sample"]["text"] in text.decode()


def test_a_package_that_is_missing_is_named_before_anything_starts(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else found(name))
    with pytest.raises(MissingExtraError, match=r"shardproof\[tensorboard\]"):
        Trainer(plan_of(tmp_path, tensorboard="events"))


def test_a_folder_of_events_that_is_a_file_is_refused_before_ranks_start(tmp_path):
    (tmp_path / "events").touch()
    with pytest.raises(PlanError, match=r"log\.tensorboard='.*events' is a file\. Give a folder"):
        Trainer(plan_of(tmp_path, tensorboard=str(tmp_path / "events")))


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_wandb_is_named_where_it_is_missing(tmp_path):
    with pytest.raises(MissingExtraError, match="pip install wandb"):
        Trainer(replace(plan_of(tmp_path), log=Log(wandb="tiny")))


@pytest.mark.filterwarnings("ignore")  # of wandb's own
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_a_run_goes_to_wandb_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    Trainer(plan_of(tmp_path, wandb="tiny"), transport="memory").fit()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"grad_norm" in file.read_bytes()
