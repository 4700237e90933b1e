"""Delayed scaling of fp8: which ranks agree after which pass, on how many bytes, and what that costs a step."""

from __future__ import annotations

from typing import Literal

import pytest

from helpers.plans import product_plan
from shardproof.core.model.model_presets import model_preset
from shardproof.core.schedule.action import Kind
from shardproof.simulator.cost.pricing import Pricing
from shardproof.simulator.stack.delayed_scaling import AmaxRanks, amax_reduction
from shardproof.simulator.stack.profiles import PROFILES

LLAMA = model_preset("llama3.1-8b")


def priced(
    ranks: AmaxRanks | Literal["none"], *, dp: int = 4, dtype="fp8", schedule: str = "1F1B", sequence: int = 8192
) -> Pricing:
    degrees = {"tp": 4, "pp": 2, "dp": dp, "sequence_parallel": True}
    choices = {"profile": "megatron-te", "amax_reduction": ranks, "dtype": dtype, "schedule": schedule}
    return Pricing(
        product_plan(model=LLAMA, cluster="dgx-h100", microbatches=8, sequence=sequence, **degrees, **choices)
    )


def extra_s(pricing: Pricing, kind: Kind) -> float:
    """Seconds of an action beyond those of one without delayed scaling, on a plan that is otherwise the same."""
    layout, schedule = pricing.plan.layout, pricing.plan.schedule.name
    return pricing.seconds(kind, 1).total_s - priced("none", dp=layout.dp, schedule=schedule).seconds(kind, 1).total_s


def test_16_layers_of_4_products_reduce_768_bytes_after_a_forward_and_512_after_a_backward():
    plan = priced("replicas").plan
    forward, backward = (amax_reduction(plan, "replicas", 16, backward=backward) for backward in (False, True))
    assert (forward.group_size, forward.sent_bytes) == (16, 2 * 768 * 15 // 16)
    assert backward.sent_bytes == 2 * 512 * 15 // 16
    assert amax_reduction(plan, "model", 16, backward=False).group_size == 4


def test_ranks_agree_after_forwards_and_backwards_only_and_all_replicas_take_longer():
    for schedule, backward in (("1F1B", Kind.B), ("ZBH1", Kind.I)):
        one, all_of_them = (priced(ranks, schedule=schedule) for ranks in ("model", "replicas"))
        for kind in (Kind.F, backward):
            assert 0 < extra_s(one, kind) < extra_s(all_of_them, kind) < 200e-6
    assert extra_s(priced("replicas", schedule="ZBH1"), Kind.W) == 0
    assert extra_s(priced("replicas"), Kind.STEP) == 0


def test_a_host_that_launches_more_slowly_than_its_device_runs_makes_three_calls_more():
    plain, agreeing = (priced(ranks, sequence=256) for ranks in ("none", "model"))
    plan = plain.plan
    calls_s = 3 * PROFILES["megatron-te"].host_calls * plan.cluster.host_dispatch_s
    for kind in (Kind.F, Kind.B):
        assert plain.seconds(kind, 1).other > 0
        assert agreeing.seconds(kind, 1).other - plain.seconds(kind, 1).other == pytest.approx(calls_s, rel=1e-6)


@pytest.mark.parametrize("kind", [Kind.F, Kind.B])
def test_more_replicas_take_longer_to_agree_and_16_bits_have_nothing_to_agree_on(kind):
    assert extra_s(priced("replicas", dp=64), kind) > extra_s(priced("replicas", dp=4), kind)
    plain, asked = (priced(ranks, dtype="bf16").seconds(kind, 0) for ranks in ("none", "replicas"))
    assert plain == asked
