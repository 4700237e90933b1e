"""Machines that differ: against runs of every replica by hand, closed forms of simple plans, and the same
plan with other devices."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plans import product_plan
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import as_device
from shardproof.core.machine.variation import Variation
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Runtime
from shardproof.core.plan.sections import DataParallel
from shardproof.core.schedule.action import Kind
from shardproof.simulator.engine.attribution import sorts_of
from shardproof.simulator.engine.replicas import plain_replicas
from shardproof.simulator.memory.capacity import capacity_of
from shardproof.simulator.search.fit import fit
from shardproof.simulator.simulation.simulate import simulate
from shardproof.simulator.variation import variation as variation_module
from shardproof.simulator.variation.columns import columns_of, couplings_of
from shardproof.simulator.variation.variation import sample_steps

COMPUTING = ("compute", "recompute", "optimizer")


def llama(
    layout: Layout, *, microbatches: int = 4, clip: float = 1.0, schedule: str = "1F1B", sequence: int = 2048, **fields
) -> Plan:
    return product_plan(
        layout,
        model="llama3-8b",
        cluster="dgx-h100",
        num_layers=8 * layout.num_stages,
        samples=microbatches * layout.dp,
        sequence=sequence,
        schedule=schedule,
        clip_grad_norm=clip,
        variation=Variation(**fields),
    )


def step_s(plan: Plan) -> float:
    return simulate(plan).report["step_time_s"]


def without(plan: Plan) -> Plan:
    return replace(plan, variation=Variation())


def test_a_plan_without_variation_reports_as_before():
    plan = llama(Layout(tp=2, pp=2, dp=2))
    assert "variation" not in simulate(plan).report and "goodput" not in simulate(plan).report
    saying_nothing_new = replace(plan, variation=Variation(stragglers={"device-3": 1.0}))
    report = simulate(saying_nothing_new).report
    assert report.pop("variation") == {"nominal_step_time_s": report["step_time_s"], "replica": 0, "slowed_by": 1.0}
    assert report.pop("provenance").keys() - {"variation"} == simulate(plan).report["provenance"].keys()
    assert report == {name: value for name, value in simulate(plan).report.items() if name != "provenance"}


def test_one_slow_device_alone_computes_as_much_longer_as_it_is_slow():
    plan = llama(Layout(), stragglers={"device-0": 1.5})
    parts = simulate(without(plan)).report["time_s"]
    assert step_s(plan) - step_s(without(plan)) == pytest.approx(0.5 * sum(parts[name] for name in COMPUTING), rel=1e-9)


@pytest.mark.parametrize("rank", range(4))
def test_whichever_member_of_a_tensor_parallel_group_is_slow_the_group_is(rank):
    layout = Layout(tp=4, pp=2, dp=2)
    assert step_s(llama(layout, stragglers={f"device-{rank}": 1.3})) == step_s(
        llama(layout, stragglers={"device-0-3": 1.3})
    )


def test_the_report_is_that_of_the_slow_replica():
    plan = llama(Layout(tp=2, pp=2, dp=4), stragglers={"device-13": 2.0})  # tp 1, dp 2, pp 1
    simulation = simulate(plan)
    report = simulation.report
    assert simulation.dp_rank == report["variation"]["replica"] == 2
    assert simulation.global_ranks == (4, 12) == simulation.timeline.global_ranks
    assert report["critical_rank"] in (4, 12) and report["bubble_rank"] == 4
    assert sum(report["time_s"].values()) == report["step_time_s"]
    assert report["variation"]["slowed_by"] == report["step_time_s"] / step_s(without(plan))
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def by_hand(plan: Plan) -> float:
    """Every replica's durations scaled one by one, and the plain loops over all of them."""
    simulation = simulate(without(plan))
    graph, layout = simulation.run.graph, plan.layout
    sorts = sorts_of(graph)
    slower = np.ones((layout.dp, layout.pp))
    for name, factor in plan.variation.stragglers.items():
        place = layout.coordinates(int(name.partition("-")[2]))
        slower[place["dp"], place["pp"]] = max(slower[place["dp"], place["pp"]], factor)
    duration_s = np.empty((len(graph.rank), layout.dp))
    for i, number in enumerate(sorts.of_action.tolist()):
        price, pp_rank = simulation.prices[number], sorts.sorts[number].pp_rank
        computing = sum(getattr(price, name) for name in COMPUTING)
        duration_s[i] = price.total_s + computing * (slower[:, pp_rank] - 1)
    group = np.ones(len(Kind), dtype=np.int32)
    group[[Kind.REDUCE_GRAD, Kind.UNSHARD]] = layout.dp
    run = plain_replicas(graph, duration_s, group)
    steps = graph.schedule.actions.kind == Kind.STEP
    return float((run.start_s[steps].max() + duration_s[steps]).max())


