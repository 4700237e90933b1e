"""Latent attention, norms of heads and their biases, multi-token prediction: actions compute and send
what `core.program` says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import plan
from helpers.program import assert_every_action_records_the_program
from shardproof.core.layout.layout import Layout
from shardproof.core.model.model import ModelSpec
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.core.plan.sections import ScheduleChoice

HEADS = ModelSpec("heads", 2, 32, 48, 6, 3, 8, 256, 32, qk_norm=True, qkv_bias=True)
LATENT = ModelSpec(
    "latent",
    2,
    32,
    48,
    3,
    3,
    12,
    256,
    32,
    q_lora_rank=10,
    kv_lora_rank=14,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
)
WIDE = ModelSpec(
    "wide",
    2,
    32,
    48,
    4,
    4,
    12,
    256,
    32,
    kv_lora_rank=14,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=12,
    bias=True,
    norm="layernorm",
)
SINKS = replace(HEADS, name="sinks", num_heads=8, num_kv_heads=4, attention_sinks=True, logit_softcap=0.5)
OLMO = replace(HEADS, name="olmo", qk_norm=False, qkv_bias=False, whole_qk_norm=True, pre_norms=False, post_norms=True)
AHEAD = ModelSpec("ahead", 2, 32, 48, 4, 2, 8, 256, 32, num_mtp_layers=2)
TIED = ModelSpec(
    "tied",
    2,
    32,
    48,
    2,
    2,
    8,
    256,
    32,
    num_mtp_layers=1,
    tied_embeddings=True,
    position="learned",
    bias=True,
    norm="layernorm",
)
BLOOM = replace(
    TIED, name="bloom", num_mtp_layers=0, num_heads=6, num_kv_heads=3, position="alibi", embedding_norm=True
)


def plan_of(model: ModelSpec, layout: Layout, mode: str, *, micro: int = 1, dtype: str = "fp32", **choices) -> Plan:
    return plan(
        layout, model=model, samples=4, micro=micro, dtype=dtype, mode=mode, reduction_token_block=None, **choices
    )


UP = Recompute("selective", modules=("core_attn", "mla_up_proj"))
LAYOUTS = [
    pytest.param(HEADS, Layout(tp=3), {"micro": 2}, id="heads-tp3"),
    pytest.param(HEADS, Layout(tp=3, dp=2, sequence_parallel=True), {"dtype": "bf16"}, id="heads-tp3-dp2-sp-bf16"),
    pytest.param(
        OLMO, Layout(tp=3, sequence_parallel=True), {"recompute": Recompute("full")}, id="whole-norms-tp3-sp-recomputed"
    ),
    pytest.param(BLOOM, Layout(tp=3, sequence_parallel=True), {"dtype": "bf16"}, id="bloom-tp3-sp-bf16"),
    pytest.param(BLOOM, Layout(tp=3, cp=2), {"sequence": 32, "packed": True}, id="bloom-tp3-cp2-packed"),
    pytest.param(LATENT, Layout(tp=3), {"dtype": "bf16"}, id="latent-tp3-bf16"),
    pytest.param(LATENT, Layout(tp=3, sequence_parallel=True), {"micro": 2}, id="latent-tp3-sp"),
    pytest.param(
        WIDE,
        Layout(tp=2, pp=2, sequence_parallel=True),
        {"schedule": ScheduleChoice("ZBH1")},
        id="latent-biased-split-backward",
    ),
    pytest.param(AHEAD, Layout(tp=2, pp=2), {"micro": 2}, id="two-tokens-ahead-pp2"),
    pytest.param(
        AHEAD,
        Layout(tp=2, dp=2, sequence_parallel=True),
        {"recompute": Recompute("full")},
        id="ahead-on-one-stage-recomputed",
    ),
    pytest.param(
        TIED,
        Layout(tp=2, pp=2, sequence_parallel=True),
        {"dtype": "bf16", "schedule": ScheduleChoice("ZBH1")},
        id="tied-bf16",
    ),
    pytest.param(SINKS, Layout(cp=4, cp_inner=2), {"sequence": 64, "dtype": "bf16"}, id="sinks-heads-exchanged"),
    pytest.param(LATENT, Layout(pp=2, dp=2), {"recompute": UP}, id="latent-up-projections-again"),
]


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize(("model", "layout", "choices"), LAYOUTS)
def test_every_action_of_a_step_records_the_program(model, layout, choices, mode):
    assert_every_action_records_the_program(plan_of(model, layout, mode, **choices))
