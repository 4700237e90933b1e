"""Replicas of stages: two-direction and vee schedules train to the bits of one device, and record
what the program says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.bits import assert_same_bits, collect, on_one_device, whole_tensors
from helpers.gates import sampled
from helpers.plans import plan
from helpers.program import assert_every_action_records_the_program
from shardproof import lower, run_schedule
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.backend.transport.mesh import Mesh
from shardproof.backend.unsupported import unsupported
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.core.plan.sections import ScheduleChoice

STEPS = 2


def tiny(
    layout: Layout, schedule: str, *, samples: int, micro=1, model="tiny-gpt", mode="exact", file=None, **fields
) -> Plan:
    """A small model with clipping that is active from the first step."""
    return plan(
        layout,
        model=model,
        num_layers=layout.num_stages,
        **fields,
        samples=samples,
        micro=micro,
        sequence=12,
        schedule=ScheduleChoice(schedule) if file is None else ScheduleChoice(file=file),
        mode=mode,
        clip_grad_norm=0.1,
        steps=STEPS,
        learning_rate=0.01,
    )


PLANS = {
    "DualPipe pp2 m4": tiny(Layout(pp=2), "DualPipe", samples=4),
    "DualPipeV pp3 m7": tiny(Layout(pp=3, vpp=2), "DualPipeV", samples=7),
    "DualPipe pp4 m10 of 2 samples, untied": tiny(Layout(pp=4), "DualPipe", samples=20, micro=2, tied_embeddings=False),
    "DualPipe pp2 tp2 m6, llama": tiny(Layout(pp=2, tp=2), "DualPipe", samples=6, model="tiny-llama"),
    "DualPipe pp2 dp3 m4, tied": tiny(Layout(pp=2, dp=3), "DualPipe", samples=12, tied_embeddings=True),
    "DualPipe pp6 m12": tiny(Layout(pp=6), "DualPipe", samples=12),
    "DualPipeV pp2 dp2 m5, tied": tiny(Layout(pp=2, vpp=2, dp=2), "DualPipeV", samples=10, tied_embeddings=True),
    "ZBVZeroBubble pp3 m6": tiny(Layout(pp=3, vpp=2), "ZBVZeroBubble", samples=6),
    "ZBVZeroBubble pp2 tp2 m5, llama": tiny(Layout(pp=2, vpp=2, tp=2), "ZBVZeroBubble", samples=5, model="tiny-llama"),
    "Combined1F1B pp3 m5": tiny(Layout(pp=3), "Combined1F1B", samples=5),
    "Combined1F1B pp2 vpp2 m4": tiny(Layout(pp=2, vpp=2), "Combined1F1B", samples=4),
}


def ranks_of(plan):
    return run_threads(MemoryWorld(plan.layout.world_size, timeout_s=60), collect, (plan, None))


@sampled("plan", PLANS.values(), ids=PLANS.keys(), on_push=3)
def test_two_directions_and_vees_train_to_the_bits_of_on_one_device(plan):
    assert unsupported(plan) == []
    (scalars, _, _), *_ = reference = ranks_of(on_one_device(plan))
    ranks = ranks_of(plan)
    for found, _, _ in ranks:
        assert found == scalars
    assert_same_bits(whole_tensors(plan, reference), whole_tensors(plan, ranks))


UNEVEN = "0F0,0F1,0B0,0B1\n1F0,1B0,0F2,1F2,1F1,1B2,0B2,1B1\n"
"""Stage 0 has a replica on rank 1, which runs microbatch 2 there; stage 1 has none."""


def test_a_file_that_replicates_one_stage_of_two_trains_to_the_bits_of_one_device_unless_the_table_is_tied(tmp_path):
    file = tmp_path / "uneven.csv"
    file.write_text(UNEVEN)
    plan = tiny(Layout(pp=2), "", samples=6, micro=2, file=str(file), tied_embeddings=False)
    assert plan.placement.ranks == ((0, 1), (1,)) and plan.copy_samples(0, 1) == (4, 6)
    reference, ranks = ranks_of(on_one_device(plan)), ranks_of(plan)
    assert [found for found, _, _ in ranks] == [reference[0][0]] * 2
    assert_same_bits(whole_tensors(plan, reference), whole_tensors(plan, ranks))
    (problem,) = unsupported(replace(plan, model=replace(plan.model, tied_embeddings=True)))
    assert "first stage lies on ranks (0, 1) and the last on (1,)" in problem


def test_measured_order_per_lane_of_dualpipe_is_the_simulators():
    plan = PLANS["DualPipe pp4 m10 of 2 samples, untied"]
    measured, predicted = ranks_of(plan)[0][2].timeline, run_schedule(lower(schedule_for(plan)))
    for rank in range(4):
        for lane in predicted.spans.lanes:
            assert [span.action for span in measured.select(rank, lane)] == [
                span.action for span in predicted.select(rank, lane)
            ]


RECORDED = {
    "DualPipe pp2 m4": tiny(Layout(pp=2), "DualPipe", samples=4),
    "DualPipe pp4 m10": tiny(Layout(pp=4), "DualPipe", samples=10),
    "DualPipe pp2 tp2 dp3 m4": tiny(Layout(pp=2, tp=2, dp=3), "DualPipe", samples=12),
    "DualPipeV pp2 dp2 m5": tiny(Layout(pp=2, vpp=2, dp=2), "DualPipeV", samples=10),
    "ZBVZeroBubble pp3 m4": tiny(Layout(pp=3, vpp=2), "ZBVZeroBubble", samples=4),
    "Combined1F1B pp2 m3": tiny(Layout(pp=2), "Combined1F1B", samples=3),
}


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("plan", RECORDED.values(), ids=RECORDED.keys())
def test_every_action_records_the_program_of_its_replica(plan, mode):
    assert_every_action_records_the_program(replace(plan, numerics=replace(plan.numerics, mode=mode)))


def groups_of(transport, plan):
    mesh = Mesh(transport, plan.layout, lower(schedule_for(plan)))
    stages = plan.placement.stages_of(mesh.coordinates["pp"])
    return {stage: (mesh.copies(stage).ranks, mesh.copies(stage).rank) for stage in stages}, mesh.embedding


def test_copies_of_a_stage_are_grouped_in_the_order_of_their_samples():
    plan = tiny(Layout(pp=4, dp=2), "DualPipe", samples=20)
    found = run_threads(MemoryWorld(8, timeout_s=60), groups_of, plan)
    rank = plan.layout.global_rank
    first_stage = (rank(dp=0, pp=0), rank(dp=0, pp=3), rank(dp=1, pp=0), rank(dp=1, pp=3))
    assert found[rank(dp=1, pp=3)][0][0] == (first_stage, 3) and found[rank(dp=0, pp=0)][0][0] == (first_stage, 0)
    assert found[rank(dp=0, pp=0)][0][3] == ((first_stage[1], first_stage[0], first_stage[3], first_stage[2]), 1)
    assert [plan.copy_samples(0, copy) for copy in range(4)] == [(0, 5), (5, 10), (10, 15), (15, 20)]
    assert all(embedding is None for _, embedding in found)
