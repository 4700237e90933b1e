"""Measured kernels between their sizes, and what our own backend's actions cost when they are made of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import product_plan
from shardproof.core.base.errors import ClusterError
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute, Runtime
from shardproof.core.plan.sections import ScheduleChoice
from shardproof.core.program import Collective, Product, operations
from shardproof.core.schedule.action import Kind
from shardproof.simulator.compute.host_kernels import attention_head_s, host_product_s, kernel_s
from shardproof.simulator.cost.host_blocks import host_step_s, is_host, rate_share
from shardproof.simulator.cost.pricing import Pricing
from shardproof.simulator.network.network import collective_s
from shardproof.simulator.network.topology import spread_of
from shardproof.simulator.simulation.simulate import simulate

SIZES = (16, 64, 256, 1024)
RATE = 50e9
VARIANTS = ("nt", "nn", "tn", "tn_")
NAMES = [
    "add",
    "add_",
    "transpose",
    "row_mean",
    "row_norm",
    "token_sum",
    "layer_norm",
    "layer_norm_backward",
    "gelu",
    "gelu_backward",
    "gelu_tanh",
    "gelu_tanh_backward",
    "silu",
    "silu_backward",
    "exp",
    "cross_entropy",
    "cross_entropy_backward",
    "square_sum",
    "adamw",
    "rotate",
    "rotate_backward",
    "repeat",
    "function",
    "function_backward_16",
    "layer_plain",
    "layer_plain_backward",
    "layer_gated",
    "layer_gated_backward",
]


def curve(kernel_s: float) -> dict[str, float]:
    """Products of 50 GFLOP/s, all other kernels of one duration."""
    products = {f"{v}-{m}-{n}-{k}": 2 * m * n * k / RATE for v in VARIANTS for m in SIZES for n in SIZES for k in SIZES}
    cores = [f"{name}_{d}" for name in ("attention", "attention_backward") for d in (8, 16)]
    return products | {f"{name}-{size}": kernel_s for name in (*NAMES, *cores) for size in (1, 2**60)}


def host(num_devices: int = 1, *, kernel_s: float = 1e-9, **fields) -> object:
    return replace(cluster_preset("this-host", num_devices), kernel_curve=curve(kernel_s), name="measured", **fields)


def plan_of(layout: Layout, cluster, model: str = "tiny-gpt", **fields) -> Plan:
    return product_plan(
        layout, model=model_preset(model), cluster=cluster, samples=8, sequence=64, dtype="fp32", **fields
    )


def test_a_kernel_between_two_sizes_lies_on_the_line_through_them_on_logarithmic_scales():
    cluster = replace(cluster_preset("this-host", 1), kernel_curve={"gelu-100": 1e-5, "gelu-10000": 1e-3})
    assert kernel_s(cluster, "gelu", 1000) == pytest.approx(1e-4)
    assert kernel_s(cluster, "gelu", 10) == 1e-5
    assert kernel_s(cluster, "gelu", 20000) == pytest.approx(2e-3)


def test_a_product_takes_the_rate_between_its_eight_neighbours():
    points = {(m, n, k): (2e9 if k == 64 else 8e9) for m in (16, 64) for n in (16, 64) for k in (64, 256)}
    cluster = replace(
        cluster_preset("this-host", 1),
        kernel_curve={f"nt-{m}-{n}-{k}": 2 * m * n * k / rate for (m, n, k), rate in points.items()},
    )
    assert host_product_s(cluster, "nt", 32, 32, 64) == pytest.approx(2 * 32 * 32 * 64 / 2e9)
    assert host_product_s(cluster, "nt", 20, 60, 128) == pytest.approx(2 * 20 * 60 * 128 / 4e9)
    assert host_product_s(cluster, "nt", 1024, 1024, 1024) == pytest.approx(2 * 1024**3 / 8e9)


def test_a_head_of_a_width_that_was_not_measured_takes_in_proportion_to_the_nearest():
    cluster = replace(cluster_preset("this-host", 1), kernel_curve={"attention_16-64": 1e-5, "attention_64-64": 9e-5})
    assert attention_head_s(cluster, "attention", 16, 64) == 1e-5
    assert attention_head_s(cluster, "attention", 24, 64) == pytest.approx(1.5e-5)
    assert attention_head_s(cluster, "attention", 48, 64) == pytest.approx(9e-5 * 0.75)
    with pytest.raises(ClusterError, match="no 'attention_backward_16'"):
        attention_head_s(cluster, "attention_backward", 16, 64)


def test_what_the_backend_does_not_run_is_priced_from_the_rates_of_the_cluster():
    assert is_host(plan_of(Layout(), host()))
    for changed in (
        plan_of(Layout(), host(), model="tiny-moe"),
        plan_of(Layout(), host(), recompute=Recompute("full")),
        plan_of(Layout(tp=2, sequence_parallel=True), host(2)),
        plan_of(Layout(dp=2, zero=1), host(2)),
    ):
        assert not is_host(changed)
        assert simulate(changed).report["step_time_s"] > 0


def test_unmeasured_kernels_and_grids_with_holes_are_refused_by_name():
    with pytest.raises(ClusterError, match="no 'gelu_tanhh'; did you mean 'gelu_tanh'"):
        kernel_s(host(), "gelu_tanhh", 10)
    holed = {key: seconds for key, seconds in curve(1e-6).items() if key != "nn-64-256-16"}
    with pytest.raises(ClusterError, match="nn-64-256-16 is missing"):
        host_product_s(replace(host(), kernel_curve=holed), "nn", 64, 64, 64)
    with pytest.raises(ClusterError, match="keys such as gelu-4096 or nt-64-64-64"):
        replace(host(), kernel_curve={"nt-64-64": 1.0})


@pytest.mark.parametrize("model", ["tiny-gpt", "tiny-llama"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), Layout(pp=2)], ids=["one", "tp2", "pp2"])
def test_with_free_kernels_an_action_costs_the_products_of_the_program_at_50_gflops(model, layout):
    plan = plan_of(
        layout, host(layout.world_size, kernel_s=1e-15, node_link_latency_s=0.0, node_link_bytes_per_s=1e18), model
    )
    pricing = Pricing(plan)
    for stage in range(layout.pp):
        for kind in (Kind.F, Kind.B, Kind.I, Kind.W):
            found = [
                op
                for op in operations(plan, kind, stage)
                if isinstance(op, Product) and not op.layer.endswith("attention.core")
            ]
            flops = sum(op.flops for op in found)
            assert pricing.seconds(kind, stage).total_s == pytest.approx(flops / RATE, rel=1e-6)


def test_ranks_on_all_cores_take_longer_by_the_share_they_keep_and_a_rank_alone_does_not():
    cluster = host(2, num_cores=2, busy_core_share=0.8)
    one, two = plan_of(Layout(), replace(cluster, num_devices=1)), plan_of(Layout(dp=2), cluster)
    assert (rate_share(one), rate_share(two)) == (1.0, 0.8)
    assert Pricing(two).seconds(Kind.F, 0).total_s == pytest.approx(Pricing(one).seconds(Kind.F, 0).total_s / 0.8)
    assert host_step_s(two, (0,)) == pytest.approx(host_step_s(one, (0,)) / 0.8, rel=0.05)  # half as many losses
    slower = replace(two, cluster=replace(cluster, step_over_kernels=1.25))
    assert rate_share(slower) == pytest.approx(0.8 / 1.25)


def test_four_ranks_on_two_cores_take_twice_as_long_as_on_four():
    def step_s(cores: int) -> float:
        cluster = host(4, num_cores=cores, node_link_latency_s=0.0, node_link_bytes_per_s=1e18)
        return simulate(plan_of(Layout(dp=4), cluster)).report["step_time_s"]

    assert step_s(2) == pytest.approx(2 * step_s(4), rel=1e-3)


def test_a_pipeline_on_fewer_cores_lies_between_a_core_each_and_taking_turns():
    def step_s(cores: int) -> float:
        return simulate(plan_of(Layout(pp=4), host(4, num_cores=cores))).report["step_time_s"]

    assert step_s(4) < step_s(2) < 2 * step_s(4)
    assert step_s(2) < step_s(1) <= 4 * step_s(4)


def test_a_layer_costs_what_the_smallest_does_and_what_its_kernels_take_beyond_their_smallest():
    free = {key: 1e-15 if "-" in key and key.count("-") == 1 else seconds for key, seconds in curve(1e-15).items()}
    given = free | {
        "layer_plain-1": 3e-3,
        "layer_plain_backward-1": 5e-3,
        "layer_norm-1": 1e-3,
        f"layer_norm-{2**60}": 1e-3,
    }
    base, found = (Pricing(plan_of(Layout(), replace(host(), kernel_curve=each))) for each in (free, given))
    more_s = [found.seconds(kind, 0).total_s - base.seconds(kind, 0).total_s for kind in (Kind.F, Kind.B)]
    assert more_s == pytest.approx([4 * 3e-3 + 1e-3, 4 * 5e-3], rel=1e-6)  # four layers, and the head's norm


def test_the_first_weight_gradient_of_a_step_is_a_product_and_the_others_are_added_to_it():
    slow = {key: seconds * (3 if key.startswith("tn-") else 1) for key, seconds in curve(1e-15).items()}
    plan, fast = plan_of(Layout(), replace(host(), kernel_curve=slow)), plan_of(Layout(), host(kernel_s=1e-15))
    more_s = Pricing(plan).seconds(Kind.W, 0).total_s - Pricing(fast).seconds(Kind.W, 0).total_s
    assert more_s == pytest.approx(2 / plan.num_microbatches * Pricing(fast).seconds(Kind.W, 0).total_s, rel=1e-4)


def test_a_message_takes_from_the_work_of_both_its_ends_where_every_core_has_a_rank():
    curves = {f"message_work-2-{size}": 4e-3 for size in (1, 1 << 30)}
    looped = ScheduleChoice("Interleaved1F1B")
    clusters = [host(2, num_cores=cores, collective_curve=curves) for cores in (2, 4)]
    two, four = (plan_of(Layout(pp=2, vpp=2), cluster, schedule=looped) for cluster in clusters)
    more_s = [
        Pricing(two).seconds(Kind.F, stage).total_s - Pricing(four).seconds(Kind.F, stage).total_s for stage in range(4)
    ]
    assert more_s == pytest.approx([2e-3, 4e-3, 4e-3, 2e-3], rel=1e-3)
    crowded = plan_of(Layout(pp=2, dp=2), host(4, num_cores=2, collective_curve=curves))
    alone = plan_of(Layout(pp=2, dp=2), host(4, num_cores=2))
    assert Pricing(crowded).seconds(Kind.F, 0) == Pricing(alone).seconds(Kind.F, 0)


def test_a_collective_of_more_ranks_than_cores_is_measured_and_simulated_taking_turns_once():
    curves = {f"all_reduce-4-{size}": 8e-3 for size in (1, 1 << 30)}
    operation = Collective("", "all_reduce", "dp", 4, 1000)
    clusters = [host(4, num_cores=cores, collective_curve=curves) for cores in (2, 4, 8)]
    found = [collective_s(cluster, spread_of(cluster, range(4)), operation) for cluster in clusters]
    assert found == pytest.approx([4e-3, 8e-3, 8e-3])


def test_other_stacks_do_not_read_the_curves_of_this_backend():
    ours, theirs = plan_of(Layout(), host()), plan_of(Layout(), host(), runtime=Runtime(profile="torchtitan"))
    plain = plan_of(Layout(), replace(host(), kernel_curve={}), runtime=Runtime(profile="torchtitan"))
    assert Pricing(theirs).seconds(Kind.F, 0) == Pricing(plain).seconds(Kind.F, 0) != Pricing(ours).seconds(Kind.F, 0)
