"""Products that a stack runs one by one, and what recomputation by operations repeats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import product_plan
from shardproof.core.layout.layout import Layout
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.core.program import Collective, Product, Role, group_ops, layer_ops
from shardproof.core.schedule.action import Kind
from shardproof.simulator.cost.communication import Place
from shardproof.simulator.cost.flops import step_flops
from shardproof.simulator.cost.pricing import Pricing
from shardproof.simulator.memory.sizes import layer_activation_bytes
from shardproof.simulator.stack.projections import second_products, separate, sum_bytes

LLAMA = model_preset("llama3-8b")


def plan(
    recompute: Recompute | None = None, layout: Layout | None = None, model=LLAMA, profile: str = "torchtitan"
) -> Plan:
    return product_plan(
        layout,
        model=model,
        cluster="dgx-h100",
        samples=1,
        sequence=8192,
        recompute=recompute,
        profile=profile,
        compile=True,
    )


def test_queries_keys_and_values_are_three_products_gate_and_up_are_two():
    qkv, up = Product("layers.0.attention.qkv", 8192, 6144, 4096), Product("layers.0.mlp.up", 8192, 28672, 4096)
    assert [product.n for product in separate(LLAMA, Role.QKV, qkv, "forward")] == [4096, 1024, 1024]
    assert [product.n for product in separate(LLAMA, Role.UP, up, "forward")] == [14336, 14336]
    assert [product.k for product in separate(LLAMA, Role.UP, replace(up, n=4096, k=28672), "input")] == [14336, 14336]
    assert sum(product.flops for product in separate(LLAMA, Role.QKV, qkv, "forward")) == qkv.flops
    assert separate(LLAMA, Role.DOWN, up, "forward") == (up,)


def test_gradients_of_one_input_are_added_in_the_next_kernel_unless_ranks_reduce_them_or_nothing_is_compiled():
    product = Product("layers.0.attention.qkv", 10, 20, 30)
    sums = [
        sum_bytes(product, 3, compiled=compiled, reduced=reduced)
        for compiled, reduced in ((True, False), (True, True), (False, True))
    ]
    assert sums == [2 * 2 * 200, 2 * 4 * 200, 2 * 6 * 200]
    assert sum_bytes(product, 1, compiled=False, reduced=True) == 0


def test_by_operations_keys_output_and_up_are_repeated_and_nothing_else():
    (layers,) = [group for group in Pricing(plan())._groups[0] if group.kind == "layer"]
    again = second_products(LLAMA, group_ops(plan(), layers))
    repeated = {role: [op.n for op in found if isinstance(op, Product)] for role, found in again}
    assert repeated == {Role.QKV: [1024], Role.ATTENTION_OUTPUT: [4096], Role.UP: [14336]}


def test_flops_of_the_step_count_what_is_repeated():
    chosen = plan(Recompute("selective", modules=("norm",)))
    again = second_products(LLAMA, layer_ops(chosen, 0))
    repeated = sum(op.flops for _, found in again for op in found if isinstance(op, Product))
    flops = step_flops(chosen)
    assert flops.hardware - flops.model == LLAMA.num_layers * repeated


def test_tokens_of_tensor_parallel_ranks_are_gathered_again_but_sums_are_kept():
    cut = plan(layout=Layout(tp=8, sequence_parallel=True))
    again = second_products(LLAMA, layer_ops(cut, 0))
    collectives = [op.op for _, found in again for op in found if isinstance(op, Collective)]
    assert collectives == ["all_gather", "all_gather"]


def seconds(recompute: Recompute | None = None, **more) -> float:
    pricing = Pricing(plan(recompute, **more))
    return pricing._block(
        next(group for group in pricing._groups[0] if group.kind == "layer"), Place(0, 0)
    ).backward.seconds.total_s


def test_recomputation_by_operations_costs_more_with_the_attention_core():
    retained, repeated = (Recompute("selective", modules=modules) for modules in (("norm",), ("core_attn",)))
    assert seconds() < seconds(retained) < seconds(repeated) < seconds(Recompute("full"))


def test_repeating_a_layer_stops_before_its_last_product_since_torch_2_1():
    extra = {
        profile: seconds(Recompute("full"), profile=profile) - seconds(profile=profile)
        for profile in ("fsdp", "fsdp-1.13")
    }
    down = 2 * 8192 * 14336 * 4096 / 989e12
    assert extra["fsdp-1.13"] - extra["fsdp"] > down


def test_a_core_that_is_repeated_leaves_its_result():
    retained, repeated = (
        layer_activation_bytes(plan(Recompute("selective", modules=modules))) for modules in (("norm",), ("core_attn",))
    )
    assert retained - repeated == 8192 * (4096 * 2 + 4 * 32)


def test_gathered_tokens_are_kept_for_the_weight_gradient_in_torchtitan_only():
    layout = Layout(tp=8, sequence_parallel=True)
    comm = {}
    for profile in ("torchtitan", "fsdp"):
        pricing = Pricing(plan(layout=layout, profile=profile))
        comm[profile] = pricing.seconds(Kind.B, 0).tp_comm / pricing.seconds(Kind.F, 0).tp_comm
    assert comm["fsdp"] > comm["torchtitan"] == pytest.approx(1.0, rel=0.1)