@settings(max_examples=12, deadline=None)
@given(
    schedule=st.sampled_from(["1F1B", "GPipe", "ZBH1"]),
    devices=st.lists(st.integers(0, 15), min_size=1, max_size=4, unique=True),
    factor=st.floats(1.0, 3.0),
)
def test_stragglers_are_what_every_replica_run_by_hand_gives(schedule, devices, factor):
    stragglers = {f"device-{rank}": factor + 0.1 * place for place, rank in enumerate(devices)}
    plan = llama(Layout(tp=2, pp=4, dp=2), schedule=schedule, stragglers=stragglers)
    assert step_s(plan) == pytest.approx(by_hand(plan), rel=1e-9)


@settings(max_examples=15, deadline=None)
@given(
    layout=st.sampled_from(
        [Layout(tp=2, pp=2, dp=4), Layout(tp=2, pp=2, dp=4, zero=3), Layout(tp=4, pp=4), Layout(dp=16, zero=1)]
    ),
    slow=st.dictionaries(st.sampled_from(["device-1", "device-9", "node-1"]), st.floats(1.0, 2.0), max_size=2),
    links=st.dictionaries(
        st.sampled_from(["device-3", "card-0-2", "node-1", "leaf-0-1"]), st.floats(0.2, 1.0), max_size=2
    ),
    schedule=st.sampled_from(["1F1B", "GPipe"]),
    profile=st.sampled_from(["shardproof", "megatron-te", "megatron-2021"]),
)
def test_differences_never_help_and_times_still_sum_to_the_step(layout, slow, links, schedule, profile):
    plan = replace(llama(layout, schedule=schedule, stragglers=slow, slow_links=links), runtime=Runtime(profile))
    report, nominal_s = simulate(plan).report, step_s(without(plan))
    assert report["step_time_s"] >= nominal_s * (1 - 1e-11)  # prices are rounded to a grid of 1e-12 s
    assert sum(report["time_s"].values()) == report["step_time_s"]
    assert min(report["time_s"].values()) >= 0


def usable(plan: Plan, device: str) -> int:
    return capacity_of(replace(plan, cluster=as_device(plan.cluster, device))).usable_bytes


def test_devices_that_are_all_of_another_class_are_a_cluster_of_those_devices():
    plan = llama(Layout(tp=4, pp=2, dp=4), device_classes={"dgx-a100-80g": "node-0-3"})
    report = simulate(plan).report
    expected = simulate(replace(without(plan), cluster=as_device(plan.cluster, "dgx-a100-80g"))).report
    assert {**report["time_s"]} == expected["time_s"] and report["step_time_s"] == expected["step_time_s"]
    (reported,) = report["variation"]["device_classes"]
    assert reported["num_devices"] == 32 and reported["peak_memory_bytes"] == report["peak_memory_bytes"]
    assert reported["capacity_bytes"] == expected["capacity_bytes"]


def test_a_stage_on_slower_devices_lies_between_all_fast_and_all_slow_and_says_what_does_not_fit():
    plan = llama(Layout(tp=4, pp=2, dp=4), device_classes={"dgx-a100-40g": "node-2-3"})
    fast_s, slow_s = (
        step_s(without(plan)),
        step_s(replace(without(plan), cluster=as_device(plan.cluster, "dgx-a100-40g"))),
    )
    assert fast_s < step_s(plan) < slow_s
    assert simulate(plan).report["variation"]["device_classes"][0]["capacity_bytes"] == usable(plan, "dgx-a100-40g")


