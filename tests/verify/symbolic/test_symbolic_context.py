"""Context parallelism on expressions: right plans are right, and every exchange of a part of a sequence counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import plan
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.plan import (
    Plan,
)
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.core.program import Collective, operations, stage_ops
from shardproof.core.schedule import lower
from shardproof.core.schedule.action import Kind
from shardproof.verify.symbolic.layers import Program
from shardproof.verify.symbolic.symbolic import VALUE_RULE, SymbolicProof, prove


def plan_of(
    model="tiny-gpt",
    mode="exact",
    *,
    recompute="none",
    ring=False,
    schedule="1F1B",
    qk_norm=False,
    sequence=24,
    **degrees,
) -> Plan:
    layout = Layout(**degrees)
    return plan(
        layout,
        model=model,
        num_layers=max(2 if "deepseek" in model else 1, layout.num_stages),
        qk_norm=qk_norm,
        sequence=sequence,
        samples=8 * layout.dp,
        context_parallel="ring" if ring else None,
        recompute=recompute,
        schedule=schedule,
        mode=mode,
        gradient_token_block=2,
        reduction_token_block=2,
    )


def proof_of(plan: Plan, program: Program | None = None) -> SymbolicProof:
    return prove(plan, lower(schedule_for(plan)), program)


def wrong_places(plan: Plan, program: Program) -> list[str]:
    return [finding.where for finding in proof_of(plan, program).findings if finding.rule == VALUE_RULE]


PLANS = [
    pytest.param({"cp": 2}, id="cp2"),
    pytest.param({"cp": 3, "dp": 2, "ring": True, "model": "tiny-llama"}, id="cp3-dp2-ring"),
    pytest.param({"cp": 2, "tp": 2, "pp": 2, "dp": 2, "sequence_parallel": True}, id="cp2-tp2-pp2-dp2-sp"),
    pytest.param(
        {"cp": 2, "tp": 2, "qk_norm": True, "recompute": "selective", "model": "tiny-llama"}, id="cp2-norms-of-heads"
    ),
    pytest.param({"cp": 2, "pp": 2, "schedule": "DualPipe", "recompute": "full"}, id="cp2-replicas"),
    pytest.param({"cp": 4, "cp_inner": 2, "sequence": 32, "tp": 2, "sequence_parallel": True}, id="cp4-heads2-tp2-sp"),
    pytest.param(
        {"cp": 4, "cp_inner": 2, "sequence": 32, "ring": True, "model": "tiny-deepseek"}, id="cp4-heads2-ring-latent"
    ),
    pytest.param(
        {"cp": 2, "tp": 2, "ep": 2, "sequence_parallel": True, "model": "tiny-deepseek"}, id="cp2-latent-experts-mtp"
    ),
    pytest.param({"cp": 2, "dp": 2, "ep": 4, "model": "tiny-moe"}, id="cp2-dp2-ep4"),
]


@pytest.mark.parametrize("choices", PLANS)
def test_exact_plans_are_the_same_mathematics_in_the_same_order(choices):
    proof = proof_of(plan_of(**choices))
    assert proof.findings == () and proof.num_values > 50 and proof.same_order


@pytest.mark.parametrize("choices", PLANS)
def test_fast_plans_are_the_same_mathematics_in_another_order(choices):
    proof = proof_of(plan_of(mode="fast", **choices))
    assert proof.same_mathematics and proof.ok and not proof.same_order
    assert any("attention.core (forward)" in finding.what for finding in proof.findings)


def over_cp(ops: tuple) -> list[int]:
    return [index for index, each in enumerate(ops) if isinstance(each, Collective) and each.axis.startswith("cp")]


def changed(ops: tuple, index: int, how: str) -> tuple:
    ops = list(ops)
    if how == "drop":
        del ops[index]
    elif how == "double":
        ops.insert(index, ops[index])
    else:
        ops[index] = replace(ops[index], axis="tp")
    return tuple(ops)


@pytest.mark.parametrize("how", ["drop", "double", "axis"])
@pytest.mark.parametrize(
    "choices",
    [
        pytest.param({"cp": 2, "recompute": "full"}, id="exact"),
        pytest.param({"cp": 3, "mode": "fast", "ring": True}, id="fast-ring"),
        pytest.param({"cp": 2, "cp_inner": 2, "mode": "fast", "model": "tiny-llama"}, id="fast-heads"),
        pytest.param({"cp": 4, "cp_inner": 2, "sequence": 32, "recompute": "full"}, id="heads2"),
        pytest.param({"cp": 2, "tp": 2, "sequence_parallel": True, "ring": True}, id="exact-sp-ring"),
    ],
)
def test_every_exchange_of_a_layer_counts(choices, how):
    plan, num_mutants = plan_of(**choices), 0
    for work in stage_ops(plan, 0):
        for phase in ("forward", "input_gradient", "recomputed"):
            for index in over_cp(getattr(work, phase)):

                def works(plan, stage, tp_rank, layer=work.layer, phase=phase, index=index):
                    return [
                        replace(each, **{phase: changed(getattr(each, phase), index, how)})
                        if each.layer == layer
                        else each
                        for each in stage_ops(plan, stage, tp_rank)
                    ]

                wrong = wrong_places(plan, Program(works=works))
                assert wrong and (work.layer in wrong[0] or "REDUCE_GRAD, embedding" in wrong[0]), (
                    work.layer,
                    phase,
                    index,
                    wrong,
                )
                num_mutants += 1
    assert num_mutants >= 4


@pytest.mark.parametrize("how", ["drop", "double", "axis"])
@pytest.mark.parametrize(
    "choices",
    [
        pytest.param({"cp": 2, "tp": 2, "sequence_parallel": True}, id="one-copy-sp"),
        pytest.param({"cp": 3, "dp": 2, "tp": 2, "sequence_parallel": True}, id="two-copies-sp"),
        pytest.param({"cp": 2, "dp": 2, "mode": "fast"}, id="fast"),
        pytest.param({"cp": 2, "pp": 2, "schedule": "DualPipe"}, id="replicas"),
    ],
)
def test_every_exchange_of_gradients_and_losses_counts(choices, how):
    plan = plan_of(**choices)
    for kind in (Kind.W, Kind.REDUCE_GRAD, Kind.STEP):
        for index, operation in enumerate(operations(plan, kind, 0)):
            if not isinstance(operation, Collective) or (kind is Kind.W and operation.layer):
                continue
            other = "dp" if operation.axis in ("tp", "model") else "tp"

            def actions(
                plan, each_kind, stage, tp_rank=0, dp_rank=0, *, replica=0, kind=kind, index=index, other=other
            ):
                ops = operations(plan, each_kind, stage, tp_rank, dp_rank, replica=replica)
                if each_kind is not kind or stage != 0:
                    return ops
                return (
                    tuple(replace(each, axis=other) if i == index else each for i, each in enumerate(ops))
                    if how == "axis"
                    else changed(ops, index, how)
                )

            wrong = wrong_places(plan, Program(actions=actions))
            place = {Kind.W: "0W", Kind.REDUCE_GRAD: "0REDUCE_GRAD", Kind.STEP: "STEP"}[kind]
            assert wrong and all(place in where for where in wrong), (kind, operation, wrong)


def test_a_missing_sum_of_key_gradients_says_so():
    plan = plan_of(cp=3)

    def works(plan, stage, tp_rank):
        return [
            replace(each, input_gradient=each.input_gradient[:-1]) if each.layer == "layers.0.attention.core" else each
            for each in stage_ops(plan, stage, tp_rank)
        ]

    (finding,) = proof_of(plan, Program(works=works)).findings
    assert finding.what == "it is the sum over leaves [0, 1) of 3 only: nothing has added the other ranks' parts."


@pytest.mark.parametrize(("cp", "num_heads"), [(2, 4), (3, 6)])
def test_as_many_heads_as_tokens_are_not_taken_for_a_sequence(cp, num_heads):
    """The gradient of a norm of heads is a sum over heads, in the place where others have tokens."""
    sizes = {
        "hidden_size": 4 * num_heads,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "max_positions": num_heads,
    }
    blocks = {"gradient_token_block": 1, "reduction_token_block": 1}
    few = plan(Layout(cp=cp), qk_norm=True, sequence=num_heads, samples=1, **sizes, **blocks)
    assert proof_of(few).findings == ()
