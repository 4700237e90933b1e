"""Mixture of experts on real ranks: routed tokens, spread and cut experts and their gradients, and no bit
differs from one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.gates import sampled
from helpers.plans import plan
from shardproof.core.base.errors import PlanError
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.core.plan.sections import Batch
from shardproof.core.plan.train import Train
from shardproof.verify.dynamic.proof import prove
from shardproof.verify.dynamic.twin import twin
from shardproof.verify.mutations import parse_fault

EIGHT = ModelSpec(
    *("eight", 2, 32, 64, 4, 4, 8, 256, 64),
    num_experts=8,
    experts_per_token=2,
    expert_ffn_hidden_size=24,
    num_shared_experts=1,
    first_dense_layers=1,
)
SIX = ModelSpec(
    *("six", 2, 48, 64, 6, 6, 8, 256, 64),
    activation="gelu",
    norm="layernorm",
    bias=True,
    num_experts=6,
    experts_per_token=3,
    expert_ffn_hidden_size=30,
)
ELEVEN = replace(EIGHT, expert_ffn_hidden_size=11, num_shared_experts=0)
GROUPS = {"num_router_groups": 4, "router_groups_per_token": 2}
CHOOSY = replace(EIGHT, router_scores="sigmoid", expert_capacity_factor=1.0, expert_bias=True, **GROUPS)
LOSSES = Train(steps=2, learning_rate=1e-2, router_aux_loss=0.01, router_z_loss=0.001, router_jitter=0.01)
SP: dict[str, Any] = {"sequence_parallel": True}


def tiny(
    model: ModelSpec = EIGHT,
    *,
    samples: int = 4,
    micro: int = 1,
    sequence: int = 24,
    schedule: str = "1F1B",
    dtype: str = "fp32",
    recompute: Recompute | None = None,
    train: Train | None = None,
    **degrees: Any,
) -> Plan:
    """Blocks of 8 tokens: a sequence of 24 has three of them for each expert. Clipping is active."""
    return plan(
        model=model,
        samples=samples,
        micro=micro,
        sequence=sequence,
        dtype=dtype,
        recompute=recompute,
        schedule=schedule,
        clip_grad_norm=0.1,
        train=train or Train(steps=2, learning_rate=0.01),
        **degrees,
    )


def selective(*modules: str) -> Recompute:
    return Recompute("selective", modules=modules)


PLANS = {
    "ep3-etp1-of-tp3-dp2": tiny(SIX, tp=3, dp=2, ep=3, etp=1, samples=6, micro=3, **SP),
    "ep2-etp3": tiny(SIX, tp=3, dp=2, ep=2, samples=6, micro=1, **SP),
    "ep6-without-sequence-parallelism": tiny(SIX, tp=3, dp=2, ep=6, etp=1, samples=6),
    "etp5-of-dp5": tiny(
        replace(SIX, num_heads=5, num_kv_heads=5, hidden_size=40, num_experts=5), dp=5, etp=5, samples=5, sequence=19
    ),
    "etp4-of-tp2": tiny(tp=2, dp=2, etp=4, **SP),
    "token-blocks-in-two-copies": tiny(tp=2, etp=1, sequence=32, **SP),
    "token-blocks-in-two-copies-without-sequence-parallelism": tiny(tp=2, dp=2, etp=1, sequence=32),
    "pipeline": tiny(tp=2, pp=2, dp=2, ep=4, etp=1, samples=8, schedule="GPipe", **SP),
    "split-backward": tiny(pp=2, vpp=2, dp=2, ep=2, samples=8, schedule="ZBVZeroBubble"),
    "replicas": tiny(pp=2, dp=2, ep=1, samples=8, schedule="DualPipe"),
    "bf16": tiny(tp=2, dp=2, ep=2, dtype="bf16", **SP),
    "recompute-moe": tiny(dp=2, ep=2, recompute=selective("moe", "norm")),
    "choosy": tiny(CHOOSY, tp=2, dp=2, ep=4, etp=1, train=LOSSES, **SP),
    "three-samples-of-two-data-parallel-ranks": tiny(tp=2, dp=2, ep=2, etp=1, samples=3, **SP),
    "context-in-two-copies": tiny(SIX, cp=3, tp=2, sequence=48, **SP),
}


@sampled("name", PLANS, on_push=2)
def test_no_bit_differs_with_experts(name: str) -> None:
    steps = 2 if PLANS[name].model.expert_bias else 1  # the first step changes the bias that the second one routes with
    proof = prove(PLANS[name], transport="memory", steps=steps)
    assert proof.findings == () and proof.changes == () and proof.report["bits_different"] == 0
    assert proof.report["tensors_compared"] > 100


def test_over_gloo_too() -> None:
    assert prove(tiny(tp=2, dp=2, ep=2, **SP), steps=1).ok


def test_a_sum_of_expert_gradients_that_a_rank_drops_is_found_there() -> None:
    name = "layers.1.mlp.experts.up.weight"
    proof = prove(tiny(dp=4, ep=2), transport="memory", steps=1, fault=parse_fault(f"drop-reduction:3:{name}"))
    first = proof.report["first_divergence"]
    assert (first["tensor"], first["phase"]) == (name, "gradient") and 3 in first["ranks"]


def test_the_twin_of_a_plan_with_experts_keeps_them_spread_and_cut() -> None:
    layout = Layout(tp=2, dp=16, pp=4, ep=8, sequence_parallel=True)
    whole = Plan(model_preset("mixtral-8x7b"), cluster_preset("dgx-h100", 128), layout, Batch(128, 1, 4096))
    small, changes = twin(whole)
    assert (small.layout.ep, small.layout.expert_tp, small.layout.pp) == (2, 2, 2)
    assert small.model.num_experts == 8 and small.model.experts_per_token == 2
    assert "layout.ep 8 -> 2: to fit this host." in changes


@pytest.mark.parametrize(
    ("degrees", "sentence"),
    [
        (
            {"tp": 2, "etp": 1, "sequence": 24},
            ("cut at token 12 inside a block of gradient_token_block=8.*gradient_token_block = 6"),
        ),
        (
            {"tp": 4, "etp": 1, "sequence": 12},
            ("fewer than 4 blocks of reduction_token_block=4. Use an etp.ep that tp divides"),
        ),
        (
            {"model": ELEVEN, "dp": 11, "etp": 11, "samples": 11},
            ("inside a leaf of 11: there are only 1 leaves. Use etp among .1."),
        ),
    ],
)
def test_cuts_inside_a_leaf_of_expert_gradients_are_refused_with_what_admits_them(
    degrees: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(PlanError, match=sentence):
        tiny(**degrees)
