"""What routers compute and send is what `core.program` says, per action and to the byte: products, counts,
choices, losses, biases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.gates import in_both_modes
from helpers.plans import plan
from helpers.program import assert_every_action_records_the_program
from shardproof.core.layout.layout import Layout
from shardproof.core.model.model import ModelSpec
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.core.plan.train import Train
from shardproof.core.program import EXPERT_BIAS, Collective

MODEL = ModelSpec(
    "moe",
    2,
    24,
    48,
    6,
    6,
    4,
    256,
    64,
    num_experts=6,
    experts_per_token=2,
    expert_ffn_hidden_size=12,
    expert_bias=True,
    first_dense_layers=1,
)
CAPACITY = replace(MODEL, expert_capacity_factor=1.0)
BUSY = Train(router_aux_loss=0.1, router_z_loss=0.01, router_jitter=0.1)
MOE = Recompute("selective", modules=("moe",))


def plan_of(
    layout: Layout, mode: str, *, model=CAPACITY, micro=1, dtype="fp32", schedule="1F1B", train=BUSY, recompute=None
) -> Plan:
    return plan(
        layout,
        model=model,
        samples=6,
        micro=micro,
        dtype=dtype,
        schedule=schedule,
        mode=mode,
        gradient_token_block=6,
        reduction_token_block=3,
        recompute=recompute,
        train=train,
    )


def of_routers(operation) -> bool:
    return ".router" in operation.layer or operation.layer in (EXPERT_BIAS, "aux_loss")


CASES = [
    pytest.param(Layout(), {}, id="one-device"),
    pytest.param(Layout(dp=2), {"micro": 3}, id="dp2-micro3"),
    pytest.param(Layout(tp=2), {}, id="tp2"),
    pytest.param(Layout(tp=2, sequence_parallel=True), {"micro": 2}, id="tp2-sp"),
    pytest.param(Layout(tp=2, dp=2, sequence_parallel=True), {"dtype": "bf16"}, id="tp2-dp2-sp-bf16"),
    pytest.param(Layout(tp=2, sequence_parallel=True), {"train": Train()}, id="tp2-sp-plain"),
    pytest.param(Layout(tp=2, sequence_parallel=True), {"recompute": MOE, "model": MODEL}, id="tp2-sp-recomputed"),
    pytest.param(Layout(pp=2, vpp=2), {"schedule": "ZBVZeroBubble"}, id="split-backward"),
    pytest.param(Layout(pp=2), {"schedule": "DualPipe"}, id="replicas"),
    pytest.param(Layout(cp=2, dp=2), {}, id="cp2-dp2"),
    pytest.param(Layout(tp=2, cp=2, sequence_parallel=True), {"micro": 2}, id="tp2-cp2-sp"),
]
UNEVEN = [pytest.param(Layout(tp=3, sequence_parallel=True), {"micro": 2}, "exact", id="tp3-sp-exact")]


@pytest.mark.parametrize(
    ("layout", "choices", "mode"),
    in_both_modes(CASES, fast_on_push=4) + UNEVEN,
)
def test_every_action_records_what_the_program_says_of_routers(layout, choices, mode):
    found = assert_every_action_records_the_program(plan_of(layout, mode, **choices), only=of_routers)
    assert any(isinstance(operation, Collective) for operation in found) == (layout.world_size > 1)
