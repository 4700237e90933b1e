"""Sensitivity: gains against simulating the changed plan, bounds on what a tenth can gain, and the command line."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from helpers.plans import product_plan
from shardproof.core.commands.cli import main
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import CLUSTER_PRESETS, cluster_preset
from shardproof.core.machine.variation import Variation
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch
from shardproof.simulator.search.sensitivity import improvements, sensitivity
from shardproof.simulator.simulation.simulate import simulate


def llama(cluster: str = "dgx-h100", **variation) -> Plan:
    return product_plan(
        model="llama3-8b",
        cluster=cluster,
        samples=32,
        sequence=4096,
        variation=Variation(**variation),
        tp=4,
        pp=2,
        dp=4,
    )


def test_gains_are_those_of_plans_with_the_improved_number_most_first():
    plan = llama()
    step_s, gains = simulate(plan).report["step_time_s"], sensitivity(plan)
    by_name = {gain.name: gain for gain in gains}
    for name, factor in (("node_link_bytes_per_s", 1.1), ("node_network_bytes_per_s", 1.1), ("network_latency_s", 0.9)):
        cluster = replace(plan.cluster, **{name: getattr(plan.cluster, name) * factor})
        assert by_name[name].step_time_s == simulate(replace(plan, cluster=cluster)).report["step_time_s"]
        assert by_name[name].gained_s == step_s - by_name[name].step_time_s
    assert [gain.gained_s for gain in gains] == sorted((gain.gained_s for gain in gains), reverse=True)


@pytest.mark.parametrize("cluster", ["dgx-a100-80g", "dgx-h100", "this-host"])
def test_no_tenth_gains_more_than_a_tenth_and_none_costs_time(cluster):
    for gain in sensitivity(llama(cluster)):
        assert -1e-9 <= gain.gained_share <= 0.1 + 1e-9, gain


def test_compute_gains_most_where_a_device_works_alone_and_links_gain_nothing():
    plan = Plan(model_preset("llama3-8b"), cluster_preset("dgx-h100", 1), Layout(), Batch(4, 1, 4096))
    gains = {gain.name: gain for gain in sensitivity(plan)}
    assert sensitivity(plan)[0].name == "peak_flops_per_s" and gains["peak_flops_per_s"].gained_share > 0.05
    assert gains["node_link_bytes_per_s"].gained_s == gains["node_network_bytes_per_s"].gained_s == 0
    assert gains["peak_flops_per_s"].value == plan.cluster.peak_flops_per_s["bf16"]


@pytest.mark.parametrize("name", CLUSTER_PRESETS)
def test_every_improved_cluster_is_a_legal_one_that_differs_in_one_thing(name):
    cluster = cluster_preset(name, 8)
    found = dict(improvements(cluster, "bf16"))
    assert "device_memory_bytes_per_s" in found and "oversubscription" not in found
    assert all(better != cluster for better in found.values())


def test_shares_stop_at_one():
    found = dict(improvements(replace(llama().cluster, matmul_efficiency=0.95), "bf16"))
    assert found["matmul_efficiency"].matmul_efficiency == 1.0


def test_slow_devices_count_and_drawn_steps_do_not():
    slow = sensitivity(llama(stragglers={"device-0": 1.5}, jitter=0.1))
    assert slow == sensitivity(llama(stragglers={"device-0": 1.5}))
    assert slow != sensitivity(llama())


ARGUMENTS = ["simulate", "--model", "llama3-8b", "--cluster", "dgx-h100", "--devices", "32", "--tp", "4", "--pp", "2"]


def test_simulate_explains_itself_in_text_and_json(capsys):
    assert main([*ARGUMENTS, "--sensitivity"]) == 0
    text = capsys.readouterr().out
    assert (
        "which does so longest:" in text
        and "critical path:" in text
        and "peak_flops_per_s" in text
        and "variation:" not in text
    )
    assert main([*ARGUMENTS, "--sensitivity", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    idle_s = sum(entry["seconds"] for entry in report["idle_s"])
    assert idle_s == pytest.approx(report["bubble_fraction"] * report["step_time_s"], rel=1e-9)
    assert sum(report["critical_path"]["time_s"].values()) == pytest.approx(report["step_time_s"], rel=1e-9)
    assert report["sensitivity"][0]["gained_s"] > 0


def test_simulate_draws_as_many_samples_as_asked_for(capsys):
    varied = [
        "--set",
        "variation.jitter=0.05",
        "--set",
        "variation.device_mtbf_s=1e8",
        "--set",
        "variation.checkpoint_s=30",
    ]
    assert main([*ARGUMENTS, *varied, "--samples", "7", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["variation"]["samples"] == 7 and "goodput" in report and "sensitivity" not in report
    assert main([*ARGUMENTS, *varied, "--samples", "7"]) == 0
    text = capsys.readouterr().out
    assert "7 steps drawn" in text and "goodput" in text
    assert main([*ARGUMENTS, "--samples", "-1"]) == 2
    assert "samples = -1 must be at least 0" in capsys.readouterr().err
