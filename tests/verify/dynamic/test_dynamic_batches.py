"""Batches that change are proved by few steps: a proof goes through several of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import training_plan
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.batch_sizes import batch_at
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Optimizer
from shardproof.verify.dynamic.each_batch import through_batches
from shardproof.verify.dynamic.proof import prove
from shardproof.verify.dynamic.twin import twin
from shardproof.verify.symbolic.static import prove_static


def tiny(layout: Layout | None = None, *, samples: int = 8, optimizer: Optimizer | None = None, **batch) -> Plan:
    plan = training_plan(
        layout, samples=samples, sequence=16, gradient_token_block=4, optimizer=optimizer or Optimizer()
    )
    return replace(plan, batch=replace(plan.batch, **batch))


def test_two_steps_prove_the_first_and_the_last_batch_of_a_long_ramp_and_a_rate_that_falls():
    rates = Optimizer(schedule="cosine", counted_in="samples", warmup_steps=1, minimum_learning_rate=1e-4)
    proof = prove(tiny(Layout(dp=2), optimizer=rates, rampup=(2, 2, 10**6)), transport="memory", steps=2)
    assert proof.ok and proof.report["bits_different"] == 0 and proof.report["reference"]["ok"]
    assert proof.changes == (
        "batch.rampup -> schedule = '0:2 2:8': so 2 steps run 2 of the 4 batches that training has.",
    )
    assert "The schedule of ranks with 1 microbatches is right, too." in proof.static.text


@pytest.mark.parametrize(
    "batch, steps, sizes",
    [
        ({"rampup": (2, 2, 10**6)}, 3, [2, 4, 8]),
        ({"rampup": (2, 2, 10**6)}, 9, [2, 4, 6, 8, 8, 8, 8, 8, 8]),
        ({"rampup": (2, 2, 10**6)}, 1, [2]),
        ({"schedule": "0:8 1K:2 2K:4 3K:8"}, 3, [2, 4, 8]),
        ({"rampup": (2, 6, 1)}, 2, [2, 8]),
    ],
)
def test_steps_of_a_proof_are_spread_over_the_batches(batch, steps, sizes):
    changed, words = through_batches(tiny(**batch), steps)
    assert [batch_at(changed.batch, step) for step in range(steps)] == sizes
    assert bool(words) == (changed.batch != tiny(**batch).batch)


def test_a_batch_that_stays_is_left_alone():
    plan = tiny()
    assert through_batches(plan, 3) == (plan, [])


def test_the_twin_of_a_large_plan_keeps_its_rates():
    rates = Optimizer(schedule="linear", counted_in="samples", warmup_steps=375_000)
    large = Plan.from_toml(
        '[model]\npreset = "gpt3-175b"\n[cluster]\npreset = "dgx-a100-80g"\nnum_devices = 1024\n'
        "[layout]\ntp = 8\npp = 8\n[batch]\nglobal = 1536\n"
        "rampup = [32, 32, 5859375]\nsequence = 2048\n[train]\nsteps = 100000\n"
    )
    large = replace(large, optimizer=rates)
    small, changes = twin(large)
    assert [small.rates.learning_rate_at(count) for count in (0, 10**5, 10**6, 10**8)] == [
        large.rates.learning_rate_at(count) for count in (0, 10**5, 10**6, 10**8)
    ]
    assert "batch.rampup (32, 32, 5859375) -> None: to fit this host." in changes


def test_the_schedule_of_the_smallest_batch_is_proved_too():
    assert (
        "The schedule of ranks with 2 microbatches is right" in prove_static(tiny(Layout(pp=2), rampup=(2, 2, 12))).text
    )
