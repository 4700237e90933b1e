"""Batches that change are proved by few steps: a proof goes through several of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import training_plan
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.batch_sizes import batch_at
from shardproof.core.plan.optimizer import Optimizer
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Offload, Runtime
from shardproof.core.plan.sections import DataParallel, Numerics, Precision
from shardproof.verify.dynamic.each_batch import through_batches
from shardproof.verify.dynamic.proof import prove
from shardproof.verify.dynamic.twin import twin
from shardproof.verify.symbolic.static import prove_static


def tiny(
    layout: Layout | None = None, *, samples: int = 8, optimizer: Optimizer | None = None, options=None, **batch
) -> Plan:
    common = {"samples": samples, "sequence": 16, "gradient_token_block": 4, "optimizer": optimizer or Optimizer()}
    plan = training_plan(layout, **{**common, **(options or {})})
    return replace(plan, batch=replace(plan.batch, **batch))


def test_two_steps_prove_the_first_and_the_last_batch_of_a_long_ramp_and_a_rate_that_falls():
    rates = Optimizer(schedule="cosine", counted_in="samples", warmup_steps=1, minimum_learning_rate=1e-4)
    proof = prove(tiny(Layout(dp=2), optimizer=rates, rampup=(2, 2, 10**6)), transport="memory", steps=2)
    assert proof.ok and proof.report["bits_different"] == 0 and proof.report["reference"]["ok"]
    assert proof.changes == (
        "batch.rampup -> schedule = '0:2 2:8': so 2 steps run 2 of the 4 batches that training has.",
    )
    assert "The schedule of ranks with 1 microbatches is right, too." in proof.static.text


@pytest.mark.full
@pytest.mark.parametrize(
    "layout, options",
    [
        pytest.param(Layout(dp=2, zero=1), {"data_parallel": DataParallel(None, True)}, id="late"),
        pytest.param(
            Layout(pp=2, dp=2, ep=2),
            {"model": "tiny-moe", "schedule": "Combined1F1B", "runtime": Runtime(ep_comm_overlap=True)},
            id="pairs",
        ),
        pytest.param(
            Layout(tp=2, dp=2),
            {"model": "tiny-llama", "runtime": Runtime(trim_padding=True), "padded": True, "ignore_token": 32},
            id="trimmed",
        ),
        pytest.param(
            Layout(dp=2, zero=1),
            {"precision": Precision("bf16"), "offload": Offload(1, 1.0, masters=True)},
            id="offloaded-bf16",
        ),
        pytest.param(Layout(dp=2, zero=2), {"numerics": Numerics("fast")}, id="fast-zero2"),
    ],
)
def test_what_else_a_run_has_goes_with_a_ramp(layout, options):
    proof = prove(tiny(layout, options=options, rampup=(4, 2, 12)), transport="memory", steps=4)
    assert proof.ok and proof.report["bits_different"] == 0


@pytest.mark.full
def test_torchs_own_sharding_goes_with_a_ramp():
    torch_sharded = {"numerics": Numerics("fast"), "data_parallel": DataParallel(library="torch")}
    proof = prove(tiny(Layout(dp=2, zero=3), options=torch_sharded, rampup=(4, 4, 8)), steps=3)
    assert proof.ok and proof.report["fast"]["tensors_outside"] == 0


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
