"""`simulate`: the report's promises, utilisation formulas, rank order, and a few published steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.paths import DATA
from helpers.plans import product_plan
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.optimizer import Optimizer
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.core.plan.sections import Batch, Precision, ScheduleChoice
from shardproof.core.schedule import CATALOG, build
from shardproof.core.schedule.action import Kind
from shardproof.simulator.cost.pricing import Pricing
from shardproof.simulator.engine.engine import execute
from shardproof.simulator.search.bounds import lower_bound_s
from shardproof.simulator.simulation.simulate import simulate
from shardproof.simulator.step.step import Simulation, _named_graph, named_schedule

KEYS = [
    "step_time_s",
    "tokens_per_s",
    "model_flops_per_s_per_device",
    "mfu",
    "mfu_causal",
    "hfu",
    "bubble_fraction",
    "bubble_rank",
    "critical_rank",
    "time_s",
    "peak_memory_bytes",
    "peak_memory_rank",
    "peak_memory_action",
    "capacity_bytes",
    "memory_bytes",
    "num_parameters",
    "num_devices",
    "provenance",
]
TIME_KEYS = {
    "compute",
    "recompute",
    "tp_comm",
    "cp_comm",
    "ep_comm",
    "pp_comm",
    "dp_comm",
    "optimizer",
    "bubble",
    "other",
}
PUBLISHED = json.loads((DATA / "korthikanti_2022_table5.json").read_text())["rows"]


def llama(
    layout: Layout, *, cluster="dgx-h100", micro=1, global_size=64, mode="none", schedule="1F1B", dtype="bf16"
) -> Plan:
    return product_plan(
        layout,
        model="llama3-70b",
        cluster=cluster,
        samples=global_size,
        micro=micro,
        sequence=8192,
        dtype=dtype,
        recompute=mode,
        schedule=schedule,
    )


PLANS = {
    "pipeline": llama(Layout(tp=8, pp=8, sequence_parallel=True)),
    "interleaved": llama(Layout(tp=4, pp=5, dp=2, vpp=2), schedule="Interleaved1F1B", mode="full", global_size=30),
    "gpipe": llama(Layout(tp=2, pp=4, dp=3, zero=1), schedule="GPipe", global_size=36, mode="selective"),
    "zero-3": llama(Layout(tp=1, pp=2, dp=8, zero=3), mode="full"),
    "one device": llama(Layout(), global_size=3),
}


@pytest.mark.parametrize("name", PLANS)
def test_report_has_the_keys_of_the_interface_and_is_json(name):
    report = simulate(PLANS[name]).report
    assert list(report) == KEYS
    assert set(report["time_s"]) == TIME_KEYS
    assert set(report["memory_bytes"]) == {"weights", "gradients", "optimizer", "activations", "buffers"}
    assert json.loads(json.dumps(report, allow_nan=False)) == report


@pytest.mark.parametrize("name", PLANS)
def test_time_by_cause_sums_to_the_step_exactly(name):
    report = simulate(PLANS[name]).report
    assert sum(report["time_s"].values()) == report["step_time_s"]
    assert sum(reversed(report["time_s"].values())) == report["step_time_s"]
    assert min(report["time_s"].values()) >= 0


@pytest.mark.parametrize("name", PLANS)
def test_bubble_and_critical_rank_follow_from_the_timeline(name):
    simulation = simulate(PLANS[name])
    timeline, report = simulation.timeline, simulation.report
    idle = {rank: 1 - timeline.busy_s(rank) / timeline.makespan_s for rank in timeline.global_ranks}
    assert report["bubble_fraction"] == pytest.approx(max(idle.values()), abs=1e-12)
    assert report["bubble_rank"] == min(rank for rank in idle if idle[rank] == max(idle.values()))
    ends = {rank: max(s.end_s for s in timeline.spans if s.global_rank == rank) for rank in timeline.global_ranks}
    assert report["critical_rank"] == min(rank for rank in ends if ends[rank] == report["step_time_s"])


def test_same_plan_gives_the_same_bytes_with_and_without_caches():
    first = json.dumps(simulate(PLANS["interleaved"]).report)
    _named_graph.cache_clear()
    named_schedule.cache_clear()
    again = simulate(PLANS["interleaved"])
    assert json.dumps(again.report) == first
    assert again.timeline.to_json() == simulate(PLANS["interleaved"]).timeline.to_json()


def test_spans_name_the_plans_global_ranks():
    simulation = simulate(llama(Layout(tp=8, pp=4, dp=2)))
    assert simulation.timeline.global_ranks == (0, 16, 32, 48)
    other_order = simulate(llama(Layout(tp=8, pp=4, dp=2, order="pp-tp-dp")))
    assert other_order.timeline.global_ranks == (0, 1, 2, 3)


def test_no_rank_steps_before_the_global_norm_is_known():
    clipped = simulate(llama(Layout(tp=8, pp=4))).timeline
    steps = {span.start_s for span in clipped.spans if span.action.kind is Kind.STEP}
    reductions = [span.end_s for span in clipped.spans if span.action.kind is Kind.REDUCE_GRAD]
    assert len(steps) == 1 and steps.pop() >= max(reductions)
    free = simulate(replace(llama(Layout(tp=8, pp=4)), optimizer=Optimizer(clip_grad_norm=0.0))).timeline
    assert len({span.start_s for span in free.spans if span.action.kind is Kind.STEP}) == 4


def test_steps_that_wait_for_no_norm_follow_each_other_rank_by_rank():
    # ZB-H2 with F = I = W = 1 on 4 ranks, 8 microbatches: every rank is busy for 24 in a row, the last from 3 to 27.
    free = replace(llama(Layout(tp=8, pp=4)), schedule=ScheduleChoice("ZBH2"), optimizer=Optimizer(clip_grad_norm=0.0))
    graph = _named_graph("ZBH2", (4, 1, 8, None), "rendezvous", 2)
    run = execute(graph, np.isin(graph.schedule.actions.kind, (Kind.F, Kind.I, Kind.W)).astype(float))
    report = {"step_time_s": float(run.end_s.max())}
    assert Simulation(free, run, (), report, ()).period_s == 24.0
    clipped = replace(free, optimizer=Optimizer(clip_grad_norm=1.0))
    assert Simulation(clipped, run, (), report, ()).period_s == report["step_time_s"] == 27.0


def test_rank_order_decides_who_shares_a_node():
    inside = simulate(llama(Layout(tp=8, dp=4))).report["time_s"]
    across = simulate(llama(Layout(tp=8, dp=4, order="dp-tp-pp"))).report["time_s"]
    # four nodes of eight: with dp innermost a tp group has two members on each of four nodes
    assert across["tp_comm"] > 3 * inside["tp_comm"]
    assert across["compute"] == inside["compute"]


def test_sequence_parallelism_moves_as_many_bytes_and_less_elementwise_work():
    plain = simulate(llama(Layout(tp=8, pp=2), mode="none")).report
    cut = simulate(llama(Layout(tp=8, pp=2, sequence_parallel=True), mode="none")).report
    assert cut["time_s"]["compute"] < plain["time_s"]["compute"]
    assert cut["memory_bytes"]["activations"] < plain["memory_bytes"]["activations"]


def test_recompute_costs_time_in_its_own_column():
    none, selective, full = (
        simulate(llama(Layout(tp=8, pp=4), mode=mode)).report for mode in ("none", "selective", "full")
    )
    assert none["time_s"]["recompute"] == 0 < selective["time_s"]["recompute"] < full["time_s"]["recompute"]
    assert none["time_s"]["compute"] == selective["time_s"]["compute"] == full["time_s"]["compute"]
    assert none["hfu"] == none["mfu"] and full["hfu"] > full["mfu"] > full["mfu_causal"]


@pytest.mark.parametrize("dp", [2, 3, 5])
def test_zero_1_communicates_once_a_step_and_zero_2_and_3_once_a_microbatch(dp):
    def dp_comm_s(zero: int, microbatches: int) -> float:
        return simulate(llama(Layout(tp=8, dp=dp, zero=zero), global_size=microbatches * dp)).report["time_s"][
            "dp_comm"
        ]

    assert dp_comm_s(0, 4) == dp_comm_s(0, 8)
    assert dp_comm_s(1, 4) == dp_comm_s(1, 8)
    for zero in (2, 3):
        four, eight, twelve = (dp_comm_s(zero, microbatches) for microbatches in (4, 8, 12))
        assert twelve - eight == eight - four > 0
    assert dp_comm_s(3, 8) - dp_comm_s(3, 4) > dp_comm_s(2, 8) - dp_comm_s(2, 4)


@pytest.mark.parametrize(("layers", "hidden", "vocab", "sequence"), [(12, 768, 50257, 1024), (3, 960, 1001, 96)])
def test_model_flops_are_korthikantis_formula(layers, hidden, vocab, sequence):
    shape = (layers, hidden, 4 * hidden, 12, 12, hidden // 12, vocab, sequence)
    model = ModelSpec("gpt", *shape, activation="gelu", position="learned", bias=True)
    plan = Plan(
        model, cluster_preset("dgx-a100-80g", 1), Layout(), Batch(6, 2, sequence), recompute=Recompute("selective")
    )
    report = simulate(plan).report
    b, s, h = 6, sequence, hidden
    expected = 72 * b * layers * s * h**2 * (1 + s / (6 * h) + vocab / (12 * h * layers))
    assert report["model_flops_per_s_per_device"] * report["step_time_s"] == pytest.approx(expected, rel=1e-12)
    causal = 72 * b * layers * s * h**2 * (1 + s / (12 * h) + vocab / (12 * h * layers))
    assert report["mfu_causal"] / report["mfu"] == pytest.approx(causal / expected, rel=1e-12)
    extra = 4 * b * layers * s**2 * h
    assert report["hfu"] / report["mfu"] == pytest.approx(1 + extra / expected, rel=1e-12)


def test_every_class_of_numbers_has_a_kind_and_a_source():
    provenance = simulate(PLANS["pipeline"]).report["provenance"]
    assert {origin["kind"] for origin in provenance.values()} == {"exact", "modelled", "measured"}
    assert all(origin["source"] for origin in provenance.values())
    assert "cluster.matmul_efficiency" in provenance


@pytest.mark.parametrize(
    "row", PUBLISHED, ids=[f"{row['model']['name'].split()[1]}-{row['recompute']}" for row in PUBLISHED]
)
def test_published_a100_steps_within_a_quarter(row):
    """Rough: nothing was fitted to single rows, and the runs had neither fused attention nor our overlap."""
    m, parallel = row["model"], row["parallel"]
    model = replace(
        model_preset("gpt3-175b"),
        num_layers=m["layers"],
        hidden_size=m["hidden"],
        ffn_hidden_size=m["ffn"],
        num_heads=m["heads"],
        num_kv_heads=m["kv_heads"],
        head_dim=m["hidden"] // m["heads"],
        vocab_size=m["vocab"],
    )
    layout = Layout(
        tp=parallel["tp"], pp=parallel["pp"], vpp=parallel["vpp"], dp=parallel["dp"], sequence_parallel=parallel["sp"]
    )
    plan = Plan(
        model,
        cluster_preset("dgx-a100-80g", layout.world_size),
        layout,
        Batch(row["batch"]["global"], row["batch"]["micro"], m["seq"]),
        precision=Precision("fp16"),
        recompute=Recompute(row["recompute"]),
        schedule=ScheduleChoice("Interleaved1F1B" if layout.vpp > 1 else "1F1B"),
    )
    assert simulate(plan).report["step_time_s"] == pytest.approx(row["step_s"], rel=0.25)


def placed(schedule: str, layout: Layout, *, per_node: int, microbatches: int = 8, zero: int = 0) -> Plan:
    """A small model on nodes of `per_node` devices, so that it matters which ranks talk."""
    return product_plan(
        replace(layout, zero=zero),
        cluster=replace(cluster_preset("dgx-h100", layout.world_size), devices_per_node=per_node),
        num_layers=2 * layout.num_stages,
        tied_embeddings=False,
        samples=microbatches * layout.dp,
        sequence=32,
        schedule=schedule,
    )


def test_a_file_that_holds_stages_in_a_vee_is_priced_with_them_there(tmp_path: Path) -> None:
    by_name = placed("ZBVZeroBubble", Layout(pp=3, vpp=2), per_node=3)
    (tmp_path / "vee.csv").write_text(build("ZBVZeroBubble", pp=3, num_microbatches=8, vpp=2).to_csv())
    from_file = replace(by_name, schedule=ScheduleChoice(file=str(tmp_path / "vee.csv")))
    assert simulate(from_file).report == simulate(by_name).report


@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        ("DualPipe", Layout(pp=4, dp=2)),
        ("DualPipeV", Layout(pp=4, vpp=2)),
        ("ZBVZeroBubble", Layout(pp=3, vpp=2)),
        ("Combined1F1B", Layout(pp=3)),
    ],
)
def test_times_of_placed_schedules_sum_to_the_step_exactly(schedule: str, layout: Layout) -> None:
    report = simulate(placed(schedule, layout, per_node=1)).report
    assert sum(report["time_s"].values()) == report["step_time_s"]


def test_messages_of_a_vee_cross_the_nodes_its_ranks_lie_on() -> None:
    """pp=4 on two nodes of 2: down 0 1 | 2 3, then back, so stages 1-2 and 5-6 cross the network
    and 3-4 stay on rank 3."""
    plan = placed("ZBVZeroBubble", Layout(pp=4, vpp=2), per_node=2)
    pricing = Pricing(plan)
    seconds = [pricing.seconds(Kind.SEND_F, stage).pp_comm for stage in range(8)]
    inside, across = seconds[0], seconds[1]
    assert across > inside > 0
    assert seconds == [inside, across, inside, 0, inside, across, inside, 0]


def test_replicas_send_over_their_own_links_and_reduce_over_both_ranks() -> None:
    """Ranks 0 1 2 | 3 4 5: down, only 2 -> 3 crosses the network; so it does up, where rank 3 holds
    stage 2 and rank 2 stage 3."""
    plan = placed("DualPipe", Layout(pp=6), per_node=3, microbatches=12)
    pricing = Pricing(plan)
    for replica in (0, 1):
        across = [
            pricing.seconds(Kind.SEND_F, stage, replica).pp_comm > pricing.seconds(Kind.SEND_F, 0).pp_comm
            for stage in range(5)
        ]
        assert across == [False, False, True, False, False]
    assert pricing.seconds(Kind.REDUCE_GRAD, 2).dp_comm > 0
    assert Pricing(placed("1F1B", Layout(pp=6), per_node=3)).seconds(Kind.REDUCE_GRAD, 2).dp_comm == 0


def test_dualpipe_holds_every_weight_twice_and_zero_cuts_the_copies() -> None:
    one, two = (simulate(placed(name, Layout(pp=4), per_node=4)).memory for name in ("1F1B", "DualPipe"))
    weights = [rank.weights_bytes for rank in one]
    assert [rank.weights_bytes for rank in two] == [weights[rank] + weights[3 - rank] for rank in range(4)]
    optimizer = [rank.optimizer_bytes for rank in simulate(placed("DualPipe", Layout(pp=4), per_node=4, zero=1)).memory]
    assert [2 * num_bytes for num_bytes in optimizer] == [rank.optimizer_bytes for rank in two]


@pytest.mark.parametrize("name", CATALOG)
def test_the_lower_bound_of_the_search_holds_for_every_schedule_of_the_catalog(name: str) -> None:
    entry = CATALOG[name]
    for microbatches in (8, 12):
        plan = placed(
            name, Layout(pp=4, vpp=entry.nearest_vpp(2 if entry.chunks else 1)), per_node=2, microbatches=microbatches
        )
        assert lower_bound_s(plan, Pricing(plan)) <= simulate(plan).report["step_time_s"]
