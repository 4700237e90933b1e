"""What ranks really compute and send is what `core.program` says, per action, as multisets and to the byte."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from helpers.gates import in_both_modes
from helpers.plans import plan
from helpers.program import assert_every_action_records_the_program
from shardproof.backend.base.microbatch import Microbatch
from shardproof.backend.model.transformer import Stage
from shardproof.backend.numerics import make_numerics
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.core.program import operations
from shardproof.core.schedule.action import Action, Kind

KEEP = Recompute()


def plan_of(
    layout: Layout, mode: str, *, model="tiny-gpt", samples=8, micro=1, schedule="1F1B", recompute=KEEP, dtype="fp32"
) -> Plan:
    return plan(
        layout,
        model=model,
        num_layers=layout.stages.count("t") if layout.stages else max(2, layout.num_stages),
        samples=samples,
        micro=micro,
        sequence=20,
        dtype=dtype,
        recompute=recompute,
        schedule=schedule,
        mode=mode,
        reduction_token_block=None,
    )


LAYOUTS = [
    pytest.param(Layout(), {}, id="one-device"),
    pytest.param(Layout(tp=4), {"micro": 2}, id="tp4-micro2"),
    pytest.param(Layout(tp=3), {"model": "tiny-gpt-6h"}, id="tp3-6-heads"),
    pytest.param(Layout(tp=4, dp=2), {"model": "tiny-llama"}, id="tp4-dp2-gqa"),
    pytest.param(Layout(dp=3), {"samples": 9}, id="dp3-of-9-samples"),
    pytest.param(Layout(dp=5), {"samples": 10, "micro": 2}, id="dp5-of-10-samples"),
    pytest.param(Layout(pp=3, dp=2), {"samples": 12, "micro": 2, "schedule": "GPipe"}, id="pp3-dp2-gpipe"),
    pytest.param(Layout(tp=2, pp=2, dp=2), {}, id="tp2-pp2-dp2"),
    pytest.param(Layout(pp=3, dp=2, stages="Ett||tL"), {}, id="pp3-dp2-with-an-empty-stage"),
    pytest.param(Layout(pp=2, vpp=2), {"schedule": "Interleaved1F1B"}, id="pp2-vpp2"),
    pytest.param(Layout(tp=4, sequence_parallel=True), {"micro": 2}, id="tp4-sp-micro2"),
    pytest.param(Layout(tp=2, pp=2, dp=2, sequence_parallel=True), {"model": "tiny-llama"}, id="tp2-pp2-dp2-sp-gqa"),
    pytest.param(Layout(tp=2, dp=3, sequence_parallel=True), {"samples": 15}, id="tp2-dp3-sp-of-15-samples"),
]


MODULES = Recompute("selective", modules=("core_attn", "mlp", "norm"))
LAYOUTS += [
    pytest.param(Layout(tp=2, pp=2), {"recompute": Recompute("full")}, id="full-recomputation"),
    pytest.param(
        Layout(pp=2, stages="Ettt|tL"), {"recompute": Recompute("full", num_layers=2)}, id="two-layers-of-a-stage"
    ),
    pytest.param(
        Layout(pp=2, stages="Ettt|tL"), {"recompute": Recompute("full", layers=(0, 2))}, id="a-list-of-layers"
    ),
    pytest.param(
        Layout(tp=3), {"recompute": Recompute("full", distribute=True), "model": "tiny-gpt-6h"}, id="distributed-inputs"
    ),
    pytest.param(
        Layout(tp=2, sequence_parallel=True), {"recompute": MODULES, "model": "tiny-llama"}, id="selective-sp"
    ),
    pytest.param(
        Layout(pp=2, vpp=2), {"recompute": MODULES, "schedule": "ZBVZeroBubble"}, id="selective-split-backward"
    ),
]
LAYOUTS += [
    pytest.param(Layout(tp=4, pp=2), {"dtype": "bf16", "micro": 2}, id="bf16-tp4-pp2"),
    pytest.param(Layout(tp=2, dp=2, sequence_parallel=True), {"dtype": "bf16", "model": "tiny-llama"}, id="bf16-sp"),
]
UNEVEN = [
    pytest.param(
        Layout(tp=3, sequence_parallel=True), {"model": "tiny-gpt-6h", "micro": 2}, "exact", id="tp3-sp-uneven-exact"
    )
]


@pytest.mark.parametrize(
    ("layout", "choices", "mode"),
    in_both_modes(LAYOUTS, fast_on_push=4) + UNEVEN,
)
def test_every_action_of_a_step_records_the_program(layout, choices, mode):
    assert_every_action_records_the_program(plan_of(layout, mode, **choices))


def deferred_step(transport, plan):
    """Forward, I and W of one microbatch."""
    transport.recorder.enabled = True
    tp = transport.group("tp", "tp", range(transport.world_size))
    stage = Stage(plan, plan.stages[0], tp=tp, numerics=make_numerics(plan), recorder=transport.recorder)
    tokens = torch.arange(20).view(1, 20)
    output = stage(Microbatch(0, 0, tokens, tokens), None)
    with transport.recorder.action(Action(0, Kind.I, 0)), stage.weight_work.defer(0):
        torch.autograd.backward(output, torch.ones_like(output))
    assert stage.gradients.num_bytes == 0
    with transport.recorder.action(Action(0, Kind.W, 0)):
        stage.weight_work.run(0)
    return transport.recorder.events


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_split_backward_computes_input_gradients_in_i_and_weight_gradients_in_w(mode):
    plan = plan_of(Layout(tp=2), mode, samples=1)
    for tp_rank, events in enumerate(run_threads(MemoryWorld(2, timeout_s=60), deferred_step, plan)):
        for kind in (Kind.I, Kind.W):
            recorded = Counter(operation for action, operation in events if action is not None and action.kind is kind)
            assert recorded == Counter(operations(plan, kind, 0, tp_rank))
