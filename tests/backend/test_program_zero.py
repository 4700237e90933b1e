"""With ZeRO and with buckets every action of a real step computes and sends what `core.program` says, to the byte, on every rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from shardproof import lower
from shardproof.backend.training_rank import TrainingRank
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.cluster_presets import cluster_preset
from shardproof.core.layout import Layout
from shardproof.core.model_presets import model_preset
from shardproof.core.plan import Batch, DataParallel, Numerics, Plan, Precision, ScheduleChoice
from shardproof.core.program import load_batch, operations
from shardproof.core.schedules import schedule_for


def plan_of(
    layout: Layout,
    mode: str,
    *,
    model="tiny-gpt",
    samples=8,
    micro=1,
    schedule="1F1B",
    dtype="fp32",
    tied=True,
    bucket_bytes=None,
    early=None,
) -> Plan:
    return Plan(
        replace(model_preset(model), num_layers=max(2, layout.num_stages), tied_embeddings=tied),
        cluster_preset("this-host", layout.world_size),
        layout,
        Batch(samples, micro, 24),
        precision=Precision(dtype),
        schedule=ScheduleChoice(schedule),
        data_parallel=DataParallel(bucket_bytes=bucket_bytes, overlap_grad_reduce=early),
        numerics=Numerics(mode, gradient_token_block=8 if layout.cp == 1 else 6, reduction_token_block=4 if layout.cp == 1 else 3),
    )


def recorded_step(transport, plan):
    transport.recorder.enabled = True
    TrainingRank(transport, plan).step(0)
    return transport.recorder.events


LAYOUTS = [
    pytest.param(Layout(dp=3, zero=1), {"samples": 9}, id="dp3-tied"),
    pytest.param(Layout(dp=5, zero=1), {"samples": 10, "micro": 2, "tied": False}, id="dp5"),
    pytest.param(Layout(tp=2, pp=2, dp=2, zero=1), {"dtype": "bf16"}, id="tp2-pp2-dp2-bf16-tied-over-two-ranks"),
    pytest.param(Layout(tp=2, dp=3, sequence_parallel=True, zero=1), {"model": "tiny-llama", "samples": 15}, id="tp2-dp3-sp"),
    pytest.param(Layout(dp=3), {"samples": 6, "bucket_bytes": 2**16}, id="buckets-dp3-tied"),
    pytest.param(Layout(tp=2, pp=2, dp=2, zero=1, sequence_parallel=True), {"bucket_bytes": 50_000, "tied": False}, id="buckets-zero-sp"),
    pytest.param(Layout(tp=2, dp=2, sequence_parallel=True), {"bucket_bytes": 50_000, "early": True}, id="early-buckets-sp"),
    pytest.param(Layout(cp=2, dp=2, zero=1), {"samples": 4}, id="cp2-dp2-tied"),
    pytest.param(Layout(tp=2, cp=2, sequence_parallel=True, zero=1), {"samples": 2, "model": "tiny-llama", "tied": False}, id="tp2-sp-cp2"),
    pytest.param(Layout(pp=2, vpp=2, dp=2, zero=1), {"schedule": "ZBVZeroBubble"}, id="zbv-tied-on-one-rank"),
]


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize(("layout", "choices"), LAYOUTS)
def test_every_action_of_a_step_with_zero_or_buckets_records_the_program(layout, choices, mode):
    plan = plan_of(layout, mode, **choices)
    schedule = lower(schedule_for(plan), max_active_stages=plan.schedule.max_active_stages)
    for global_rank, events in enumerate(run_threads(MemoryWorld(layout.world_size, timeout_s=60), recorded_step, plan)):
        here = layout.coordinates(global_rank)
        recorded = defaultdict(Counter)
        for action, operation in events:
            recorded[action][operation] += 1
        row = list(schedule.row(here["pp"]))
        assert recorded.pop(None, Counter()) == Counter(load_batch(plan, here["tp"]))
        assert recorded.keys() <= set(row), "something was computed or sent outside of the schedule's actions"
        for action in row:
            expected = Counter(operations(plan, action.kind, action.stage, here["tp"], here["dp"], cp_rank=here["cp"]))
            assert recorded[action] == expected, f"rank {global_rank}, {action}"
