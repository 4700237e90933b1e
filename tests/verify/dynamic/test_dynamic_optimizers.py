"""Optimizers other than AdamW have the bits of one device in every layout, and one device those of formulas."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from helpers.gates import sampled
from helpers.plans import plan
from shardproof import Plan
from shardproof.core.plan.optimizer import Optimizer
from shardproof.core.plan.parameter_groups import ParameterGroup
from shardproof.core.plan.runtime import Offload
from shardproof.verify.dynamic.proof import prove

SGD = Optimizer(name="sgd", nesterov=True, clip_grad_norm=0.1)
MUON = Optimizer(name="muon", clip_grad_norm=0.1)
GROUPED = Optimizer(
    clip_grad_norm=0.1,
    groups=(
        ParameterGroup("embedding.*|layers.0.mlp.up.weight|.*qkv.bias|layers.1.attention.norm.*", frozen=True),
        ParameterGroup(".*norm.weight", weight_decay=0.3),
        ParameterGroup("layers.1.mlp.*", learning_rate_multiplier=3.0, weight_decay=0.0),
    ),
)
GROUPED_MUON = replace(
    MUON,
    groups=(
        ParameterGroup(".*experts.up.weight", frozen=True),
        ParameterGroup(".*router.weight", learning_rate_multiplier=0.5),
    ),
)
small = partial(plan, mode="exact", steps=2, learning_rate=0.05, samples=4)


@sampled(
    "plan",
    [
        pytest.param(small(tp=2, pp=2, dp=2, optimizer=SGD), id="sgd-tp2-pp2-dp2"),
        pytest.param(small(model="tiny-moe", ep=2, dp=2, zero=2, tp=2, etp=1, optimizer=SGD), id="sgd-experts-zero2"),
        pytest.param(small(dp=2, zero=3, optimizer=SGD, offload=Offload(optimizer=0.5)), id="sgd-zero3-offloaded"),
        pytest.param(small(tp=2, pp=2, dp=2, optimizer=GROUPED), id="groups-tp2-pp2-dp2"),
        pytest.param(
            small(dp=2, zero=3, optimizer=GROUPED, dtype="bf16", offload=Offload(optimizer=0.5)),
            id="groups-zero3-bf16-offloaded",
        ),
        pytest.param(small(model="tiny-moe", ep=2, dp=2, zero=1, optimizer=GROUPED_MUON), id="groups-muon-experts"),
        pytest.param(small(tp=2, pp=2, dp=2, optimizer=MUON), id="muon-tp2-pp2-dp2"),
        pytest.param(small(model="tiny-moe", ep=2, dp=2, zero=2, tp=2, etp=1, optimizer=MUON), id="muon-experts-zero2"),
        pytest.param(small(model="tiny-llama", dp=3, zero=3, samples=6, optimizer=MUON), id="muon-zero3"),
        pytest.param(
            small(pp=2, dp=2, zero=1, schedule="DualPipe", num_layers=4, samples=8, optimizer=MUON),
            id="muon-replicas",
        ),
    ],
    on_push=1,
)
def test_no_bit_differs(plan: Plan) -> None:
    proof = prove(plan, transport="memory", steps=2)
    assert proof.findings == () and proof.report["bits_different"] == 0
    assert proof.report["reference"]["ok"] and proof.report["reference"]["updates"] > 0
