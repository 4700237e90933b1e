"""Norms and biases of heads, latent attention and multi-token prediction on real ranks: no bit
differs from one device."""

from __future__ import annotations

import pytest

from helpers.gates import sampled
from helpers.plans import plan
from shardproof.core.model.model import ModelSpec
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.verify.dynamic.proof import prove
from shardproof.verify.matrix import problems
from shardproof.verify.mutations import parse_fault

QWEN = ModelSpec("qwen", 2, 32, 50, 12, 6, 4, 256, 32, qk_norm=True, qkv_bias=True)
FIVE = ModelSpec("five", 2, 40, 50, 5, 5, 8, 256, 32, qk_norm=True, norm="layernorm", bias=True, tied_embeddings=True)
LATENT = ModelSpec(
    "latent",
    2,
    32,
    50,
    6,
    6,
    6,
    256,
    32,
    q_lora_rank=10,
    kv_lora_rank=12,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=4,
)
YARN = ModelSpec(
    "yarn",
    2,
    32,
    50,
    3,
    3,
    6,
    256,
    32,
    kv_lora_rank=12,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=6,
    rope_scaling="yarn",
    rope_factor=4.0,
    rope_original_positions=8,
    bias=True,
    attention_dropout=0.1,
    hidden_dropout=0.1,
)
AHEAD = ModelSpec(
    "ahead",
    2,
    32,
    50,
    6,
    3,
    4,
    256,
    32,
    num_mtp_layers=2,
    rope_scaling="llama3",
    rope_factor=2.0,
    rope_original_positions=16,
)
TIED = ModelSpec(
    "tied",
    3,
    32,
    50,
    4,
    4,
    6,
    256,
    32,
    kv_lora_rank=12,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=4,
    num_mtp_layers=1,
    tied_embeddings=True,
)


def tiny(
    model: ModelSpec,
    *,
    samples: int = 4,
    micro: int = 1,
    sequence: int = 22,
    dtype: str = "fp32",
    schedule: str = "1F1B",
    recompute: Recompute | None = None,
    train: dict | None = None,
    **layout,
) -> Plan:
    """Blocks of 8 and 4 tokens: a sequence of 22 has a short last one of each. Clipping is active."""
    return plan(
        model=model,
        samples=samples,
        micro=micro,
        sequence=sequence,
        dtype=dtype,
        schedule=schedule,
        recompute=recompute,
        clip_grad_norm=0.05,
        steps=2,
        learning_rate=0.01,
        **train or {},
        **layout,
    )


UP = Recompute("selective", modules=("core_attn", "mla_up_proj", "norm"))
LAYOUTS = [
    pytest.param(tiny(QWEN, tp=6, sequence_parallel=True, samples=3, micro=3), id="qwen-tp6-sp-micro3"),
    pytest.param(tiny(FIVE, tp=5, sequence_parallel=True, dtype="bf16"), id="five-heads-tp5-sp-bf16"),
    pytest.param(tiny(QWEN, tp=2, pp=2, sequence_parallel=True, schedule="ZBH1"), id="qwen-split-backward"),
    pytest.param(tiny(LATENT, tp=2, pp=2, recompute=UP, dtype="bf16"), id="latent-recomputed-bf16"),
    pytest.param(tiny(YARN, tp=3, dp=2, pp=1, recompute=Recompute("full")), id="latent-yarn-biased-dropout"),
    pytest.param(tiny(AHEAD, tp=3, pp=2, sequence_parallel=True, micro=2), id="two-ahead-tp3-pp2-sp"),
    pytest.param(
        tiny(AHEAD, dp=2, recompute=Recompute("full"), train={"ignore_token": 32}), id="two-ahead-ignored-tokens"
    ),
    pytest.param(
        tiny(TIED, pp=2, vpp=2, stages="Et|t|t|L", schedule="ZBVZeroBubble", samples=4),
        id="tied-ahead-both-ends-on-one-rank",
    ),
]


