"""Casts to fp8: bytes by library and reach of a scale, against torchao's own measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import product_plan
from shardproof.benchmarks.published.machines import POWER_EXPONENT
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.program import Product, Role
from shardproof.core.schedule.action import Kind
from shardproof.simulator.compute.compute import elementwise_s, product_s
from shardproof.simulator.cost.pricing import Pricing
from shardproof.simulator.simulation.simulate import simulate
from shardproof.simulator.stack.casts import TORCHAO_CASTS, TRANSFORMER_ENGINE_CASTS, cast_bytes
from shardproof.simulator.stack.profiles import PROFILES

LIMITED = (500 / 700) ** POWER_EXPONENT
HOPPER = cluster_preset("dgx-h100", 8)
HOPPER_500_W = replace(
    HOPPER,
    device_memory_bytes=96e9,
    device_memory_bytes_per_s=2.4e12,
    sustained_share=HOPPER.sustained_share * LIMITED,
    sustained_share_by_dtype={"fp8": HOPPER.sustained_share_by_dtype["fp8"] * LIMITED},
)
"""The H100 of torchao's measurements (torchao/testing/float8/roofline_utils.py: 2.4 TB/s;
torchtitan, benchmarks: 500 W)."""


def linear_s(m: int, k: int, n: int, scaling: str | None) -> float:
    """Norm, linear layer and sigmoid of torchao's benchmark, forward and backward."""
    products = {"forward": (m, n, k), "input": (m, k, n), "weight": (n, k, m)}
    seconds = elementwise_s(HOPPER_500_W, 10 * m * k + 10 * m * n, 5)
    for of, sizes in products.items():
        product = Product("mlp.down", *sizes)
        seconds += product_s(HOPPER_500_W, "fp8" if scaling else "bf16", product)
        if scaling:
            seconds += elementwise_s(
                HOPPER_500_W, cast_bytes(TORCHAO_CASTS[scaling], Role.DOWN, product, of=of, cut=1), 1
            )
    return seconds


MEASURED_BY_ROW = {
    (8192, 4096, 4096): 1.00,
    (8192, 8192, 16384): 1.31,
    (16384, 4096, 1024): 0.57,
    (16384, 8192, 4096): 1.08,
    (16384, 16384, 32768): 1.55,
    (32768, 4096, 8192): 1.28,
    (32768, 8192, 1024): 0.63,
    (32768, 32768, 16384): 1.70,
}
"""Speed-up over bf16 by tokens, inputs and outputs: docs/static/fp8-rowwise-perf.png of torchao at 6243040."""


@pytest.mark.parametrize(("sizes", "measured"), MEASURED_BY_ROW.items())
def test_scales_by_row_speed_a_layer_up_as_torchao_measured_within_15_percent(sizes, measured):
    assert linear_s(*sizes, None) / linear_s(*sizes, "row") == pytest.approx(measured, rel=0.15)


def llama(scaling: str | None, dtype: str = "fp8", layout: Layout | None = None) -> Plan:
    """Llama 3 8B of 8,192 tokens on 8 devices of torchao's, compiled, with recomputation by operations."""
    return product_plan(
        layout or Layout(dp=8, zero=3),
        model="llama3-8b",
        cluster=HOPPER_500_W,
        samples=8,
        sequence=8192,
        dtype=dtype,
        scaling=scaling,
        recompute="selective",
        modules=("norm",),
        profile="torchtitan",
        compile=True,
    )


@pytest.mark.parametrize(
    ("dtype", "scaling", "tokens_per_s"), [("bf16", None, 6150), ("fp8", "tensor", 7689.5), ("fp8", "row", 6768)]
)
def test_llama_8b_trains_as_fast_as_torchao_says_within_3_percent(dtype, scaling, tokens_per_s):
    plan = llama(scaling, dtype)
    assert 8192 / simulate(plan).period_s == pytest.approx(tokens_per_s, rel=0.03)


def test_torchtitan_scales_by_tensor_unless_asked():
    assert Pricing(llama(None)).profile == Pricing(llama("tensor")).profile
    assert Pricing(llama("row")).profile.casts == TORCHAO_CASTS["row"]
    assert PROFILES["megatron-te"].casts == PROFILES["xla"].casts == TRANSFORMER_ENGINE_CASTS


def test_transformer_engine_casts_in_the_norm_and_both_ways_at_once():
    up, down = Product("mlp.up", 10, 20, 30), Product("mlp.down", 10, 20, 30)
    assert cast_bytes(TRANSFORMER_ENGINE_CASTS, Role.UP, up, of="forward", cut=1) == 0
    assert cast_bytes(TRANSFORMER_ENGINE_CASTS, Role.DOWN, down, of="forward", cut=1) == 4 * 10 * 30
    assert cast_bytes(TRANSFORMER_ENGINE_CASTS, Role.DOWN, down, of="weight", cut=1) == 0
    assert TRANSFORMER_ENGINE_CASTS.once_a_step


def test_tensor_parallel_ranks_cast_their_own_tokens_before_they_gather():
    casts, up = TORCHAO_CASTS["tensor"], Product("mlp.up", 64, 16, 32)
    assert cast_bytes(casts, Role.UP, up, of="forward", cut=1) == 3 * 64 * 32
    assert cast_bytes(casts, Role.UP, up, of="forward", cut=8) == 3 * 64 * 32 / 8
    assert cast_bytes(TORCHAO_CASTS["row"], Role.UP, up, of="forward", cut=8) == 3 * 64 * 32 + 3 * 32 * 16


def test_tokens_are_gathered_in_8_bits_with_a_scale_per_tensor_only():
    layout = Layout(tp=8, sequence_parallel=True)
    plans = [llama(scaling, dtype, layout) for scaling, dtype in ((None, "bf16"), ("tensor", "fp8"), ("row", "fp8"))]
    wide, narrow, by_row = (Pricing(plan).seconds(Kind.F, 0).tp_comm for plan in plans)
    assert narrow < 0.8 * wide and by_row == pytest.approx(wide)
