"""What a step costs once while the device stands still: checks of buckets, loops over tensors, and
tables that come last."""

from __future__ import annotations

from functools import partial

import pytest

from helpers.plans import product_plan
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.schedule.action import Kind
from shardproof.simulator.cost.once_a_step import (
    CHECK_CALLS,
    TENSOR_CALLS,
    TENSOR_CALLS_16_BIT,
    num_buckets,
    tensor_sizes,
)
from shardproof.simulator.cost.pricing import Pricing
from shardproof.simulator.engine.attribution import Sort
from shardproof.simulator.stack.profiles import PROFILES, profile_of

LLAMA = model_preset("llama3-8b")
TENSORS = 32 * 6 + 3
"""Two norms and four products of 32 layers; token table, head and final norm."""


plan = partial(
    product_plan,
    model=LLAMA,
    cluster="dgx-h100",
    samples=8,
    sequence=8192,
    profile="megatron-te",
    cuda_graphs=None,
    amax_reduction="none",
    dp=8,
    zero=1,
)


def waited_s(plan: Plan) -> float:
    return Pricing(plan).seconds(Kind.STEP, 0).other


def test_tensors_of_a_llama_are_six_a_layer_and_three_and_with_fp8_lie_in_two_buffers():
    (sizes,) = tensor_sizes(plan(), 0)
    assert len(sizes) == TENSORS and sum(sizes) == 8_030_261_248
    assert sorted(map(len, tensor_sizes(plan(dtype="fp8"), 0))) == [32 * 2 + 3, 32 * 4]


LAYER = 3
"""Buckets of 40 million parameters in a layer of 8B: both products of the MLP, and those of attention together."""


@pytest.mark.parametrize(
    ("bucket", "overlap", "buckets"),
    [(64, True, TENSORS), (40e6, True, 32 * LAYER + 2), (40e6, False, 1), (9e9, True, 1)],
)
def test_a_bucket_ends_with_the_tensor_that_fills_it_and_without_overlap_there_is_one(bucket, overlap, buckets):
    asked = plan(bucket_bytes=int(4 * bucket), overlap_grad_reduce=overlap)
    assert num_buckets(asked, profile_of(asked), 0) == buckets


def test_each_check_waits_for_its_calls_and_two_launches_of_the_stack():
    few, many = (waited_s(plan(bucket_bytes=size, check_gradients=True)) for size in (4 * 4_000_000_000, 4 * 64))
    unchecked_few, unchecked_many = (
        waited_s(plan(bucket_bytes=size, check_gradients=False)) for size in (4 * 4_000_000_000, 4 * 64)
    )
    calls = CHECK_CALLS + 2 * PROFILES["megatron-te"].host_calls
    more_s = (many - unchecked_many) - (few - unchecked_few)
    assert more_s == pytest.approx((TENSORS - 2) * calls * plan().cluster.host_dispatch_s, rel=1e-6)


def test_graphs_wait_for_no_check():
    replayed = plan(cuda_graphs=True)
    assert waited_s(replayed) == waited_s(plan(check_gradients=False))


@pytest.mark.parametrize(("dtype", "calls"), [("bf16", TENSOR_CALLS_16_BIT), ("fp8", TENSOR_CALLS["fp8"])])
def test_the_optimizer_goes_tensor_by_tensor(dtype, calls):
    one = plan(dtype=dtype, check_gradients=False, bucket_bytes=4 * 64)
    assert waited_s(one) == pytest.approx(TENSORS * calls * one.cluster.host_dispatch_s, rel=1e-6)
    assert waited_s(plan(zero=0, check_gradients=False)) == 0.0  # without ZeRO tensors are copied all at once


def test_with_fp8_weights_tables_are_reduced_last_and_gathered_first():
    sort = Sort(Kind.REDUCE_GRAD, 0, -1, 0)
    wide, narrow = (Pricing(plan(dtype=dtype)) for dtype in ("bf16", "fp8"))
    tables = 2 * 128256 * 4096 / 8_030_261_248
    shares = [each.reduction_overlap(sort)[0] / each.seconds(Kind.B, 0).total_s for each in (wide, narrow)]
    assert shares == [pytest.approx(1 - 1 / (32 * LAYER + 2), abs=1e-6), pytest.approx(1 - tables, abs=1e-6)]
    gathered_s = [each.seconds(Kind.STEP, 0).dp_comm for each in (wide, narrow)]
    assert gathered_s[1] > 1.3 * gathered_s[0]
