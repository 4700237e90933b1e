"""ZeRO-3 plans whose schedule gathers whole stages: prices, waits and memory against closed forms."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from helpers.plans import product_plan
from shardproof.core.commands.options import SearchSpace
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.core.plan.sections import Batch, ScheduleChoice
from shardproof.core.program import stage_elements
from shardproof.core.schedule import lower
from shardproof.core.schedule.action import Kind
from shardproof.simulator.cost.pricing import Pricing
from shardproof.simulator.memory.memory import rank_memories
from shardproof.simulator.search.bounds import lower_bound_s
from shardproof.simulator.search.fit import fit
from shardproof.simulator.search.search import search
from shardproof.simulator.simulation.simulate import simulate
from shardproof.simulator.step.step import Simulation
from shardproof.verify.dynamic.twin import twin
from shardproof.verify.schedule.check import check


def plan(
    *,
    pp: int,
    vpp: int = 1,
    dp: int = 4,
    zero: int = 3,
    active: int | None = None,
    name: str | None = None,
    microbatches: int = 8,
) -> Plan:
    return product_plan(
        model="llama3-70b",
        cluster="dgx-h100",
        samples=microbatches * dp,
        sequence=4096,
        recompute="full",
        schedule=name or ("Interleaved1F1B" if vpp > 1 else "1F1B"),
        max_active_stages=active,
        tp=4,
        pp=pp,
        vpp=vpp,
        dp=dp,
        zero=zero,
    )


def seconds_of(simulation: Simulation, kind: Kind, pp_rank: int) -> float:
    rank = simulation.global_ranks[pp_rank]
    spans = simulation.timeline.spans
    return sum(span.end_s - span.start_s for span in spans if span.global_rank == rank and span.action.kind is kind)


def test_a_plan_has_unshard_only_when_it_asks_for_active_stages() -> None:
    assert not (schedule_for(plan(pp=2)).actions.kind == Kind.UNSHARD).any()
    asked = schedule_for(plan(pp=2, vpp=4, active=2))
    assert (asked.actions.kind == Kind.UNSHARD).any()
    assert check(lower(asked)) == []
    assert simulate(plan(pp=2, vpp=4, active=2)).run.graph.schedule == lower(asked)


@pytest.mark.parametrize("microbatches", [4, 8, 12])
def test_one_stage_per_rank_gathers_once_a_step_instead_of_twice_a_microbatch(microbatches: int) -> None:
    """The gather of the first stage stands open before its first forward, and every F and B is shorter
    by what it had inside."""
    by_stage, by_layer = (simulate(plan(pp=5, active=active, microbatches=microbatches)) for active in (1, None))
    price = Pricing(by_stage.plan, gathers_scheduled=True)
    for stage in range(5):
        gather_s = price.seconds(Kind.UNSHARD, stage).total_s
        assert gather_s > 0
        assert seconds_of(by_stage, Kind.UNSHARD, stage) == pytest.approx(gather_s, rel=1e-12)
        assert seconds_of(by_layer, Kind.UNSHARD, stage) == 0
        assert seconds_of(by_stage, Kind.F, stage) < seconds_of(by_layer, Kind.F, stage)
    first = min((span for span in by_stage.timeline.spans if span.action.kind is Kind.F), key=lambda span: span.start_s)
    assert first.start_s == price.seconds(Kind.UNSHARD, 0).total_s


@pytest.mark.parametrize(
    ("name", "vpp", "active"),
    [
        ("1F1B", 1, 1),
        *(("Interleaved1F1B", vpp, active) for vpp, active in ((2, 1), (4, 1), (4, 2), (4, 3), (5, 3))),
        ("LoopedBFS", 4, 1),
        ("Combined1F1B", 4, 2),
        ("Combined1F1B", 5, 3),
        ("DualPipeV", 2, 2),
    ],
)
def test_no_stage_computes_before_its_gather_ends_nor_after_it_is_freed(name: str, vpp: int, active: int) -> None:
    simulation = simulate(plan(pp=2, vpp=vpp, active=active, name=name))
    rank = simulation.global_ranks[1]
    spans = [span for span in simulation.timeline.spans if span.global_rank == rank]
    open_since: dict[int, float] = {}
    intervals: list[tuple[int, float, float]] = []
    for span in spans:
        if span.action.kind is Kind.UNSHARD:
            open_since[span.action.stage] = span.end_s
        elif span.action.kind is Kind.RESHARD:
            intervals.append((span.action.stage, open_since.pop(span.action.stage), span.start_s))
    assert open_since == {}
    for span in spans:
        for part in span.action.parts:
            if part.kind in (Kind.F, Kind.B, Kind.I, Kind.W):
                assert any(
                    stage == part.stage and lo <= span.start_s and span.end_s <= hi for stage, lo, hi in intervals
                )


@pytest.mark.parametrize("active", [1, 2, 3])
def test_time_by_cause_still_sums_to_the_step_exactly(active: int) -> None:
    report = simulate(plan(pp=2, vpp=4, active=active)).report
    assert sum(report["time_s"].values()) == report["step_time_s"]
    assert report["time_s"]["dp_comm"] > 0


def test_breadth_first_hides_gathers_that_depth_first_pays_at_every_change_of_chunk() -> None:
    """One active stage cannot be prefetched: v=4 chunks, 8 microbatches; breadth-first gathers
    2v-1 = 7 times a step."""
    breadth, depth = (simulate(plan(pp=2, vpp=4, active=1, name=name)) for name in ("LoopedBFS", "Interleaved1F1B"))
    gather_s = Pricing(breadth.plan, gathers_scheduled=True).seconds(Kind.UNSHARD, 3).total_s
    assert seconds_of(breadth, Kind.UNSHARD, 1) == pytest.approx(7 * gather_s, rel=0.2)  # the head's stage is larger
    assert seconds_of(depth, Kind.UNSHARD, 1) > 3 * seconds_of(breadth, Kind.UNSHARD, 1)
    assert breadth.report["step_time_s"] < depth.report["step_time_s"]


def test_a_prefetched_gather_hides_behind_the_stage_before_it() -> None:
    one, two = (simulate(plan(pp=2, vpp=4, active=active, name="LoopedBFS")).report for active in (1, 2))
    assert two["time_s"]["dp_comm"] < one["time_s"]["dp_comm"]
    assert two["step_time_s"] < one["step_time_s"]


@pytest.mark.parametrize(("vpp", "active"), [(1, 1), (4, 1), (4, 2), (4, 4)])
def test_at_most_so_many_whole_stages_are_there_and_parts_of_them_rest_in_fp32_as_optimizer_state(
    vpp: int, active: int
) -> None:
    chosen = plan(pp=2, vpp=vpp, active=active)
    for memory in rank_memories(chosen, schedule_for(chosen)):
        stages = range(memory.pp_rank, 2 * vpp, 2)
        whole = sorted((2 * stage_elements(chosen, stage) for stage in stages), reverse=True)
        assert memory.weights_bytes == memory.gathered_bytes
        # 12 bytes an element: moments and masters
        assert memory.optimizer_bytes == 6 * sum(-(-size // 4) for size in whole)
        assert whole[-1] * active <= memory.gathered_bytes <= sum(whole[:active])
    assert fit(chosen).report["peak_memory_bytes"] == simulate(chosen).report["peak_memory_bytes"]


def test_gathers_come_and_go_in_the_memory_samples_and_the_peak_is_the_report_s() -> None:
    simulation = simulate(plan(pp=2, vpp=4, active=2))
    for memory, rank in zip(simulation.memory, simulation.global_ranks, strict=True):
        samples = [sample for sample in simulation.memory_samples if sample.global_rank == rank]
        assert all(a.time_s <= b.time_s for a, b in pairwise(samples))
        assert samples[0].num_bytes == samples[-1].num_bytes == memory.static_bytes
        assert max(sample.num_bytes for sample in samples) == memory.peak_bytes


def test_without_data_parallel_copies_nothing_is_cut_and_nothing_gathered() -> None:
    alone = plan(pp=2, vpp=4, dp=1, active=2)
    (memory, *_) = rank_memories(alone, schedule_for(alone))
    (whole, *_) = rank_memories(replace(alone, schedule=ScheduleChoice("Interleaved1F1B")), schedule_for(alone))
    assert memory.gathered_bytes == 0
    assert memory.weights_bytes == whole.weights_bytes
    assert seconds_of(simulate(alone), Kind.UNSHARD, 0) == 0


def test_a_search_with_active_stages_pinned_gathers_by_stage_where_it_tries_zero_3() -> None:
    cluster = replace(cluster_preset("dgx-h100", 6), devices_per_node=6, device_memory_bytes=80e9)
    model = replace(model_preset("llama3-8b"), num_layers=6)
    pinned = {"layout.pp": 3, "layout.zero": 3, "schedule.max_active_stages": 1}
    found = search(SearchSpace(model, cluster, Batch(24, 1, 4096), pinned=pinned))
    assert {best.schedule.max_active_stages for best in found.plans} == {1}
    for best, candidate in zip(found.plans, found.report["candidates"], strict=True):
        simulation = simulate(best)
        assert (simulation.run.graph.schedule.actions.kind == Kind.UNSHARD).any()
        assert simulation.report["step_time_s"] == candidate["step_time_s"]
        assert lower_bound_s(best, Pricing(best, gathers_scheduled=True)) <= candidate["step_time_s"]


def test_the_twin_that_a_dynamic_proof_runs_gathers_as_the_plan_does() -> None:
    small, _ = twin(plan(pp=2, vpp=4, active=2))
    assert small.schedule.max_active_stages == 2 and small.layout.zero == 3
