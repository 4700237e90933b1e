"""Right plans that a rule or the symbolic proof once refused: every one runs with the bits of one device
(`test_matrix_random`)."""

from __future__ import annotations

import pytest

from shardproof import Plan
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.sections import Batch, DataParallel, ScheduleChoice
from shardproof.verify.matrix.modules import modular
from shardproof.verify.matrix.problems import PROBLEMS, Tokens
from shardproof.verify.symbolic.static import prove_static

WHOLE_BLOCKS = Tokens(24, 2, 1)


def plan_of(
    problem: str, tokens: Tokens = WHOLE_BLOCKS, *, schedule: str = "1F1B", shard: int | None = None, **degrees
) -> Plan:
    layout = Layout(**degrees)
    choices = {"schedule": ScheduleChoice(schedule), "data_parallel": DataParallel(shard=shard)}
    return PROBLEMS[problem].plan(layout, tokens, Batch(6 * layout.dp, 1, tokens.sequence), **choices)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(plan_of("llama", cp=2), id="context-parallelism-alone"),
        pytest.param(plan_of("llama", cp=3, zero=2), id="context-parallelism-alone-zero2"),
        pytest.param(plan_of("gpt", cp=2, dp=2, zero=1, shard=2), id="shards-are-the-parts-of-a-sequence"),
        pytest.param(
            plan_of("gpt-mtp", cp=3, pp=2, stages="Ett|tL", schedule="DualPipe"), id="two-replicas-and-context"
        ),
        pytest.param(plan_of("qwen3", tp=2, sequence_parallel=True), id="norms-of-heads-and-of-tokens"),
        pytest.param(plan_of("qwen3", tp=3, cp=2, sequence_parallel=True), id="norms-of-heads-and-of-tokens-of-a-part"),
        pytest.param(plan_of("llama", cp=2, sequence_parallel=True), id="own-tokens-of-one-rank-are-all-tokens"),
        pytest.param(plan_of("mixtral", cp=2), id="auxiliary-loss-counts-over-context"),
        pytest.param(plan_of("mixtral", tp=2, cp=3, sequence_parallel=True), id="auxiliary-loss-counts-over-both"),
        pytest.param(plan_of("gpt-experts", cp=3), id="capacity-compares-over-context"),
        pytest.param(plan_of("qwen3-experts", tp=2, cp=2, sequence_parallel=True), id="both-over-both"),
        pytest.param(plan_of("mixtral", Tokens(6, 2, 4), tp=3), id="fewer-token-blocks-than-ranks"),
    ],
)
def test_a_right_plan_is_refused_by_no_rule_and_no_symbol(plan: Plan) -> None:
    proof = prove_static(plan)
    assert proof.errors == () and proof.ok, proof.text
    assert proof.report["symbolic"]["same_order"]


@pytest.mark.parametrize(("first", "second"), [("one", "cp2"), ("pp2-tp2-cp2", "cp3-tp2-sp")])
def test_modules_whose_sequences_are_cut_are_refused_by_no_rule(first: str, second: str) -> None:
    assert prove_static(modular([("first", first, ()), ("second", second, ("first",))])).ok
