"""The dynamic proof of schedules that place stages otherwise: replicas of two directions, vees, and their twins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from helpers.gates import sampled
from helpers.plans import training_plan
from shardproof.core.base.errors import PlanError
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch, ScheduleChoice
from shardproof.verify.dynamic.proof import prove
from shardproof.verify.dynamic.twin import twin
from shardproof.verify.mutations import parse_fault


def tiny(layout: Layout, schedule: str, *, global_size: int) -> Plan:
    """A small model with biases, learned positions and clipping that is active from the first step."""
    return training_plan(layout, num_layers=layout.num_stages, samples=global_size, sequence=16, schedule=schedule)


PLANS: Mapping[str, Plan] = {
    "dualpipe-pp4-m8": tiny(Layout(pp=4), "DualPipe", global_size=8),
    "dualpipe-pp2-dp3-m4": tiny(Layout(pp=2, dp=3), "DualPipe", global_size=12),
    "dualpipev-pp3-m6": tiny(Layout(pp=3, vpp=2), "DualPipeV", global_size=6),
    "zbv-pp3-m5": tiny(Layout(pp=3, vpp=2), "ZBVZeroBubble", global_size=5),
}


@sampled("name", PLANS, on_push=2)
def test_no_bit_differs_from_one_device(name: str) -> None:
    proof = prove(PLANS[name], transport="memory", steps=2 if "dp3" in name else 1)
    assert proof.findings == () and proof.ok and proof.report["bits_different"] == 0
    assert proof.report["tensors_compared"] > 100 and proof.report["twin"] == []


def test_no_bit_of_dualpipe_differs_between_processes_over_gloo() -> None:
    proof = prove(tiny(Layout(pp=2), "DualPipe", global_size=4), steps=1, transport="gloo")
    assert proof.ok and proof.report["transport"] == "gloo" and proof.report["bits_different"] == 0


def test_a_dropped_reduction_between_the_replicas_of_a_stage_names_rank_and_parameter() -> None:
    """Stage 0 of 2 lies on ranks 0 and 1; with dp=1 nothing but its replicas is to be added."""
    rank, tensor = 1, "layers.0.attention.qkv.weight"
    fault = parse_fault(f"drop-reduction:{rank}:{tensor}")
    proof = prove(tiny(Layout(pp=2), "DualPipe", global_size=4), transport="memory", steps=1, fault=fault)
    first = proof.report["first_divergence"]
    assert (first["ranks"], first["tensor"], first["phase"], first["action"]) == (
        [rank],
        tensor,
        "gradient",
        "0REDUCE_GRAD",
    )
    assert f"rank {1 - rank} is right: look at the cross-replica reduction of {tensor}" in proof.findings[0].hint


def test_a_reduction_over_one_copy_cannot_be_dropped() -> None:
    with pytest.raises(PlanError, match="rank 1 does not hold"):
        prove(
            PLANS["dualpipe-pp4-m8"],
            transport="memory",
            steps=1,
            fault=parse_fault("drop-reduction:1:layers.0.attention.qkv.weight"),
        )
    with pytest.raises(PlanError, match="dp=1"):
        fault = parse_fault("drop-reduction:0:layers.5.attention.qkv.weight")
        prove(PLANS["dualpipev-pp3-m6"], transport="memory", steps=1, fault=fault)


@pytest.mark.parametrize(
    ("schedule", "layout", "microbatches", "expected"),
    [
        ("DualPipe", Layout(tp=8, pp=16, dp=4), 64, (2, 2, 2, 4)),
        ("DualPipe", Layout(pp=16), 40, (8, 1, 1, 18)),
        ("DualPipeV", Layout(pp=12, vpp=2), 24, (7, 1, 1, 14)),
        ("InterleavedZeroBubble", Layout(pp=12, vpp=2), 24, (7, 1, 1, 14)),
    ],
)
def test_a_twin_keeps_to_the_sizes_for_which_its_schedule_exists(
    schedule: str, layout: Layout, microbatches: int, expected: tuple[int, int, int, int]
) -> None:
    model = replace(model_preset("gpt3-175b"), num_layers=layout.num_stages)
    cluster = replace(cluster_preset("dgx-a100-80g", layout.world_size), devices_per_node=1)
    plan = Plan(model, cluster, layout, Batch(microbatches * layout.dp, 1, 2048), schedule=ScheduleChoice(schedule))
    small, _ = twin(plan)
    assert (small.layout.pp, small.layout.tp, small.layout.dp, small.num_microbatches) == expected
    assert small.schedule == plan.schedule and small.layout.vpp == layout.vpp
