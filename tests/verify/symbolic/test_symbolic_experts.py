"""The symbolic proof of layers with experts: right plans are right, and every product and
collective of theirs counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.plans import plan
from shardproof.core.layout.layout import Layout
from shardproof.core.model.model import ModelSpec
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.core.program import Collective, operations, stage_ops
from shardproof.core.schedule import lower
from shardproof.core.schedule.action import Kind
from shardproof.verify.symbolic.layers import Program
from shardproof.verify.symbolic.symbolic import VALUE_RULE, SymbolicProof, prove

EIGHT = ModelSpec(
    *("eight", 1, 32, 64, 4, 4, 8, 256, 64),
    num_experts=8,
    experts_per_token=2,
    expert_ffn_hidden_size=24,
    num_shared_experts=1,
)
BIASED = replace(EIGHT, norm="layernorm", activation="gelu", bias=True, num_shared_experts=0)
CHOOSY = replace(EIGHT, router_scores="sigmoid", expert_capacity_factor=1.0, expert_bias=True)
SP: dict[str, Any] = {"sequence_parallel": True}


def plan_of(
    model: ModelSpec = EIGHT,
    mode: str = "exact",
    *,
    micro: int = 1,
    schedule: str = "1F1B",
    recompute: str = "none",
    router_aux_loss: float = 0.0,
    sequence: int = 32,
    **degrees: Any,
) -> Plan:
    layout = Layout(**degrees)
    return plan(
        layout,
        model=model,
        samples=4 * micro * layout.dp,
        micro=micro,
        sequence=sequence,
        recompute=Recompute("selective", modules=("moe",)) if recompute == "moe" else Recompute(recompute),
        schedule=schedule,
        mode=mode,
        router_aux_loss=router_aux_loss,
    )


def proof_of(plan: Plan, program: Program | None = None) -> SymbolicProof:
    return prove(plan, lower(schedule_for(plan)), program)


RIGHT = {
    "one-device": {},
    "ep2": {"dp": 4, "ep": 2, "micro": 2},
    "etp2-ep2": {"tp": 2, "dp": 2, "ep": 2, **SP},
    "etp2-ep2-whole-tokens": {"tp": 2, "dp": 2, "ep": 2},
    "ep4-of-tp2-dp2": {"tp": 2, "dp": 2, "ep": 4, "etp": 1, **SP},
    "ep2-of-tp2-whole-tokens": {"tp": 2, "ep": 2, "etp": 1},
    "etp4-of-tp2": {"tp": 2, "dp": 2, "etp": 4, **SP},
    "a-sequence-in-two-copies": {"tp": 2, "etp": 1, **SP},
    "pipeline": {"tp": 2, "pp": 2, "dp": 2, "ep": 2, "schedule": "ZBH1", **SP},
    "replicas": {"pp": 2, "dp": 2, "ep": 2, "schedule": "DualPipe"},
    "replicas-of-experts": {"pp": 2, "dp": 2, "schedule": "DualPipe"},
    "recomputed": {"dp": 2, "ep": 2, "recompute": "moe"},
    "choosy": {"model": CHOOSY, "tp": 2, "dp": 2, "ep": 4, "etp": 1, "router_aux_loss": 0.01, **SP},
    "biased": {"model": BIASED, "tp": 2, "dp": 2, "ep": 2, **SP},
    "zero-1": {"dp": 4, "ep": 2, "zero": 1},
    "context-ep2": {"cp": 2, "dp": 2, "ep": 2},
    "context-in-two-copies": {"cp": 2},
    "context-ep4-of-tp2": {"tp": 2, "cp": 2, "ep": 4, "etp": 1, **SP},
}


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("name", RIGHT)
def test_plans_with_experts_compute_what_one_device_computes(name: str, mode: str) -> None:
    plan = plan_of(**{"mode": mode, **RIGHT[name]})
    proof = proof_of(plan)
    assert proof.beyond == () and proof.same_mathematics and proof.num_values > 30
    assert proof.same_order or (mode == "fast" and plan.layout.world_size > 1)


def changed(ops: tuple, index: int, how: str) -> tuple:
    ops = list(ops)
    match how:
        case "drop":
            del ops[index]
        case "double":
            ops.insert(index, ops[index])
        case "axis":
            ops[index] = replace(ops[index], axis="dp")
        case "size":
            ops[index] = replace(ops[index], k=ops[index].k + 1)
    return tuple(ops)


def changes_of(operation: object) -> tuple[str, ...]:
    return ("drop", "double", "axis") if isinstance(operation, Collective) else ("drop", "double", "size")


@pytest.mark.parametrize(
    "choices",
    [
        pytest.param({"tp": 2, "dp": 2, "ep": 2, **SP}, id="exact"),
        pytest.param({"tp": 2, "dp": 2, "ep": 2, "mode": "fast"}, id="fast-whole-tokens"),
        pytest.param({"dp": 2, "ep": 2, "recompute": "moe"}, id="recomputed"),
    ],
)
def test_every_product_and_collective_of_routed_experts_counts(choices: dict[str, Any]) -> None:
    """Dropped, doubled, over another axis, of another size: found as other mathematics in the layer that
    has it, or the next one."""
    plan = plan_of(**choices)
    num_mutants = 0
    for work in stage_ops(plan, 0):
        if ".mlp." not in work.layer or ".shared." in work.layer:
            continue
        for phase in ("forward", "input_gradient", "weight_gradient", "recomputed"):
            for index, operation in enumerate(getattr(work, phase)):
                for how in changes_of(operation):

                    def works(plan, stage, tp_rank, layer=work.layer, phase=phase, index=index, how=how):
                        return [
                            replace(each, **{phase: changed(getattr(each, phase), index, how)})
                            if each.layer == layer
                            else each
                            for each in stage_ops(plan, stage, tp_rank)
                        ]

                    proof = proof_of(plan, Program(works=works))
                    wrong = [finding for finding in proof.findings if finding.rule == VALUE_RULE]
                    assert wrong, (work.layer, phase, index, how)
                    assert ".mlp." in wrong[0].where, (work.layer, phase, how, wrong[0].where)
                    num_mutants += 1
    assert num_mutants >= 60


REDUCED = {
    "exact": {"tp": 2, "dp": 4, "ep": 2, **SP},
    "zero": {"dp": 4, "ep": 2, "mode": "fast", "zero": 1},
    "context": {"cp": 2, "dp": 2, "ep": 2},
}


@pytest.mark.parametrize("choices", REDUCED.values(), ids=REDUCED)
@pytest.mark.parametrize("kind", [Kind.REDUCE_GRAD, Kind.STEP])
def test_every_sum_of_expert_gradients_and_of_their_norm_counts(kind: Kind, choices: dict[str, Any]) -> None:
    plan = plan_of(**choices)
    axes = ("edp", "expert_replica", "ep", "etp")
    found = [
        index
        for index, each in enumerate(operations(plan, kind, 0))
        if isinstance(each, Collective) and each.axis in axes
    ]
    for index in found:
        for how in ("drop", "axis") if kind is Kind.STEP else ("drop", "double", "axis"):

            def actions(plan, of, *place, index=index, how=how, **more):
                own = operations(plan, of, *place, **more)
                return changed(own, index, how) if of is kind else own

            proof = proof_of(plan, Program(actions=actions))
            assert any(finding.rule == VALUE_RULE for finding in proof.findings), (kind, index, how)
    assert found
