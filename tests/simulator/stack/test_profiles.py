"""Profiles: what a stack does by default, and what a plan's own switches change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import product_plan
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Runtime
from shardproof.core.plan.sections import DataParallel, Numerics, Precision, ScheduleChoice
from shardproof.core.plan.stacks import SCALING_STACKS
from shardproof.simulator.compute.compute import AttentionShape, attention_s
from shardproof.simulator.simulation.simulate import simulate
from shardproof.simulator.stack.casts import TORCHAO_CASTS
from shardproof.simulator.stack.profile import FLASH_ATTENTION_1_SHARE, Profile
from shardproof.simulator.stack.profiles import PROFILES, profile_of


def plan(runtime: Runtime, layout: Layout = Layout(tp=8, pp=4), **more) -> Plan:  # noqa: B008 - frozen
    return product_plan(
        layout, model="llama3-70b", cluster="dgx-h100", samples=32, sequence=8192, runtime=runtime, **more
    )


@pytest.mark.parametrize("name", PROFILES)
def test_without_switches_a_plan_runs_as_its_profile(name):
    chosen = profile_of(plan(Runtime(name), Layout(tp=8, pp=4, vpp=2), schedule=ScheduleChoice("Interleaved1F1B")))
    stack = PROFILES[name]
    fused = stack.fused_gradients or stack.fuses_fast_gradients
    assert replace(chosen, memory=stack.memory) == replace(stack, fused_gradients=fused)


def test_our_own_products_add_to_the_sums_of_gradients_in_fast_numerics_only():
    fast, exact = (plan(Runtime(), numerics=Numerics(mode)) for mode in ("fast", "exact"))
    assert profile_of(fast).fused_gradients and not profile_of(exact).fused_gradients
    assert not profile_of(plan(Runtime("torchtitan"))).fused_gradients


def test_megatron_overlaps_messages_with_interleaving_only():
    assert profile_of(plan(Runtime("megatron-te"))).send_rule == "blocking"
    interleaved = plan(Runtime("megatron-te"), Layout(tp=8, pp=4, vpp=2), schedule=ScheduleChoice("Interleaved1F1B"))
    assert profile_of(interleaved).send_rule == "rendezvous"
    assert profile_of(plan(Runtime("megatron-te", p2p_overlap=True))).send_rule == "rendezvous"


@pytest.mark.parametrize(
    ("name", "asked", "overlap"),
    [
        ("megatron-2021", None, "none"),
        ("megatron-2021", True, "backward"),
        ("megatron-te", None, "backward"),
        ("megatron-te", True, "all"),
        ("megatron-te", False, "backward"),
        ("torchtitan", True, "forward"),
        ("xla", True, "all"),
        ("shardproof", True, "backward"),
        ("shardproof", None, "none"),
    ],
)
def test_tensor_parallel_overlap_is_what_the_stack_can_do_of_what_is_asked(name, asked, overlap):
    assert profile_of(plan(Runtime(name, tp_comm_overlap=asked))).tensor_overlap == overlap


def test_switches_of_the_plan_win():
    chosen = profile_of(
        plan(
            Runtime("megatron-te", attention="unfused", compile=False, cuda_graphs=True),
            data_parallel=DataParallel(overlap_grad_reduce=False, bucket_bytes=4_000_000, check_gradients=False),
            precision=Precision("bf16", "bf16"),
        )
    )
    assert (chosen.fused_attention, chosen.fused_elementwise, chosen.cuda_graphs, chosen.overlap_grad_reduce) == (
        False,
        False,
        True,
        False,
    )
    assert PROFILES["megatron-te"].check_gradients and not chosen.check_gradients
    assert chosen.overlap_param_gather and chosen.bucket_of(copies=512) == 1e6 and chosen.gradient_bytes("bf16") == 2


def test_buckets_grow_with_the_copies_in_megatron_from_40_on():
    megatron = PROFILES["megatron-te"]
    assert [megatron.bucket_of(copies) for copies in (1, 40, 41, 512)] == [40e6, 40e6, 41e6, 512e6]


def test_flash_attention_by_generation_is_slower_on_hopper_and_the_second_is_native_on_ampere():
    kernels = {name: replace(Profile("x"), attention_kernel=name) for name in ("best", "flash-2", "flash-1")}
    hopper, ampere = cluster_preset("dgx-h100", 8), cluster_preset("dgx-a100-80g", 8)
    assert [kernels[name].attention_share(ampere) for name in kernels] == [1.0, 1.0, FLASH_ATTENTION_1_SHARE]
    best, second, first = (kernels[name].attention_share(hopper) for name in kernels)
    assert best == 1.0 and second == 0.62 and first == second * FLASH_ATTENTION_1_SHARE
    assert profile_of(plan(Runtime("shardproof", attention="flash-1"))).attention_kernel == "flash-1"


@pytest.mark.parametrize("name", ["megatron-2021", "megatron-deepspeed", "megatron-te"])
@pytest.mark.parametrize(("dtype", "expected"), [("fp32", 4), ("bf16", 4), ("fp16", 2)])
def test_megatron_and_deepspeed_reduce_gradients_of_bf16_in_fp32(name, dtype, expected):
    assert PROFILES[name].gradient_bytes(dtype) == expected


@pytest.mark.parametrize(("backward", "measured"), [(False, 0.358), (True, 0.243)])
def test_attention_in_triton_reaches_the_shares_of_an_a100_that_triton_publishes(backward, measured):
    ampere = replace(cluster_preset("dgx-a100-80g", 8), sustained_share=1.0)
    share = replace(Profile("x"), attention_kernel="triton").attention_share(ampere, backward=backward)
    shape = AttentionShape(batch=4, heads=48, kv_heads=48, queries=4096, keys=4096, qk_head_dim=64, v_head_dim=64)
    seconds = attention_s(ampere, "bf16", shape, backward=backward, share=share)
    assert shape.flops(backward=backward) / seconds / ampere.peak_flops_per_s["bf16"] == pytest.approx(
        measured, rel=0.02
    )


def test_flash_attention_2_runs_kernels_of_ampere_on_blackwell():
    kernel = replace(Profile("x"), attention_kernel="flash-2")
    hopper, blackwell = (cluster_preset(name, 8) for name in ("dgx-h100", "dgx-b200"))
    assert kernel.attention_share(blackwell) == 0.31 == kernel.attention_share(hopper) / 2


def test_fsdp_packs_gradients_in_8_bytes_a_parameter_and_10_more_for_fp32():
    assert PROFILES["fsdp"].reduce_copies("bf16") == 18
    assert replace(PROFILES["fsdp"], gradient_dtype="bf16").reduce_copies("bf16") == 8
    assert PROFILES["torchtitan"].reduce_copies("bf16") == 6 and PROFILES["shardproof"].reduce_copies("bf16") == 0


def test_deepspeed_prepares_gradients_in_41_percent_more_traffic_than_megatrons_optimizer_takes():
    # What fused_optimizer.py and engine.py of DeepSpeed v0.6.0 read and write, in bytes a parameter.
    check, cast_and_flatten, norm, unscale, adam, weights = 2 + 4 + 4, 2 + 4 + 4 + 4, 4, 8, 28, 4 + 2
    bucket = 3 * (2 + 2)
    whole = check + cast_and_flatten + norm + unscale + adam + weights + bucket
    took = {
        name: simulate(plan(Runtime(name), precision=Precision("fp16"))).report["time_s"]["optimizer"]
        for name in ("megatron-2022", "megatron-deepspeed-2023")
    }
    assert took["megatron-deepspeed-2023"] / took["megatron-2022"] == pytest.approx(whole / 58, rel=0.01)


def test_megatron_of_2021_drops_elements_unless_the_plan_says_not_and_others_when_it_says_so():
    for name, asked, drops in (
        ("megatron-2021", None, True),
        ("megatron-2021", False, False),
        ("fsdp", None, False),
        ("fsdp", True, True),
    ):
        assert profile_of(plan(Runtime(name, dropout=asked))).dropout == drops


def test_scalings_are_modelled_where_the_library_offers_them():
    assert set(SCALING_STACKS) == {name for name, stack in PROFILES.items() if stack.casts in TORCHAO_CASTS.values()}
