"""`search` against simulating everything."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from shardproof.core.cluster_presets import cluster_preset
from shardproof.core.errors import PlanError
from shardproof.core.layout import Layout
from shardproof.core.model_presets import model_preset
from shardproof.core.options import SearchSpace
from shardproof.core.plan import Batch, Plan, Recompute, ScheduleChoice
from shardproof.core.schedules import schedule_for
from shardproof.simulator.memory import rank_memories
from shardproof.simulator.pricing import Pricing
from shardproof.simulator.search import NUM_RANKED, _memories, lower_bound_s, search
from shardproof.simulator.simulate import simulate

MODEL = replace(model_preset("llama3-8b"), num_layers=6)


def space(devices=6, memory=80e9, **pinned) -> SearchSpace:
    cluster = replace(cluster_preset("dgx-h100", devices), devices_per_node=devices, device_memory_bytes=memory)
    return SearchSpace(MODEL, cluster, Batch(24, 1, 4096), pinned=pinned)


def everything(given: SearchSpace) -> list[tuple[float, Plan]]:
    """Every legal plan that fits, simulated without bounds."""
    found = []
    devices = given.cluster.num_devices
    degrees, modes = (1, 2, 3, 6), ("none", "selective", "full")
    choices = itertools.product(degrees, degrees, degrees, (1, 2, 4, 8, 16), (False, True), range(4), modes)
    for tp, pp, vpp, micro, sequence, zero, mode in choices:
        dp, rest = divmod(devices, tp * pp)
        names = ["Interleaved1F1B"] if vpp > 1 else ["1F1B", "GPipe"] if pp > 1 else ["1F1B"]
        if rest or (pp == 1 and vpp > 1) or (dp == 1 and zero) or (tp == 1 and sequence):
            continue
        for name in names:
            try:
                layout = Layout(tp=tp, pp=pp, vpp=vpp, dp=dp, sequence_parallel=sequence, zero=zero)
                batch = replace(given.batch, micro_size=micro)
                plan = Plan(given.model, given.cluster, layout, batch, recompute=Recompute(mode), schedule=ScheduleChoice(name))
            except PlanError:
                continue
            report = simulate(plan).report
            if report["peak_memory_bytes"] <= given.cluster.device_memory_bytes:
                found.append((report["step_time_s"], plan))
    return sorted(found, key=lambda entry: entry[0])


@pytest.mark.parametrize("memory", [80e9, 24e9])
def test_ranking_is_that_of_simulating_everything(memory):
    given = space(memory=memory)
    result, expected = search(given), everything(given)
    assert len(expected) > 30
    assert [c["step_time_s"] for c in result.report["candidates"]] == [time_s for time_s, _ in expected[:NUM_RANKED]]
    assert result.report["simulated"] < len(expected)
    assert result.report["evaluated"] == len(result.report["candidates"]) + sum(result.report["rejected"].values())


def test_no_run_beats_its_lower_bound_and_memory_needs_few_microbatches():
    layouts = [Layout(tp=2, pp=3), Layout(pp=6), Layout(pp=3, dp=2, zero=1), Layout(pp=2, vpp=3, dp=3), Layout(tp=2, dp=3, zero=3)]
    for layout, mode, size in itertools.product(layouts, ("none", "full"), (6, 24, 96)):
        name = "Interleaved1F1B" if layout.vpp > 1 else "1F1B"
        plan = Plan(MODEL, space().cluster, layout, Batch(size, 1, 4096), recompute=Recompute(mode), schedule=ScheduleChoice(name))
        assert lower_bound_s(plan, Pricing(plan)) <= simulate(plan).report["step_time_s"]
        assert _memories(plan) == rank_memories(plan, schedule_for(plan))


def test_report_has_the_keys_of_the_interface_and_best_plan_round_trips():
    result = search(space())
    assert list(result.report) == ["candidates", "evaluated", "simulated", "rejected", "elapsed_s"]
    best = result.report["candidates"][0]
    assert list(best) == ["layout", "batch", "recompute", "schedule", "step_time_s", "mfu", "peak_memory_bytes"]
    again = Plan.from_toml(result.plans[0].to_toml())
    assert simulate(again).report["step_time_s"] == best["step_time_s"]


def test_pinned_values_are_kept():
    pinned = {"layout.tp": 2, "layout.zero": 1, "batch.micro": 2, "recompute.mode": "full", "layout.sequence_parallel": True}
    result = search(space(**pinned))
    assert result.report["candidates"]
    for candidate in result.report["candidates"]:
        layout = candidate["layout"]
        assert (layout["tp"], layout["zero"], layout["sequence_parallel"]) == (2, 1, True)
        assert (candidate["batch"]["micro"], candidate["recompute"]) == (2, "full")


def test_nothing_fits_into_a_gigabyte_and_the_report_says_why():
    result = search(space(memory=1e9))
    assert result.plans == () and result.report["candidates"] == []
    assert result.report["rejected"]["out-of-memory"] > 50
    assert result.report["simulated"] == 0


def test_a_plan_stands_for_the_space_around_it():
    given = space()
    plan = Plan(given.model, given.cluster, Layout(tp=2, dp=3), given.batch)
    assert search(plan).plans == search(given).plans


def test_a_schedule_file_cannot_be_pinned():
    with pytest.raises(PlanError, match="--schedule NAME"):
        search(space(**{"schedule.file": "x.csv"}))


def test_experts_are_spread_in_every_legal_way_and_the_best_is_that_of_simulating_everything():
    model = replace(model_preset("mixtral-8x7b"), num_layers=2)
    cluster = replace(cluster_preset("dgx-h100", 4), devices_per_node=4)
    pinned = {"layout.pp": 1, "layout.zero": 1, "batch.micro": 1, "recompute.mode": "none"}
    result = search(SearchSpace(model, cluster, Batch(8, 1, 4096), pinned=pinned))
    found = []
    for tp, ep, etp, sequence in itertools.product((1, 2, 4), (1, 2, 4), (None, 1), (False, True)):
        if tp == 1 and (sequence or etp is not None):
            continue
        try:
            layout = Layout(tp=tp, dp=4 // tp, ep=ep, etp=etp, sequence_parallel=sequence, zero=1)
            report = simulate(Plan(model, cluster, layout, Batch(8, 1, 4096))).report
        except PlanError:
            continue
        found += [report["step_time_s"]] if report["peak_memory_bytes"] <= cluster.device_memory_bytes else []
    assert len(found) > 5
    assert [candidate["step_time_s"] for candidate in result.report["candidates"]] == sorted(found)[:NUM_RANKED]
    assert {candidate["layout"]["ep"] for candidate in result.report["candidates"]} > {1, 2}


def test_a_pinned_context_parallelism_and_recomputed_modules_are_kept():
    pinned = {"layout.cp": 2, "layout.pp": 1, "layout.zero": 1, "batch.micro": 1, "recompute.mode": "selective"}
    result = search(space(devices=4, **pinned, **{"recompute.modules": ["core_attn", "mlp"]}))
    assert result.plans
    assert {(plan.layout.cp, plan.recompute.modules) for plan in result.plans} == {(2, ("core_attn", "mlp"))}
