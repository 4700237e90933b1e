"""Recomputation and dropout on real ranks against one device that keeps every activation: no bit differs, whatever the layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardproof.core.cluster_presets import cluster_preset
from shardproof.core.errors import ModelError
from shardproof.core.layout import Layout
from shardproof.core.model_presets import model_preset
from shardproof.core.plan import Batch, Numerics, Optimizer, Plan, Precision, Recompute, ScheduleChoice, Train
from shardproof.verify.dynamic import one_device, prove

FULL, FIRST = Recompute("full"), Recompute("full", num_layers=1)
MODULES = Recompute("selective", modules=("core_attn", "mlp", "norm"))


def tiny(layout: Layout, *, model: str = "tiny-gpt", samples: int = 4, micro: int = 1, dropout: float = 0.2, **chosen: Any) -> Plan:
    spec = replace(model_preset(model), num_layers=max(2, layout.num_stages), hidden_dropout=dropout, attention_dropout=dropout / 2)
    return Plan(
        spec,
        cluster_preset("this-host", layout.world_size),
        layout,
        Batch(samples, micro, 24),
        precision=Precision("fp32"),
        numerics=Numerics("exact", gradient_token_block=8, reduction_token_block=4),
        optimizer=Optimizer(clip_grad_norm=0.1),
        train=Train(steps=2, learning_rate=1e-2),
        **chosen,
    )


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(tiny(Layout(tp=4), recompute=MODULES, dropout=0.0), id="selective-tp4"),
        pytest.param(tiny(Layout(tp=3, dp=2), model="tiny-gpt-6h", samples=6, micro=3), id="dropout-tp3-dp2-micro3"),
        pytest.param(tiny(Layout(tp=2, dp=2, sequence_parallel=True), recompute=MODULES, model="tiny-llama"), id="dropout-selective-sp"),
        pytest.param(
            tiny(Layout(tp=2, pp=2, sequence_parallel=True), recompute=FULL, micro=2, schedule=ScheduleChoice("GPipe")),
            id="dropout-full-tp2-pp2-sp-micro2",
        ),
        pytest.param(tiny(Layout(pp=2, vpp=2), recompute=FIRST, schedule=ScheduleChoice("ZBVZeroBubble")), id="dropout-split-backward"),
    ],
)
def test_no_bit_differs_from_one_device_that_keeps_everything(plan: Plan) -> None:
    assert one_device(plan).recompute == Recompute("none")
    proof = prove(plan, transport="memory", steps=2)
    assert proof.findings == () and proof.changes == () and proof.report["bits_different"] == 0


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ModelError, match=r"hidden_dropout=.* must be at least 0 and below 1"):
        replace(model_preset("tiny-gpt"), hidden_dropout=share)
