"""What is not yet proved in use: a run names it, and what is new has to be allowed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import training_plan
from shardproof import Layout, Trainer
from shardproof.backend.monitoring.experimental import USED, experimental_lines
from shardproof.backend.monitoring.header import header_lines
from shardproof.backend.monitoring.shown import Shown
from shardproof.core.base.errors import PlanError
from shardproof.core.commands.cli import main
from shardproof.core.plan.experimental import FEATURES, Experimental
from shardproof.core.plan.plan import Plan

FP16 = training_plan(dtype="fp16", mode="fast", samples=4, sequence=16)
OPTIONS = ["--model", "tiny-gpt", "--dtype", "fp16", "--global-batch", "4", "--sequence", "16", "--devices", "1"]


def test_every_feature_is_recognised_and_an_ordinary_run_has_none():
    assert set(USED) == set(FEATURES)
    assert experimental_lines(training_plan(Layout(tp=2)), "shm") == ()


def test_what_is_not_allowed_is_a_warning_and_what_is_allowed_is_said():
    (line,) = experimental_lines(FP16, "shm")
    assert line.startswith("warning: experimental: training in fp16, whose losses are scaled: proved on processors")
    assert line.endswith('With experimental.allow=["fp16"] this is no warning.')
    (line,) = experimental_lines(replace(FP16, experimental=Experimental(("fp16",))), "shm")
    assert line.startswith("experimental: training in fp16")
    named = " ".join(experimental_lines(FP16, "nccl"))
    assert "NCCL" in named and "energy of GPUs" in named and "our kernels" not in named


def test_the_header_of_a_run_and_a_dry_run_say_it(capfd):
    shown = Shown(None, "lines", None, Trainer(FP16).experimental)
    assert [line for line in header_lines(shown, None) if line.startswith("warning: experimental: training in fp16")]
    assert main(["train", *OPTIONS, "--dry-run", "--set", 'experimental.allow=["fp16"]']) == 0
    error = capfd.readouterr().err
    assert "experimental: training in fp16" in error and "warning" not in error


def test_what_is_newer_than_the_section_is_refused_until_it_is_allowed():
    newer = {"fp16": replace(USED["fp16"], must_be_allowed=True)}
    with pytest.raises(PlanError, match=r'experimental\.allow=\["fp16"\], or do without'):
        experimental_lines(FP16, "shm", newer)
    allowed = replace(FP16, experimental=Experimental(("fp16",)))
    assert len(experimental_lines(allowed, "shm", newer)) == 1
    assert experimental_lines(training_plan(), "shm", newer) == ()


def test_unknown_names_are_errors_and_plans_keep_what_they_allow():
    with pytest.raises(PlanError, match="did you mean 'kernels'"):
        Experimental(("kernel",))
    plan = replace(FP16, experimental=Experimental(("kernels", "fp16")))
    assert Plan.from_toml(plan.to_toml()) == plan
    assert Trainer(plan).experimental == experimental_lines(plan, "shm")