def test_a_plan_fits_when_every_class_of_devices_holds_what_its_stages_need():
    """Stages of more than 40 GB and less than 80: the second lies on nodes 2 and 3."""
    plan = llama(Layout(pp=2, dp=16))
    peaks = [entry["peak_memory_bytes"] for entry in fit(plan).report["per_rank"]]
    assert (
        all(40e9 < peak < 80e9 for peak in peaks)
        and fit(plan).fits
        and fit(plan).report["device_bytes"] == round(79.11 * 2**30)
    )
    report = fit(replace(plan, variation=Variation(device_classes={"dgx-a100-40g": "node-2-3"}))).report
    assert not report["fits"] and report["capacity_bytes"] == usable(plan, "dgx-a100-40g")
    assert report["peak_memory_rank"] == 16 and report["peak_memory_bytes"] == peaks[1]
    assert (
        fit(replace(plan, variation=Variation(device_classes={"dgx-h200": "node-2-3"}))).report["peak_memory_rank"] == 0
    )


def test_a_slow_card_costs_the_gradient_reduction_and_nothing_else():
    plan = llama(Layout(tp=8, dp=4), slow_links={"card-1-5": 0.5})
    slow, whole = simulate(plan).report["time_s"], simulate(without(plan)).report["time_s"]
    assert slow["dp_comm"] == pytest.approx(2 * whole["dp_comm"], rel=0.15)
    assert {name: slow[name] for name in slow if name not in ("dp_comm", "bubble")} == {
        name: whole[name] for name in whole if name not in ("dp_comm", "bubble")
    }


def test_a_slow_device_link_slows_the_tensor_parallel_group_of_that_device_only():
    plan = llama(Layout(tp=8, dp=4), slow_links={"device-20": 0.5})
    simulation = simulate(plan)
    whole = simulate(without(plan)).report["time_s"]["tp_comm"]
    assert simulation.dp_rank == 2 and simulation.report["time_s"]["tp_comm"] > 1.3 * whole


def test_a_failed_card_is_half_a_card_for_two_devices():
    layout = Layout(tp=8, dp=4)
    assert step_s(llama(layout, failed_links="card-1-5")) == step_s(
        llama(layout, slow_links={"card-1-5": 0.5, "card-1-4": 0.5})
    )


def test_the_report_says_where_its_new_numbers_come_from():
    provenance = simulate(llama(Layout(), jitter=0.1, samples=2, device_mtbf_s=1e6, checkpoint_s=1.0)).report[
        "provenance"
    ]
    assert provenance["variation"]["kind"] == provenance["goodput"]["kind"] == "modelled"
    assert "variation" not in simulate(llama(Layout())).report["provenance"]


# what ranks do together


def test_gradients_couple_all_replicas_and_experts_those_of_their_group():
    dense, order = couplings_of(llama(Layout(tp=2, dp=8)))
    assert dense == {Kind.REDUCE_GRAD: 8, Kind.UNSHARD: 8, Kind.STEP: 8} and order.tolist() == list(range(8))
    assert Kind.STEP not in couplings_of(llama(Layout(tp=2, dp=8), clip=0.0))[0]
    assert couplings_of(llama(Layout(tp=2, dp=8, zero=3)))[0][Kind.F] == 8
    hybrid = replace(llama(Layout(tp=2, dp=8, zero=3)), data_parallel=DataParallel(shard=2))
    assert couplings_of(hybrid)[0][Kind.F] == 2
    assert Kind.F not in couplings_of(llama(Layout(tp=2, dp=8, zero=2)))[0]
    assert couplings_of(llama(Layout(tp=2, dp=8, zero=2)))[0][Kind.B] == 8


def mixtral(layout: Layout, **fields) -> Plan:
    return product_plan(
        layout,
        model="mixtral-8x7b",
        cluster="dgx-h100",
        samples=4 * layout.dp,
        sequence=2048,
        variation=Variation(**fields),
    )


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=16, ep=8),
        Layout(tp=2, dp=8, ep=4, etp=1, sequence_parallel=True),
        Layout(tp=4, dp=4, ep=2, pp=2),
        Layout(cp=2, dp=8, ep=4),
        Layout(tp=4, dp=8, ep=4, etp=1, sequence_parallel=True),
        Layout(dp=16, ep=4, order="dp-ep-tp-pp"),
    ],
)
def test_columns_that_share_experts_are_neighbours_and_as_many_as_the_groups_say(layout):
    """Against the groups of the layout, joined where they share a data-parallel rank."""
    plan = mixtral(layout)
    blocks = [{rank} for rank in range(layout.dp)]
    for axes in ("ep", "tp", "tp-ep"):
        for group in layout.expert_groups(axes):
            spanned = {layout.coordinates(rank)["dp"] for rank in group}
            touched = [block for block in blocks if block & spanned]
            blocks = [block for block in blocks if not block & spanned] + [set().union(*touched)]
    couplings, order = couplings_of(plan)
    size = couplings.get(Kind.F, 1)
    assert {frozenset(order[i : i + size].tolist()) for i in range(0, layout.dp, size)} == {
        frozenset(block) for block in blocks
    }


