"""Runs with activations and moments in host memory: the bytes that move and stay are those predicted, and no bit
differs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from helpers.gates import sampled
from helpers.plans import plan
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model import ModelSpec
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Offload, Recompute
from shardproof.core.plan.sections import Batch, Numerics, Precision, ScheduleChoice
from shardproof.simulator.memory.sizes import stage_sizes
from shardproof.simulator.simulation.simulate import simulate
from shardproof.verify.dynamic.proof import prove


@dataclass(frozen=True)
class Seen:
    """What a rank measured: bytes to the host and back in a step without its update, the most that outlives an action,
    the most that lives, moments on the device."""

    sent: int
    brought: int
    lasting: int
    live: int
    moments: int


def job(transport, plan: Plan) -> Seen:
    rank = TrainingRank(transport, plan)
    rank.step(0)  # tables that last are made in the first step
    assert rank.copies is not None
    masters = sum(one.tensor.nbytes for one in rank.optimizer.held if one.rounded is not None)
    away = sum(2 * one.tensor.nbytes for one in rank.optimizer.held) - rank.optimizer.state_bytes + masters
    sent, brought = rank.copies.sent_bytes, rank.copies.brought_bytes
    meter, live = rank.meter(), rank.live_meter()
    rank.step(1, meter=meter)
    rank.step(2, meter=live)
    lasting = max(sample.num_bytes for sample in meter.samples)
    return Seen(sent - away, brought - away, lasting, live.peak_bytes, rank.optimizer.state_bytes)


def run_plan(
    layout: Layout, schedule: str = "1F1B", *, offload: Offload, mode: str = "exact", dtype: str = "fp32", **others: Any
) -> Plan:
    """A small Llama, whose memory is predicted to the byte without offload too (`test_memory_own_runs`)."""
    sizes = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "head_dim": 16, "vocab_size": 512, "max_positions": 64}
    return Plan(
        model=ModelSpec("llama", ffn_hidden_size=192, num_kv_heads=2, **sizes),
        cluster=cluster_preset("this-host", layout.world_size),
        layout=layout,
        batch=Batch(4, 1, 64),
        precision=Precision(dtype),
        numerics=Numerics(mode),
        schedule=ScheduleChoice(schedule),
        offload=offload,
        **others,
    )


MASTERS = Offload(1, 1.0, masters=True)
ZERO_3 = run_plan(Layout(dp=2, zero=3), offload=MASTERS, dtype="bf16")
RUNS = {
    "vpp2": run_plan(Layout(pp=2, vpp=2), "Interleaved1F1B", offload=Offload(1, 1.0)),
    "weights too, pp2": run_plan(Layout(pp=2), offload=MASTERS, dtype="bf16"),
    "vpp2, fast": run_plan(Layout(pp=2, vpp=2), "Interleaved1F1B", offload=Offload(1, 1.0), mode="fast"),
    "weights too, zero1": run_plan(Layout(dp=2, zero=1), offload=MASTERS, dtype="bf16"),
    "weights too, zero3": replace(ZERO_3, schedule=ScheduleChoice("1F1B", max_active_stages=1)),
    "one device, all": run_plan(Layout(), offload=Offload(4, 1.0)),
    "tp2 pp2, some": run_plan(Layout(tp=2, pp=2), offload=Offload(1), mode="fast"),
    "inputs of recomputed layers": run_plan(Layout(pp=2), offload=Offload(2), recompute=Recompute("full")),
}


@sampled("name", RUNS, on_push=2)
def test_what_moves_and_what_stays_is_what_is_predicted(name, workers):
    plan = RUNS[name]
    simulation, sizes = simulate(plan), stage_sizes(plan)
    seen = workers(plan.layout.world_size, "memory").run(job, plan)
    for rank, memory in zip(simulation.global_ranks, simulation.memory, strict=True):
        stages = plan.placement.stages_of(memory.pp_rank)
        moved = plan.num_microbatches * sum(sizes[stage].offloaded_bytes for stage in stages)
        assert seen[rank].sent == seen[rank].brought == moved > 0
        assert seen[rank].moments == memory.optimizer_bytes
        assert seen[rank].lasting == pytest.approx(memory.lasting_bytes, abs=512)  # masks of one byte a token
        if plan.layout.dp == 1:  # a rank that is a thread sees what others hand over as its own
            assert seen[rank].live == pytest.approx(memory.peak_bytes, rel=0.05)


PROVED = {
    "zero bubble": plan(pp=2, num_layers=4, schedule="ZBH1", offload=Offload(2, 1.0)),
    "parts recomputed": plan(
        pp=2,
        num_layers=4,
        recompute=Recompute("selective", modules=("core_attn", "norm", "mlp_act")),
        offload=Offload(2, 1.0),
    ),
    "tied tp2 cp2 zero1": plan(tp=2, cp=2, zero=1, dtype="bf16", sequence=32, offload=Offload(1, 0.5)),
    "weights too": plan(tp=2, dp=2, dtype="bf16", microbatches=2, offload=Offload(0, 0.5, masters=True)),
    "weights too, zero1 late": plan(
        dp=2, zero=1, dtype="bf16", overlap_param_gather=True, bucket_bytes=2**14, offload=Offload(0, 0.5, masters=True)
    ),
    "weights too, zero3": plan(dp=2, zero=3, dtype="bf16", offload=Offload(1, 1.0, masters=True)),
}


@sampled("name", PROVED, on_push=1)
def test_no_bit_differs(name):
    proof = prove(PROVED[name], transport="memory", steps=2)
    assert proof.ok and proof.report["bits_different"] == 0, proof.text()
