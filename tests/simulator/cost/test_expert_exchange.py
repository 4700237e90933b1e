"""How tokens are exchanged between experts, what of it hides, in which format routers multiply, and what
published recipes switch on."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from helpers.plans import product_plan
from shardproof.benchmarks.published.recipes import recipe_of
from shardproof.benchmarks.published.row import Row
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model_presets import model_preset
from shardproof.core.model.operators import layer_operators
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Runtime
from shardproof.core.plan.sections import Batch, Precision
from shardproof.core.program import Product, Role
from shardproof.core.schedule.action import Kind
from shardproof.simulator.compute.compute import (
    AttentionShape,
    attention_s,
    full_clock_rate,
    product_s,
    sustained_rate,
    throttled_s,
)
from shardproof.simulator.cost.blocks import BlockPricer
from shardproof.simulator.cost.communication import distinct_share
from shardproof.simulator.cost.pricing import Pricing
from shardproof.simulator.cost.traffic import layer_traffic
from shardproof.simulator.stack.profiles import PROFILES

MIXTRAL = model_preset("mixtral-8x7b")
B200 = cluster_preset("dgx-b200", 8)


def forward_and_backward(runtime: Runtime, layout: Layout):
    pricing = Pricing(product_plan(layout, model=MIXTRAL, cluster="dgx-h100", sequence=4096, runtime=runtime))
    return pricing.seconds(Kind.F, 0), pricing.seconds(Kind.B, 0)


@pytest.mark.parametrize(("places", "choices"), [(4, 8), (8, 2), (32, 8)])
def test_distinct_places_are_those_that_100_000_draws_find_within_1_percent(places, choices):
    draw = random.Random(7)
    found = sum(len({draw.randrange(places) for _ in range(choices)}) for _ in range(100_000)) / 100_000
    assert distinct_share(places, choices) * choices == pytest.approx(found, rel=0.01)


def test_a_single_choice_is_always_distinct_and_one_place_is_hit_once():
    assert distinct_share(16, 1) == pytest.approx(1.0)
    assert distinct_share(1, 8) == pytest.approx(1 / 8)


def test_two_copies_of_a_token_cross_to_two_nodes_three_quarters_as_often_once():
    copies, _ = forward_and_backward(Runtime("megatron-te"), Layout(dp=16, ep=8, order="tp-cp-pp-ep-dp"))
    once, _ = forward_and_backward(
        Runtime("megatron-te", dispatch_once=True), Layout(dp=16, ep=8, order="tp-cp-pp-ep-dp")
    )
    assert 0.7 < once.ep_comm / copies.ep_comm < 1.0
    assert once.compute == copies.compute


def test_experts_cut_over_tensor_parallel_ranks_sort_what_these_have_gathered():
    layouts = (Layout(tp=4, dp=2, etp=etp, ep=2, sequence_parallel=True) for etp in (1, 4))
    plans = (Plan(MIXTRAL, B200, layout, Batch(2, 1, 4096), runtime=Runtime("megatron-te")) for layout in layouts)
    whole, cut = (layer_traffic(plan, PROFILES["megatron-te"], layer_operators(plan.model, 0))["moe"] for plan in plans)
    copies = 4096 / 4 * 4096 * 2 * 2  # tokens of a rank, hidden, bytes, experts a token
    assert cut.forward_bytes - whole.forward_bytes == 4 * copies * (4 - 1)
    assert cut.backward_bytes - whole.backward_bytes == 4 * copies * (4 - 1)


def test_exchanges_during_another_microbatch_leave_what_slows_it_down_and_nothing_else_changes():
    plain = forward_and_backward(Runtime("megatron-te"), Layout(dp=8, ep=8))
    meanwhile = forward_and_backward(Runtime("megatron-te", ep_comm_overlap=True), Layout(dp=8, ep=8))
    for before, after in zip(plain, meanwhile, strict=True):
        assert 0 < after.ep_comm < 0.5 * before.ep_comm
        assert after.compute == before.compute
    shares = [after.ep_comm / before.ep_comm for before, after in zip(plain, meanwhile, strict=True)]
    assert shares[0] == pytest.approx(shares[1], rel=1e-3)


@pytest.mark.parametrize(
    ("stack", "dtype", "expected"),
    [("shardproof", "bf16", "fp32"), ("megatron-te", "bf16", "bf16"), ("megatron-te", "fp8", "bf16")],
)
def test_megatron_multiplies_router_scores_in_16_bits_and_our_own_backend_in_fp32(stack, dtype, expected):
    plan = Plan(
        MIXTRAL, B200, Layout(dp=8, ep=8), Batch(8, 1, 4096), runtime=Runtime(stack), precision=Precision(dtype)
    )
    pricer = BlockPricer(plan, PROFILES[stack], lambda collective: 0.0)
    assert pricer._dtype(Product("layers.0.mlp.router", 4096, 8, 4096, dtype="fp32"), Role.ROUTER) == expected


def test_power_takes_the_same_seconds_per_flop_from_every_kernel():
    cold = replace(B200, sustained_share=1.0, sustained_share_by_dtype={})
    shape = AttentionShape(1, 64, 8, 8192, 8192, 128, 128)
    for product in (Product("", 8192, 8192, 8192), Product("", 4096, 1280, 8192)):
        lost_s = product_s(B200, "bf16", product) - product_s(cold, "bf16", product)
        assert lost_s == pytest.approx(throttled_s(B200, "bf16", product.flops))
    lost_s = attention_s(B200, "bf16", shape) - attention_s(cold, "bf16", shape)
    assert lost_s == pytest.approx(throttled_s(B200, "bf16", shape.flops(backward=False)))


def test_power_brings_an_endless_product_to_the_sustained_rate():
    flops = 1e18
    assert flops / (flops / full_clock_rate(B200, "bf16") + throttled_s(B200, "bf16", flops)) == pytest.approx(
        sustained_rate(B200, "bf16")
    )


def bridge(release: str, model: str, gpu: str, precision: str) -> Row:
    family = f"mbridge_{release} NeMo Container_{model}"
    source = {"source": "Megatron-Bridge perf summary", "family": family, "precision": precision}
    return Row({**source, "model": {"name": model}, "hardware": {"gpu": gpu}})


@pytest.mark.parametrize(
    ("release", "model", "gpu", "precision", "runtime", "modules"),
    [
        ("25.09", "DeepSeekV3 (tokendrop)", "DGX-B200", "fp8-cs", {}, ("mla_up_proj",)),
        (
            "25.11",
            "DeepSeekV3 (w/o MTP)",
            "DGX-GB300",
            "bf16",
            {"dispatch_once": True, "cuda_graphs": True},
            ("moe_act",),
        ),
        ("26.04", "DeepSeekV3", "DGX-B200", "mxfp8", {"dispatch_once": True}, ("mla_up_proj",)),
        (
            "26.06",
            "Qwen3_30B_a3B",
            "DGX-B300",
            "mxfp8",
            {"dispatch_once": True, "ep_comm_overlap": True, "cuda_graphs": True},
            (),
        ),
        ("26.02.01", "LLAMA3_70B", "H100-80GB SXM (DGX-H100)", "fp8", {"tp_comm_overlap": True}, ()),
    ],
)
def test_a_recipe_follows_release_model_device_and_precision(release, model, gpu, precision, runtime, modules):
    found = recipe_of(bridge(release, model, gpu, precision))
    assert dict(found.runtime) == runtime and found.modules == modules


@pytest.mark.parametrize(
    ("model", "overlaps"), [("Mixtral-8x22B", True), ("Mixtral-8x22B-G8T8", True), ("Qwen2-57B-A14B", None)]
)
def test_folding_rows_overlap_tensor_parallelism_where_the_authors_configuration_of_the_model_does(model, overlaps):
    found = recipe_of(
        Row({"source": "MoE Parallel Folding (2504.14960)", "family": "folding_t3", "model": {"name": model}})
    )
    assert found.runtime.get("tp_comm_overlap") is overlaps


def test_rows_of_other_sources_have_no_recipe():
    assert recipe_of(Row({"source": "SC21 Narayanan", "family": "sc21_t1"})).runtime == {}
