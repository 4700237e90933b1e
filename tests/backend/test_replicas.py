"""Replicas of stages: two-direction and vee schedules train to the bits of one device, and record what the program says."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest

from shardproof import lower, run_schedule
from shardproof.backend.mesh import Mesh
from shardproof.backend.trainer import run_steps, unsupported
from shardproof.backend.training_rank import TrainingRank
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.cluster_presets import cluster_preset
from shardproof.core.layout import Layout
from shardproof.core.model_presets import model_preset
from shardproof.core.parameters import parameters
from shardproof.core.plan import Batch, Numerics, Optimizer, Plan, Precision, ScheduleChoice, Train
from shardproof.core.program import load_batch, operations
from shardproof.core.schedules import schedule_for

STEPS = 2


def tiny(layout: Layout, schedule: str, *, samples: int, micro=1, model="tiny-gpt", mode="exact", file=None, **fields) -> Plan:
    """A small model with clipping that is active from the first step."""
    return Plan(
        replace(model_preset(model), num_layers=layout.num_stages, **fields),
        cluster_preset("this-host", layout.world_size),
        layout,
        Batch(samples, micro, 12),
        precision=Precision("fp32"),
        schedule=ScheduleChoice(schedule) if file is None else ScheduleChoice(file=file),
        numerics=Numerics(mode, gradient_token_block=8, reduction_token_block=4),
        optimizer=Optimizer(clip_grad_norm=0.1),
        train=Train(steps=STEPS, learning_rate=1e-2),
    )


PLANS = {
    "DualPipe pp2 m4": tiny(Layout(pp=2), "DualPipe", samples=4),
    "DualPipe pp4 m10 of 2 samples, untied": tiny(Layout(pp=4), "DualPipe", samples=20, micro=2, tied_embeddings=False),
    "DualPipe pp2 tp2 m6, llama": tiny(Layout(pp=2, tp=2), "DualPipe", samples=6, model="tiny-llama"),
    "DualPipe pp2 dp3 m4, tied": tiny(Layout(pp=2, dp=3), "DualPipe", samples=12, tied_embeddings=True),
    "DualPipe pp6 m12": tiny(Layout(pp=6), "DualPipe", samples=12),
    "DualPipeV pp3 m7": tiny(Layout(pp=3, vpp=2), "DualPipeV", samples=7),
    "DualPipeV pp2 dp2 m5, tied": tiny(Layout(pp=2, vpp=2, dp=2), "DualPipeV", samples=10, tied_embeddings=True),
    "ZBVZeroBubble pp3 m6": tiny(Layout(pp=3, vpp=2), "ZBVZeroBubble", samples=6),
    "ZBVZeroBubble pp2 tp2 m5, llama": tiny(Layout(pp=2, vpp=2, tp=2), "ZBVZeroBubble", samples=5, model="tiny-llama"),
    "Combined1F1B pp3 m5": tiny(Layout(pp=3), "Combined1F1B", samples=5),
    "Combined1F1B pp2 vpp2 m4": tiny(Layout(pp=2, vpp=2), "Combined1F1B", samples=4),
}


class Collect:
    """An observer that keeps every scalar, and this rank's slices of what the last step left."""

    def __init__(self):
        self.scalars, self.pieces = [], []

    def begin_step(self, step):
        self.pieces.clear()

    def activation(self, name, microbatch, tokens, tensor):
        pass

    def scalar(self, name, value):
        self.scalars.append((name, value))

    def gradient(self, name, slices, tensor):
        self.pieces.append((f"gradient {name}", slices, tensor.numpy().copy()))

    def optimizer_state(self, name, slices, exp_avg, exp_avg_sq):
        self.pieces.append((f"exp_avg_sq {name}", slices, exp_avg_sq.numpy().copy()))

    def weight(self, name, slices, tensor):
        self.pieces.append((f"weight {name}", slices, tensor.numpy().copy()))


def collect(transport, plan):
    observer = Collect()
    result = run_steps(transport, plan, observer=observer)
    return observer.scalars, observer.pieces, result.timeline


def ranks_of(plan):
    return run_threads(MemoryWorld(plan.layout.world_size, timeout_s=60), collect, plan)


