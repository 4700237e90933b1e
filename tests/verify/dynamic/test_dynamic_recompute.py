"""Recomputation and dropout on real ranks against one device that keeps every activation: no bit
differs, whatever the layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.gates import sampled
from helpers.plans import training_plan
from shardproof.core.base.errors import ModelError, PlanError
from shardproof.core.layout.layout import Layout
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.core.plan.sections import Precision, ScheduleChoice
from shardproof.verify.dynamic.proof import prove
from shardproof.verify.run.proof_run import one_device

FULL, FIRST = Recompute("full"), Recompute("full", num_layers=1)
SPREAD = Recompute("full", distribute=True)
MODULES = Recompute("selective", modules=("core_attn", "mlp", "norm"))


def tiny(layout: Layout, *, dropout: float = 0.2, **chosen: Any) -> Plan:
    layers = layout.stages.count("t") if layout.stages else max(2, layout.num_stages)
    return training_plan(
        layout, num_layers=layers, hidden_dropout=dropout, attention_dropout=dropout / 2, **{"samples": 4, **chosen}
    )


@sampled(
    "plan",
    [
        pytest.param(tiny(Layout(tp=4), recompute=MODULES, dropout=0.0), id="selective-tp4"),
        pytest.param(tiny(Layout(tp=3, dp=2), model="tiny-gpt-6h", samples=6, micro=3), id="dropout-tp3-dp2-micro3"),
        pytest.param(
            tiny(Layout(tp=2, dp=2, sequence_parallel=True), recompute=MODULES, model="tiny-llama"),
            id="dropout-selective-sp",
        ),
        pytest.param(
            tiny(Layout(tp=2, pp=2, sequence_parallel=True), recompute=FULL, micro=2, schedule=ScheduleChoice("GPipe")),
            id="dropout-full-tp2-pp2-sp-micro2",
        ),
        pytest.param(
            tiny(Layout(pp=2, vpp=2), recompute=FIRST, schedule=ScheduleChoice("ZBVZeroBubble")),
            id="dropout-split-backward",
        ),
        pytest.param(
            tiny(Layout(tp=2, pp=2, stages="Ettt|tL"), recompute=Recompute("full", layers=(0, 2, 3), distribute=True)),
            id="dropout-list-of-layers",
        ),
        pytest.param(
            tiny(Layout(tp=3, dp=2), recompute=SPREAD, model="tiny-gpt-6h", samples=6, micro=3),
            id="dropout-distributed-tp3-dp2",
        ),
        pytest.param(
            tiny(
                Layout(tp=2, pp=2, vpp=2),
                recompute=SPREAD,
                schedule=ScheduleChoice("ZBVZeroBubble"),
                precision=Precision("bf16"),
            ),
            id="dropout-distributed-bf16-split-backward",
        ),
    ],
    on_push=2,
)
def test_no_bit_differs_from_one_device_that_keeps_everything(plan: Plan) -> None:
    assert one_device(plan).recompute == Recompute("none")
    proof = prove(plan, transport="memory", steps=2)
    assert proof.findings == () and proof.changes == () and proof.report["bits_different"] == 0


def test_inputs_are_distributed_only_where_they_are_kept_whole() -> None:
    with pytest.raises(
        PlanError, match=r'distribute=true spreads .* recompute.mode="selective". Set recompute.mode = "full"'
    ):
        tiny(Layout(tp=2), recompute=Recompute("selective", distribute=True))
    with pytest.raises(
        PlanError, match=r"with layout.sequence_parallel=true each holds its own tokens only. Leave one of the two out"
    ):
        tiny(Layout(tp=2, sequence_parallel=True), recompute=SPREAD)


@pytest.mark.parametrize(("share", "words"), [(-0.1, "at least 0"), (1.0, "below 1")])
def test_a_share_that_is_none_is_refused(share: float, words: str) -> None:
    with pytest.raises(ModelError, match=f"hidden_dropout={share} must be {words}"):
        replace(model_preset("tiny-gpt"), hidden_dropout=share)
