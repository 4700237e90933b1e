"""bf16 on real ranks: fp32 leaves and trees, one rounding at each layer's output, fp32 master weights; no bit
differs from one device."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.gates import sampled
from helpers.plans import training_plan
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.verify.dynamic.proof import prove


def tiny(
    layout: Layout, *, model: str = "tiny-gpt", samples: int = 4, micro: int = 1, dropout: float = 0.0, **chosen: Any
) -> Plan:
    return training_plan(
        layout,
        model=model,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        samples=samples,
        micro=micro,
        dtype="bf16",
        **chosen,
    )


@sampled(
    "plan",
    [
        pytest.param(tiny(Layout(tp=4)), id="tp4"),
        pytest.param(tiny(Layout(tp=3, dp=2), model="tiny-gpt-6h", samples=6, micro=3), id="tp3-dp2-micro3"),
        pytest.param(
            tiny(Layout(tp=2, pp=2), model="tiny-llama", dropout=0.1, recompute=Recompute("full")),
            id="llama-dropout-full",
        ),
        pytest.param(
            tiny(Layout(tp=6, sequence_parallel=True), model="tiny-gpt-6h", samples=2, micro=2), id="tp6-sp-micro2"
        ),
    ],
    on_push=2,
)
def test_no_bit_differs_in_bf16(plan: Plan) -> None:
    proof = prove(plan, transport="memory", steps=1)
    assert proof.findings == () and proof.changes == () and proof.report["bits_different"] == 0