WINDOWED = ModelSpec(
    "windowed",
    2,
    32,
    50,
    6,
    3,
    4,
    256,
    48,
    sliding_window=5,
    rope_scaling="dynamic",
    rope_factor=2.0,
    rope_original_positions=8,
)
CAPPED = ModelSpec("capped", 2, 32, 50, 6, 3, 8, 256, 64, **problems.CAPPED)
BLOOM = ModelSpec("bloom", 2, 32, 50, 12, 6, 5, 256, 64, **problems.BLOOM, tied_embeddings=True)
FAR = ModelSpec("far", 2, 32, 50, 12, 6, 4, 256, 64, position="alibi", bias=True, attention_dropout=0.1)
BOTH = ModelSpec(
    "both",
    2,
    32,
    50,
    8,
    4,
    8,
    256,
    64,
    **{**problems.SINKS, "attention_softcap": 1.5},
    qk_norm=True,
    attention_dropout=0.1,
)
DISTRIBUTED = Recompute("full", distribute=True)
LAYOUTS = [  # first what no other test of layouts has
    pytest.param(tiny(BOTH, cp=4, cp_inner=2, sequence=64, samples=1), id="sinks-caps-cp4-heads-exchanged"),
    pytest.param(tiny(CAPPED, tp=3, pp=2, samples=2), id="caps-local-base-tp3-pp2"),
    pytest.param(tiny(BLOOM, tp=3, cp=2, sequence=32, sequence_parallel=True, dtype="bf16"), id="bloom-tp3-cp2-sp"),
    pytest.param(tiny(FAR, cp=4, cp_inner=2, sequence=64, samples=1), id="alibi-dropout-cp4-heads-exchanged"),
    *LAYOUTS,
    pytest.param(tiny(BOTH, tp=2, cp=2, sequence=32, train={"packed": True}, dtype="bf16"), id="sinks-packed-cp2"),
    pytest.param(tiny(BOTH, tp=2, recompute=Recompute("selective")), id="sinks-core-recomputed"),
]
LAYOUTS += [
    pytest.param(tiny(WINDOWED, cp=2, tp=3, sequence=32), id="window-tp3-cp2"),
    pytest.param(tiny(QWEN, tp=2, cp=3, sequence=48, sequence_parallel=True), id="qwen-tp2-cp3-sp"),
    pytest.param(tiny(LATENT, tp=3, cp=2, sequence=32, micro=2), id="latent-tp3-cp2"),
    pytest.param(tiny(AHEAD, tp=3, cp=2, sequence=32, train={"packed": True}), id="two-ahead-cp2-packed"),
    pytest.param(tiny(AHEAD, tp=3, recompute=DISTRIBUTED), id="two-ahead-distributed-recompute"),
]


@sampled("plan", LAYOUTS, on_push=4)
def test_no_bit_differs(plan: Plan) -> None:
    proof = prove(plan, transport="memory", steps=1)
    assert proof.findings == () and proof.changes == () and proof.report["bits_different"] == 0
    assert proof.report["tensors_compared"] > 120


def test_a_dropped_sum_of_rotary_keys_is_found_where_it_happens() -> None:
    fault = parse_fault("drop-reduction:1:layers.1.attention.kv_up")
    proof = prove(tiny(LATENT, tp=3, samples=1), transport="memory", steps=1, fault=fault)
    first = proof.report["first_divergence"]
    assert (first["ranks"], first["tensor"], first["phase"]) == ([1], "layers.1.attention.norm", "activation gradient")


def test_what_is_predicted_further_ahead_is_compared_too() -> None:
    fault = parse_fault("drop-reduction:1:layers.2.mlp.down")
    proof = prove(tiny(AHEAD, tp=3, samples=1), transport="memory", steps=1, fault=fault)
    first = proof.report["first_divergence"]
    assert (first["ranks"], first["tensor"], first["phase"]) == ([1], "layers.2.mlp", "activation")
