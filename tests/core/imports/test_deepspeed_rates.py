"""DeepSpeed's scheduler blocks: decays are exact in every step, and what a plan has not is said."""

from __future__ import annotations

import json
import math

import pytest

from shardproof.core.imports.account import Imported, Request
from shardproof.core.imports.given import import_file
from shardproof.core.plan.optimizer import Optimizer
from shardproof.core.plan.rates import Rates
from shardproof.core.plan.sections import Batch
from shardproof.core.plan.train import Train

PEAK, WARMUP, TOTAL = 1e-3, 20, 100


def account(kind: str, **params) -> Imported:
    file = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": PEAK}},
        "scheduler": {"type": kind, "params": params},
    }
    found = import_file(Request(json.dumps(file), "ds.json", 8))
    assert found is not None
    return found


def rates_of(found: Imported) -> Rates:
    given = {key: value.value for key, value in found.values["optimizer"].items() if key != "betas"}
    rate = found.values["train"]["learning_rate"].value
    return Rates.of(Optimizer(**given), Train(learning_rate=rate), Batch(8, 1, 16))


def deepspeed(kind: str, step: int) -> float:
    """`lr_schedules.py`, from its description: the scheduler of step t is at batch t - 1."""
    batch = step - 1
    if batch < 0:
        return 0.0
    if batch < WARMUP:
        return PEAK * batch / WARMUP
    if kind == "WarmupLR":
        return PEAK
    if kind == "WarmupDecayLR":
        return PEAK * max(0.0, (TOTAL - batch) / (TOTAL - WARMUP))
    ratio = (1 + math.cos(math.pi * (batch - WARMUP + 1) / (TOTAL - WARMUP))) / 2
    return PEAK * (0.01 + 0.99 * ratio)


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("WarmupLR", {}),
        ("WarmupDecayLR", {"total_num_steps": TOTAL}),
        ("WarmupCosineLR", {"total_num_steps": TOTAL, "cos_min_ratio": 0.01}),
    ],
)
def test_rates_are_those_of_deepspeed_after_the_warm_up_and_a_step_ahead_at_most_before(kind, own):
    if kind != "WarmupCosineLR":
        own |= {"warmup_max_lr": PEAK, "warmup_min_lr": 0}
    found = account(kind, warmup_num_steps=WARMUP, warmup_type="linear", **own)
    assert not [each for each in found.settings if each.flag.startswith("scheduler") and each.status != "mapped"]
    rates = rates_of(found)
    for step in range(TOTAL + 1):
        theirs, ours = deepspeed(kind, step), rates.learning_rate(step)
        if step > WARMUP:
            assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-18)
        else:
            assert -1e-15 <= ours - theirs <= PEAK / WARMUP + 1e-15
    assert any("a step behind the optimizer" in each for each in found.assumed)


@pytest.mark.parametrize(
    ("kind", "params", "flag", "words"),
    [
        ("WarmupLR", {"warmup_num_steps": 9}, None, ""),
        ("WarmupLR", {"warmup_type": "log"}, "scheduler.params.warmup_type", "not by logarithms"),
        ("OneCycle", {"cycle_min_lr": 0.1}, "scheduler.type", "OneCycle has no like"),
        ("WarmupDecayLR", {"warmup_num_steps": 9}, "scheduler.type", "the decay has no end"),
        ("WarmupDecayLR", {"warmup_num_steps": 9, "total_num_steps": 9}, "scheduler.type", "nothing is left to decay"),
    ],
)
def test_what_a_plan_has_not_is_said(kind, params, flag, words):
    found = account(kind, **params)
    assert not list(found.of_status("refused"))
    said = {each.flag: each.why for each in found.of_status("not-modelled")}
    assert flag is None or words in said[flag]


def test_what_a_trainer_fills_in_is_left_to_it():
    found = account("WarmupLR", warmup_min_lr="auto", warmup_max_lr="auto", warmup_num_steps="auto")
    assert not list(found.of_status("refused"))
    assert not {"schedule", "warmup_steps"} & found.values["optimizer"].keys()
    (kind,) = (each for each in found.settings if each.flag == "scheduler.type")
    assert kind.status == "not-modelled" and "a trainer fills in" in kind.why
