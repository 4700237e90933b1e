"""Idle time by cause and the critical path: hand-made pipelines, and sums that are exact for every schedule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plans import product_plan
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.machine.variation import Variation
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch, Precision
from shardproof.core.schedule import build, lower
from shardproof.core.schedule.action import Kind
from shardproof.simulator.engine.attribution import busy_s, sorts_of
from shardproof.simulator.engine.bubbles import CAUSES, idle_of
from shardproof.simulator.engine.critical_path import critical_path
from shardproof.simulator.engine.engine import Run, execute
from shardproof.simulator.engine.graph import build_graph
from shardproof.simulator.engine.replicas import execute_replicas
from shardproof.simulator.engine.seconds import Seconds
from shardproof.simulator.simulation.simulate import simulate


def unit_run(name: str = "1F1B", *, pp: int, num_microbatches: int, send_s: float = 0.0) -> Run:
    """F takes 1 s, B 2 s, messages `send_s`, all else nothing."""
    graph = build_graph(lower(build(name, pp=pp, num_microbatches=num_microbatches)))
    seconds = {Kind.F: 1.0, Kind.B: 2.0, Kind.SEND_F: send_s, Kind.SEND_B: send_s}
    return execute(graph, np.array([seconds.get(Kind(kind), 0.0) for kind in graph.schedule.actions.kind.tolist()]))


def test_1f1b_on_2_ranks_idles_for_3_of_9_seconds_on_each():
    """Rank 0: F F . B F B ...; rank 1 waits for 0F0 first and ends when rank 0 has its last backward."""
    run = unit_run(pp=2, num_microbatches=2)
    first, last = idle_of(run, 0), idle_of(run, 1)
    assert [(idle.cause, idle.of, idle.seconds, idle.longest) for idle in first] == [("waiting", "1B", 3.0, "1B0")]
    assert [(idle.cause, idle.seconds) for idle in last] == [("end", 2.0), ("warm-up", 1.0)]
    assert last[1].longest == "0F0"
    assert run.end_s.max() == 9


def test_the_time_of_a_message_is_distinguished_from_the_wait_for_its_payload():
    run = unit_run(pp=2, num_microbatches=1, send_s=0.25)
    (waiting, message) = sorted(idle_of(run, 0), key=lambda idle: idle.cause, reverse=True)
    assert (waiting.cause, waiting.of, waiting.seconds) == ("waiting", "1B", 3.25)
    assert (message.cause, message.of, message.seconds, message.longest) == ("message", "", 0.25, "1B0")


def test_the_critical_path_of_1f1b_goes_down_the_pipeline_along_the_last_rank_and_back():
    """(m + p - 1)(F + B): down 2 F, m times F and B on the last rank, up 2 B."""
    run = unit_run(pp=3, num_microbatches=5)
    path = critical_path(run, tuple(Seconds() for _ in sorts_of(run.graph).sorts))
    actions = run.graph.schedule.actions
    tokens = [str(actions[segment.action]) for segment in path.segments]
    assert tokens[:3] == ["0F0", "1F0", "2F0"] and tokens[-2:] == ["1B4", "0B4"]
    assert tokens[2:-2] == [f"2{letter}{microbatch}" for microbatch in range(5) for letter in "FB"]
    assert sum(segment.end_s - segment.start_s for segment in path.segments) == 21 == run.end_s.max()
    assert path.by_action()[0] == {"pp_rank": 2, "of": "2B", "seconds": 10.0, "count": 5}


PROFILES = ("shardproof", "megatron-te", "torchtitan", "megatron-2021")


def gpt(schedule: str, layout: Layout, profile: str, **variation) -> Plan:
    return product_plan(
        layout,
        model="llama3-8b",
        cluster="dgx-h100",
        num_layers=8 * layout.num_stages,
        samples=8 * layout.dp,
        sequence=2048,
        profile=profile,
        schedule=schedule,
        variation=Variation(**variation),
    )


@settings(max_examples=25, deadline=None)
@given(
    schedule=st.sampled_from(["1F1B", "GPipe", "ZBH1", "Interleaved1F1B", "ZBVZeroBubble", "DualPipe", "Combined1F1B"]),
    profile=st.sampled_from(PROFILES),
    zero=st.sampled_from([0, 1, 3]),
    slow=st.sampled_from([{}, {"device-9": 1.5}]),
)
def test_idle_seconds_and_the_path_sum_to_the_step_exactly(schedule, profile, zero, slow):
    vpp = 2 if schedule in ("Interleaved1F1B", "ZBVZeroBubble") else 1
    simulation = simulate(gpt(schedule, Layout(tp=2, pp=4, dp=2, vpp=vpp, zero=zero), profile, stragglers=slow))
    run, step_s = simulation.run, simulation.report["step_time_s"]
    busy = busy_s(run.graph, simulation.prices)
    for pp_rank in range(4):
        idle = idle_of(run, pp_rank)
        assert sum(entry.seconds for entry in idle) == step_s - busy[pp_rank]
        assert all(entry.seconds > 0 and entry.cause in CAUSES and entry.count >= 1 for entry in idle)
    path = critical_path(run, simulation.prices)
    assert path.segments[0].start_s == 0 and path.segments[-1].end_s == step_s
    assert all(one.end_s == two.start_s for one, two in zip(path.segments, path.segments[1:], strict=False))
    assert sum(path.time_s.values()) == pytest.approx(step_s, rel=1e-12)
    if not slow:
        assert all(segment.action >= 0 for segment in path.segments)


def test_a_replica_that_waits_for_a_slower_one_says_so():
    """Backwards of both replicas are one: the one whose forwards take 1 s waits half a second for
    the other before each."""
    graph = build_graph(lower(build("1F1B", pp=1, num_microbatches=2)))
    kinds = graph.schedule.actions.kind.tolist()
    seconds = [{Kind.F: forward_s, Kind.B: 2.0} for forward_s in (1.0, 1.5)]
    duration_s = np.array([[table.get(Kind(kind), 0.0) for table in seconds] for kind in kinds])
    run = execute_replicas(graph, duration_s, {Kind.B: 2}).run(0)
    (idle,) = idle_of(run, 0)
    assert (idle.cause, idle.seconds, idle.count, idle.longest) == ("replicas", 1.0, 2, "0B0")
    path = critical_path(run, tuple(Seconds() for _ in sorts_of(graph).sorts))
    assert path.segments[0] == (-1, 0.0, 5.0)  # what made the other replica late is not known here


def test_ranks_that_share_cores_last_longer_and_all_of_it_is_reported():
    """Four ranks on two cores: what they last beyond their price is `other` in the report and `sharing` here."""
    cluster = replace(cluster_preset("this-host", 4), num_cores=2)
    plan = Plan(model_preset("tiny-gpt"), cluster, Layout(pp=4), Batch(8, 1, 64), precision=Precision("fp32"))
    simulation = simulate(plan)
    report = simulation.report
    assert sum(report["time_s"].values()) == report["step_time_s"] and report["time_s"]["other"] > 0
    idle = idle_of(simulation.run, simulation.global_ranks.index(report["bubble_rank"]), simulation.prices)
    assert sum(entry.seconds for entry in idle) == pytest.approx(
        report["bubble_fraction"] * report["step_time_s"], rel=1e-12
    )
    assert "sharing" in {entry.cause for entry in idle}


def test_pictures_and_reports_name_the_same_bubble():
    simulation = simulate(gpt("1F1B", Layout(tp=2, pp=4, dp=2), "shardproof"))
    report = simulation.report
    pp_rank = simulation.global_ranks.index(report["bubble_rank"])
    total_s = sum(entry.seconds for entry in idle_of(simulation.run, pp_rank))
    assert total_s == pytest.approx(report["bubble_fraction"] * report["step_time_s"], rel=1e-12)
