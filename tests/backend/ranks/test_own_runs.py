"""A part of `benchmarks/own_runs.py`: real gloo processes do the predicted actions in the predicted order, send the
predicted bytes, and hold the predicted memory within 5%. Nothing here depends on time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

import shardproof
from helpers.gates import sampled
from shardproof.backend.pipeline.measure import measured_timeline
from shardproof.core.layout.layout import Layout
from shardproof.core.schedule import CATALOG
from shardproof.simulator import simulate


def load_benchmark():
    """The benchmark as a module that rank processes can load too."""
    path = Path(shardproof.__file__).parent / "benchmarks" / "own_runs.py"
    spec = importlib.util.spec_from_file_location("own_runs", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["own_runs"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


own = load_benchmark()

RUNS = {
    "gpt tp2 dp2": own.own_plan(own.gpt(), Layout(tp=2, dp=2)),
    "gpt pp2 zero bubble": own.own_plan(own.gpt(), Layout(pp=2), "ZBH1"),
    "gpt dp2 exact": own.own_plan(own.gpt(), Layout(dp=2), mode="exact"),
    "llama pp2 vpp2 dualpipev": own.own_plan(own.llama(), Layout(pp=2, vpp=2), "DualPipeV"),
    "llama tp2 pp2": own.own_plan(own.llama(), Layout(tp=2, pp=2), micro=2),
}


@sampled("name", RUNS, on_push=3)
def test_actions_order_and_bytes_are_exact_and_peak_memory_within_5_percent(name, workers):
    plan = RUNS[name]
    row = own.compare(plan, workers(plan.layout.world_size).run(own.record_rank, plan))
    assert row.differences == []
    assert row.collectives > 0 and row.actions >= 2 * plan.num_microbatches
    assert abs(row.peak_error) <= 0.05, f"predicted {row.predicted_peak_bytes}, measured {row.measured_peak_bytes}"


def test_a_collective_that_sends_other_bytes_is_reported_with_its_rank_and_action(workers):
    plan = RUNS["gpt tp2 dp2"]
    ranks = workers(plan.layout.world_size).run(own.record_rank, plan)
    ranks[3].sent["0F1"].pop()
    ranks[1].lanes["compute"].reverse()
    reported = own.compare(plan, ranks).differences
    assert reported[0] == "rank 1 lane compute: order of actions"
    assert reported[1].startswith("rank 3 0F1: sent [Collective(")


def test_there_are_at_least_twelve_layouts_of_two_models():
    assert len({(plan.model.name, plan.layout, plan.schedule.name) for plan in own.RUNS}) >= 12
    assert {plan.model.name for plan in own.RUNS} == {"own-gpt", "own-llama"}
    assert all(plan.layout.world_size <= 2 for plan in own.TIMED)


SMALL = {"hidden_size": 32, "ffn_hidden_size": 64, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "num_layers": 6}


def scheduled(name):
    """A plan of a schedule over three or four pipeline ranks, every other one with two replicas."""
    entry = CATALOG[name]
    pp, vpp = 4 if name.startswith("DualPipe") else 3, entry.nearest_vpp(1)
    microbatches = 2 * pp if entry.problem(pp=pp, num_microbatches=5, vpp=vpp) else 5
    odd = list(CATALOG).index(name) % 2
    layout, model = Layout(pp=pp, vpp=vpp, dp=1 + odd), (own.llama, own.gpt)[odd](**SMALL | {"num_layers": pp * vpp})
    return own.own_plan(model, layout, name, samples=microbatches * layout.dp, sequence=16)


@pytest.mark.parametrize("name", CATALOG)
def test_every_schedule_runs_as_predicted_and_its_durations_give_its_step(name, workers):
    plan = scheduled(name)
    ranks = workers(plan.layout.world_size, "memory").run(own.record_order, plan)
    assert own.differences(plan, ranks, simulate(plan)) == []
    measured = measured_timeline([span for rank in ranks for span in rank.spans], (), plan, "")
    replayed = simulate(plan, durations=[measured]).report["step_time_s"]
    assert replayed == pytest.approx(measured.makespan_s, rel=1e-9)