def test_a_straggler_among_experts_holds_up_its_group_in_every_layer():
    """Two ep groups of 8: with the straggler alone in a group of its own the other replicas would not
    wait until the reduction."""
    plan = mixtral(Layout(dp=16, ep=8, pp=2), stragglers={"device-3": 1.5})
    columns = columns_of(plan, sorts_of(simulate(without(plan)).run.graph))
    assert columns.couplings[Kind.F] == 8
    report = simulate(plan).report
    assert sum(report["time_s"].values()) == report["step_time_s"] > step_s(without(plan))


# drawn steps


def test_the_same_seed_draws_the_same_steps_and_more_samples_only_add_some():
    plan = llama(Layout(tp=2, pp=2, dp=2), jitter=0.05, comm_jitter=0.2, device_spread=0.02, samples=6, seed=3)
    six = sample_steps(plan).step_s
    assert np.array_equal(sample_steps(plan).step_s, six)
    assert np.array_equal(sample_steps(replace(plan, variation=plan.variation.with_samples(4))).step_s, six[:4])
    assert not np.array_equal(sample_steps(replace(plan, variation=replace(plan.variation, seed=4))).step_s, six)


def test_loads_of_experts_are_those_of_their_sample_too():
    plan = mixtral(Layout(dp=16, ep=8), expert_imbalance=0.5, samples=5)
    five = sample_steps(plan).step_s
    assert np.array_equal(sample_steps(replace(plan, variation=plan.variation.with_samples(3))).step_s, five[:3])
    assert five.std() > 0


def test_steps_do_not_depend_on_how_many_are_run_at_a_time(monkeypatch):
    plan = llama(Layout(tp=2, pp=2, dp=2), jitter=0.05, hiccups_per_s=1.0, hiccup_s=0.01, samples=7)
    joined = sample_steps(plan).step_s
    monkeypatch.setattr(variation_module, "LARGEST_BLOCK", 1)
    assert np.array_equal(sample_steps(plan).step_s, joined)


def test_jitter_of_one_device_has_the_mean_and_deviation_of_a_sum():
    """One device: the step is a sum, its variance that of the parts, whatever their distribution."""
    plan = llama(Layout(), microbatches=8, jitter=0.2, samples=3000, distribution="lognormal")
    simulation = simulate(without(plan))
    sorts = sorts_of(simulation.run.graph)
    computing = np.array([sum(getattr(price, name) for name in COMPUTING) for price in simulation.prices])[
        sorts.of_action
    ]
    drawn = sample_steps(plan).step_s
    deviation = 0.2 * np.sqrt((computing**2).sum())
    assert drawn.mean() == pytest.approx(simulation.report["step_time_s"], abs=5 * deviation / np.sqrt(3000))
    assert drawn.std() == pytest.approx(deviation, rel=0.06)


def test_replicas_wait_for_the_slowest_of_them():
    """Four replicas of one microbatch: F and B in turn, then a reduction and a step together;
    against numpy's own draws."""
    plan = llama(Layout(dp=4), microbatches=1, jitter=0.1, samples=4000)
    simulation = simulate(without(plan))
    names = {
        sort.kind: price for sort, price in zip(sorts_of(simulation.run.graph).sorts, simulation.prices, strict=True)
    }
    rng, variance = np.random.default_rng(11), np.log1p(0.1**2)

    def drawn(kind: Kind) -> np.ndarray:
        computing = sum(getattr(names[kind], name) for name in COMPUTING)
        noise = np.exp(np.sqrt(variance) * rng.standard_normal((40_000, 4)) - variance / 2)
        return names[kind].total_s + computing * (noise - 1)

    expected = (
        (drawn(Kind.F) + drawn(Kind.B)).max(axis=1) + names[Kind.REDUCE_GRAD].total_s + drawn(Kind.STEP).max(axis=1)
    )
    found = sample_steps(plan).step_s
    assert np.quantile(found, [0.1, 0.5, 0.9]) == pytest.approx(np.quantile(expected, [0.1, 0.5, 0.9]), rel=0.005)
    assert found.mean() > simulation.report["step_time_s"]


