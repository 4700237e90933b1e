"""Heads that tensor-parallel ranks cannot share evenly: earlier ranks hold one key/value group
more, and no bit differs."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.gates import sampled
from helpers.plans import plan
from shardproof.core.base.errors import PlanError
from shardproof.core.layout.layout import Layout
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.verify.dynamic.proof import prove
from shardproof.verify.symbolic import symbolic

OLMO = {"whole_qk_norm": True, "pre_norms": False, "post_norms": True}


def llama(layout: Layout, groups: int, heads: int, **choices: Any) -> Plan:
    """Two layers; `heads` query heads in `groups` key/value groups."""
    return plan(
        layout,
        model=model_preset("tiny-llama"),
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=8,
        samples=4,
        gradient_token_block=6,
        reduction_token_block=3,
        **choices,
    )


@sampled(
    ("plan", "held"),
    [
        pytest.param(llama(Layout(tp=3), 4, 8), [(0, 2), (2, 3), (3, 4)], id="tp3-of-4-groups"),
        pytest.param(
            llama(Layout(tp=3, pp=2, sequence_parallel=True), 5, 10, **OLMO),
            [(0, 2), (2, 4), (4, 5)],
            id="sp-tp3-pp2-of-5-groups-normed-as-a-whole",
        ),
        pytest.param(llama(Layout(tp=4, cp=2), 6, 12), [(0, 2), (2, 4), (4, 5), (5, 6)], id="tp4-cp2-of-6-groups"),
        pytest.param(
            llama(Layout(tp=3, sequence_parallel=True, pp=2), 8, 8), [(0, 3), (3, 6), (6, 8)], id="sp-tp3-pp2-of-8"
        ),
        pytest.param(
            llama(Layout(tp=3, sequence_parallel=True), 8, 8, head_block=3, qk_norm=True),
            [(0, 3), (3, 6), (6, 8)],
            id="sp-tp3-of-3-leaves-with-norms-of-heads",
        ),
        pytest.param(
            llama(Layout(tp=2, cp=2), 6, 12, head_block=2, qk_norm=True), [(0, 4), (4, 6)], id="tp2-cp2-of-3-leaves"
        ),
        pytest.param(
            llama(Layout(tp=2, cp=2), 6, 12, head_block=2, dtype="bf16", **OLMO),
            [(0, 4), (4, 6)],
            id="tp2-cp2-of-3-leaves-normed-as-a-whole",
        ),
        pytest.param(
            llama(Layout(cp=3, dp=2), 2, 4, **{**OLMO, "sequence": 36}), [(0, 2)], id="cp3-dp2-normed-as-a-whole"
        ),
    ],
    on_push=3,
)
def test_no_bit_differs(plan: Plan, held: list[tuple[int, int]]) -> None:
    assert [plan.leaf_sizes.heads.owned_items(plan.layout.tp, rank) for rank in range(plan.layout.tp)] == held
    proof = prove(plan, transport="memory", steps=1)
    assert proof.findings == () and proof.changes == (), proof.text()
    assert proof.report["bits_different"] == 0
    assert symbolic.prove(plan, schedule_for(plan)).same_order


def test_a_rank_without_a_head_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"tp=5 leaves some ranks without any of num_kv_heads=4 .* Use tp <= 4; divisors, \[1, 2, 4\]"
    ):
        llama(Layout(tp=5), 4, 8)
