"""Under context parallelism, too, ranks compute and send what `core.program` says, to the byte; each of them,
for their parts differ."""

from __future__ import annotations

from dataclasses import fields

import pytest

from helpers.gates import in_both_modes
from helpers.plans import plan
from helpers.program import assert_every_action_records_the_program
from shardproof.core.layout.layout import Layout
from shardproof.core.model.model import ModelSpec
from shardproof.core.plan.plan import (
    Plan,
)

DENSE = {
    field.name: field.default
    for field in fields(ModelSpec)
    if "expert" in field.name or "router" in field.name or field.name == "first_dense_layers"
}
"""No experts: how many rows those get depends on the data."""


def plan_of(layout: Layout, mode: str, *, sequence=24, block=3, samples=4, micro=1, changes=None, **choices) -> Plan:
    return plan(
        layout,
        model=choices.get("model", "tiny-gpt"),
        **changes or {},
        samples=samples,
        micro=micro,
        sequence=sequence,
        context_parallel="ring" if choices.get("ring", False) else None,
        dtype=choices.get("dtype", "fp32"),
        recompute=choices.get("recompute", "none"),
        schedule=choices.get("schedule", "1F1B"),
        mode=mode,
        gradient_token_block=block,
        reduction_token_block=min(block, 3),
    )


LAYOUTS = [
    pytest.param(Layout(cp=2), {"micro": 2, "block": 6}, id="cp2"),
    pytest.param(Layout(cp=3, dp=2), {"model": "tiny-llama", "block": 2, "ring": True}, id="cp3-dp2-gqa-ring"),
    pytest.param(Layout(cp=4), {"samples": 2, "block": 3, "recompute": "full"}, id="cp4-full-recomputation"),
    pytest.param(
        Layout(cp=5), {"samples": 2, "sequence": 30, "recompute": "selective"}, id="cp5-selective-recomputation"
    ),
    pytest.param(Layout(cp=2, tp=2, sequence_parallel=True), {"samples": 3}, id="cp2-tp2-sp"),
    pytest.param(Layout(cp=2, tp=2, dp=2), {"dtype": "bf16"}, id="cp2-tp2-dp2-bf16"),
    pytest.param(Layout(cp=2, pp=2, vpp=2), {"schedule": "ZBVZeroBubble"}, id="cp2-split-backward"),
    pytest.param(Layout(cp=2, pp=2), {"schedule": "DualPipe", "samples": 8}, id="cp2-replicas"),
    pytest.param(
        Layout(cp=2, tp=2), {"model": "tiny-llama", "changes": {"qk_norm": True}}, id="cp2-tp2-norms-of-heads"
    ),
    pytest.param(
        Layout(cp=3),
        {"model": "tiny-llama", "block": 2, "changes": {"qk_norm": True, "qkv_bias": True}},
        id="cp3-norms-of-heads",
    ),
    pytest.param(
        Layout(cp=2, tp=2, sequence_parallel=True), {"changes": {"num_mtp_layers": 2}}, id="cp2-tied-multi-token"
    ),
    pytest.param(Layout(cp=2, cp_inner=2), {"model": "tiny-llama", "recompute": "selective"}, id="cp2-heads"),
    pytest.param(Layout(cp=4, cp_inner=2), {"samples": 2, "ring": True}, id="cp4-heads2-ring"),
    pytest.param(Layout(cp=4, cp_inner=2, dp=2), {"dtype": "bf16", "recompute": "full"}, id="cp4-heads2-dp2-bf16"),
    pytest.param(
        Layout(cp=2, cp_inner=2, tp=2, sequence_parallel=True),
        {"model": "tiny-gpt", "samples": 2},
        id="cp2-heads-tp2-sp",
    ),
    pytest.param(
        Layout(cp=4, cp_inner=2), {"model": "tiny-deepseek", "samples": 2, "changes": DENSE}, id="cp4-heads2-latent"
    ),
    pytest.param(Layout(cp=2, pp=2), {"model": "tiny-deepseek", "changes": DENSE}, id="cp2-latent-multi-token"),
]


@pytest.mark.parametrize(
    ("layout", "choices", "mode"),
    in_both_modes(LAYOUTS, fast_on_push=4),
)
def test_every_action_of_a_step_records_the_program(layout, choices, mode):
    assert_every_action_records_the_program(plan_of(layout, mode, **choices))