def test_jitter_of_a_device_for_a_whole_step_is_not_averaged_away():
    """One device: every action of a step scales equally, so the deviation of the step is that of the device."""
    plan = llama(Layout(), microbatches=8, device_spread=0.1, samples=2000)
    nominal = simulate(without(plan)).report
    computing = sum(nominal["time_s"][name] for name in COMPUTING)
    drawn = sample_steps(plan).step_s
    assert drawn.std() == pytest.approx(0.1 * computing, rel=0.06)
    assert drawn.mean() == pytest.approx(nominal["step_time_s"], rel=0.01)


def test_pauses_lengthen_the_step_of_one_device_by_their_mean():
    """Rate 0.5 a second, each 0.2 s times a Pareto with exponent 5: 0.125 s a second of computing."""
    plan = llama(Layout(), hiccups_per_s=0.5, hiccup_s=0.2, hiccup_shape=5.0, samples=4000)
    nominal_s = step_s(without(plan))
    assert sample_steps(plan).step_s.mean() - nominal_s == pytest.approx(0.125 * nominal_s, rel=0.08)


def test_transfers_that_jitter_leave_a_step_without_them_alone():
    alone = llama(Layout(), comm_jitter=0.5, samples=5)
    assert (sample_steps(alone).step_s == step_s(without(alone))).all()
    assert sample_steps(llama(Layout(dp=4), comm_jitter=0.5, samples=5)).step_s.std() > 0


def test_the_report_has_percentiles_in_order():
    reported = simulate(llama(Layout(tp=2, pp=2, dp=2), jitter=0.05, samples=50, seed=2)).report["variation"]
    drawn = reported["sampled_step_time_s"]
    assert reported["samples"] == 50 and reported["seed"] == 2
    order = [drawn[name] for name in ("min", "p5", "p25", "p50", "p75", "p95", "p99", "max")]
    assert order == sorted(order) and drawn["min"] < drawn["mean"] < drawn["max"]
    assert reported["tokens_per_s"] == pytest.approx(8 * 2048 / drawn["mean"])


@pytest.mark.parametrize("schedule", ["DualPipe", "ZBVZeroBubble", "Interleaved1F1B"])
def test_every_kind_of_schedule_can_be_varied(schedule):
    layout = Layout(tp=2, pp=4, dp=2, vpp=1 if schedule == "DualPipe" else 2)
    plan = llama(
        layout,
        microbatches=8,
        schedule=schedule,
        stragglers={"device-5": 1.4},
        slow_links={"card-0-1": 0.5},
        jitter=0.02,
        samples=3,
    )
    report = simulate(plan).report
    assert report["step_time_s"] > step_s(without(plan))
    assert sum(report["time_s"].values()) == report["step_time_s"]
    assert report["variation"]["sampled_step_time_s"]["min"] > step_s(without(plan))


# experts


def test_expert_imbalance_costs_and_capacity_buys_some_of_it_back_with_dropped_tokens():
    def reported(**fields) -> dict:
        report = simulate(mixtral(Layout(dp=16, ep=8), samples=20, **fields)).report
        return report["variation"]

    even, chance, uneven, capped = (
        reported(jitter=1e-9),
        reported(expert_imbalance=0.0),
        reported(expert_imbalance=0.5),
        reported(expert_imbalance=0.5, expert_capacity=1.1),
    )
    means = [entry["sampled_step_time_s"]["mean"] for entry in (even, chance, capped, uneven)]
    assert means == sorted(means) and means[3] > 1.05 * means[0]
    assert uneven["dropped_tokens_share"] == 0 < capped["dropped_tokens_share"] < 0.5
    assert capped["expert_load"]["max"] <= 1.1 < uneven["expert_load"]["max"]