def one_device(plan):
    cluster, batch = cluster_preset("this-host", 1), replace(plan.batch, micro_size=1)
    return replace(plan, layout=Layout(), cluster=cluster, batch=batch, schedule=ScheduleChoice("1F1B"))


def whole_tensors(plan, ranks):
    """Whole tensors by name; every rank that holds an element must hold the same bits."""
    shapes = {parameter.name: parameter.shape for parameter in parameters(plan.model)}
    whole, seen = {}, {}
    for _, pieces, _ in ranks:
        for name, slices, values in pieces:
            shape = shapes[name.split()[1]]
            full, known = whole.setdefault(name, np.zeros(shape, np.float32)), seen.setdefault(name, np.zeros(shape, bool))
            before = known[slices]
            assert np.array_equal(full[slices][before].view(np.int32), values[before].view(np.int32)), f"replicas of {name} differ"
            full[slices], known[slices] = values, True
    assert all(known.all() for known in seen.values())
    return whole


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_two_directions_and_vees_train_to_the_bits_of_one_device(plan):
    assert unsupported(plan) == []
    (scalars, _, _), *_ = reference = ranks_of(one_device(plan))
    ranks = ranks_of(plan)
    for found, _, _ in ranks:
        assert found == scalars
    one, many = whole_tensors(plan, reference), whole_tensors(plan, ranks)
    assert one.keys() == many.keys()
    assert [name for name in one if not np.array_equal(one[name].view(np.int32), many[name].view(np.int32))] == []


UNEVEN = "0F0,0F1,0B0,0B1\n1F0,1B0,0F2,1F2,1F1,1B2,0B2,1B1\n"
"""Stage 0 has a replica on rank 1, which runs microbatch 2 there; stage 1 has none."""


def test_a_file_that_replicates_one_stage_of_two_trains_to_the_bits_of_one_device_unless_the_table_is_tied(tmp_path):
    file = tmp_path / "uneven.csv"
    file.write_text(UNEVEN)
    plan = tiny(Layout(pp=2), "", samples=6, micro=2, file=str(file), tied_embeddings=False)
    assert plan.placement.ranks == ((0, 1), (1,)) and plan.copy_samples(0, 1) == (4, 6)
    reference, ranks = ranks_of(one_device(plan)), ranks_of(plan)
    assert [found for found, _, _ in ranks] == [reference[0][0]] * 2
    one, many = whole_tensors(plan, reference), whole_tensors(plan, ranks)
    assert all(np.array_equal(one[name].view(np.int32), many[name].view(np.int32)) for name in one)
    (problem,) = unsupported(replace(plan, model=replace(plan.model, tied_embeddings=True)))
    assert "first stage lies on ranks (0, 1) and the last on (1,)" in problem


def test_measured_order_per_lane_of_dualpipe_is_the_simulators():
    plan = PLANS["DualPipe pp4 m10 of 2 samples, untied"]
    measured, predicted = ranks_of(plan)[0][2], run_schedule(lower(schedule_for(plan)))
    for rank in range(4):
        for lane in predicted.spans.lanes:
            assert [span.action for span in measured.select(rank, lane)] == [span.action for span in predicted.select(rank, lane)]


def recorded_step(transport, plan):
    transport.recorder.enabled = True
    TrainingRank(transport, plan).step(0)
    return transport.recorder.events


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
    plan = replace(plan, numerics=replace(plan.numerics, mode=mode))
    schedule = lower(schedule_for(plan))
    for global_rank, events in enumerate(run_threads(MemoryWorld(plan.layout.world_size, timeout_s=60), recorded_step, plan)):
        here = plan.layout.coordinates(global_rank)
        recorded = defaultdict(Counter)
        for action, operation in events:
            recorded[action][operation] += 1
        row = [part for action in schedule.row(here["pp"]) for part in action.parts]
        assert recorded.pop(None, Counter()) == Counter(load_batch(plan, here["tp"]))
        assert recorded.keys() <= set(row), "something was computed or sent outside of the schedule's actions"
        for action in row:
            replica = plan.placement.replica_of(action.stage, here["pp"])
            expected = Counter(operations(plan, action.kind, action.stage, here["tp"], here["dp"], replica=replica))
            assert recorded[action] == expected, f"rank {global_rank}, {action}"


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
