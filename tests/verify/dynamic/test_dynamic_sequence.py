"""Sequence parallelism on real ranks: each holds its own tokens between the cut layers, and no bit
differs from one device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from helpers.gates import sampled
from helpers.plans import training_plan
from shardproof.core.base.errors import PlanError
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Numerics
from shardproof.verify.dynamic.proof import prove
from shardproof.verify.mutations import parse_fault

# Blocks of 4 tokens: a sequence of 24 has six leaves, one of 22 a last one that is shorter. Clipping is active.
tiny = partial(training_plan, samples=6, schedule="1F1B", sequence_parallel=True)


SIX_OF_22 = [(4 * i, min(4 * i + 4, 22)) for i in range(6)]


@sampled(
    ("plan", "bounds"),
    [
        pytest.param(tiny(tp=2, pp=2, dp=2, samples=4), [(0, 12), (12, 24)], id="tp2-pp2-dp2"),
        pytest.param(tiny(tp=4, samples=3, micro=3), [(0, 8), (8, 16), (16, 20), (20, 24)], id="tp4-micro3-uneven"),
        pytest.param(tiny(tp=3, dp=2, model="tiny-gpt-6h", micro=3), [(0, 8), (8, 16), (16, 24)], id="tp3-dp2-micro3"),
        pytest.param(tiny(tp=6, model="tiny-gpt-6h", samples=2, micro=2, sequence=22), SIX_OF_22, id="tp6"),
        pytest.param(
            tiny(tp=2, dp=3, model="tiny-llama", micro=2, sequence=19), [(0, 12), (12, 19)], id="llama-tp2-dp3-of-19"
        ),
        pytest.param(
            tiny(tp=2, pp=2, vpp=2, samples=4, schedule="ZBVZeroBubble"), [(0, 12), (12, 24)], id="split-backward"
        ),
    ],
    on_push=3,
)
def test_no_bit_differs_with_sequence_parallelism(plan: Plan, bounds: list[tuple[int, int]]) -> None:
    assert [plan.tokens_of(tp_rank) for tp_rank in range(plan.layout.tp)] == bounds
    proof = prove(plan, transport="memory", steps=1)
    assert proof.findings == () and proof.changes == () and proof.report["bits_different"] == 0
    assert proof.report["tensors_compared"] > 100


def test_over_gloo_in_fast_numerics_too_the_twin_keeps_sequence_parallelism() -> None:
    fast = replace(tiny(tp=3, model="tiny-gpt-6h", samples=3), numerics=Numerics("fast"))
    proof = prove(fast, steps=1)
    assert proof.ok and proof.changes == ("numerics.mode fast -> exact: only exact numerics promise bits.",)


def test_a_dropped_reduction_is_found_on_the_rank_that_has_the_wrong_tokens() -> None:
    fault = parse_fault("drop-reduction:1:layers.0.mlp.down")
    proof = prove(tiny(tp=3, model="tiny-gpt-6h", samples=2), transport="memory", steps=1, fault=fault)
    first = proof.report["first_divergence"]
    assert (first["ranks"], first["tensor"], first["phase"]) == ([1], "layers.0.mlp", "activation")


def test_a_cut_inside_a_block_of_tokens_is_refused_with_what_admits_it() -> None:
    with pytest.raises(
        PlanError, match=r"sequence=12 has 3 of them for tp=4. Use reduction_token_block <= 3, sequence >= 13, or"
    ):
        tiny(tp=4, sequence=12)
