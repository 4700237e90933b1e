"""bf16 on real ranks: fp32 leaves and trees, one rounding at each layer's output, fp32 master weights; no bit differs from one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Batch, Numerics, Optimizer, Plan, Precision, Recompute, Train
from shardproof.verify.dynamic.proof import prove


def tiny(layout: Layout, *, model: str = "tiny-gpt", samples: int = 4, micro: int = 1, dropout: float = 0.0, **chosen: Any) -> Plan:
    spec = replace(model_preset(model), num_layers=max(2, layout.num_stages), hidden_dropout=dropout, attention_dropout=dropout)
    return Plan(
        spec,
        cluster_preset("this-host", layout.world_size),
        layout,
        Batch(samples, micro, 24),
        precision=Precision("bf16"),
        numerics=Numerics("exact", gradient_token_block=8, reduction_token_block=4),
        optimizer=Optimizer(clip_grad_norm=0.1),
        train=Train(steps=2, learning_rate=1e-2),
        **chosen,
    )


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(tiny(Layout(tp=4)), id="tp4"),
        pytest.param(tiny(Layout(tp=3, dp=2), model="tiny-gpt-6h", samples=6, micro=3), id="tp3-dp2-micro3"),
        pytest.param(tiny(Layout(tp=2, pp=2), model="tiny-llama", dropout=0.1, recompute=Recompute("full")), id="llama-dropout-full"),
        pytest.param(tiny(Layout(tp=6, sequence_parallel=True), model="tiny-gpt-6h", samples=2, micro=2), id="tp6-sp-micro2"),
    ],
)
def test_no_bit_differs_in_bf16(plan: Plan) -> None:
    proof = prove(plan, transport="memory", steps=1)
    assert proof.findings == () and proof.changes == () and proof.report["bits_different"] == 0
