"""The symbolic proof of what routers send each other in REDUCE_GRAD and STEP: a collective that is missing, doubled or
over another axis is found, and said where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import plan
from shardproof.core.layout.layout import Layout
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.core.program import EXPERT_BIAS, operations
from shardproof.core.schedule.action import Kind
from shardproof.verify.symbolic.layers import Program
from shardproof.verify.symbolic.symbolic import VALUE_RULE, prove

MODEL = replace(model_preset("tiny-moe"), num_layers=2, expert_bias=True)


def plan_of(layout: Layout, mode: str) -> Plan:
    return plan(
        layout,
        model=MODEL,
        samples=4 * layout.dp,
        sequence=64,
        mode=mode,
        gradient_token_block=16,
        reduction_token_block=8,
        router_aux_loss=0.1,
        router_z_loss=0.01,
        dtype="bf16",
    )


def changed(how: str, kind: Kind, layer: str, axis: str) -> Program:
    """The program with the collectives of `layer` over `axis` dropped, doubled, or called over another axis."""

    def actions(plan, action_kind, stage, *args, **kwargs):
        found = []
        for operation in operations(plan, action_kind, stage, *args, **kwargs):
            hit = action_kind is kind and operation.layer == layer and operation.axis == axis
            moved = replace(operation, axis="pp") if hit and how == "axis" else operation
            found += [moved] * {"drop": 0, "double": 2, "axis": 1}[how] if hit else [operation]
        return tuple(found)

    return Program(actions=actions)


LAYOUTS = {
    "dp3": Layout(dp=3),
    "tp2-dp2": Layout(tp=2, dp=2),
    "tp2-dp2-sp": Layout(tp=2, dp=2, sequence_parallel=True),
    "pp2": Layout(pp=2, dp=2),
}
PLACES = [
    ("dp3", Kind.REDUCE_GRAD, EXPERT_BIAS, "dp"),
    ("tp2-dp2", Kind.REDUCE_GRAD, EXPERT_BIAS, "dp"),
    ("tp2-dp2-sp", Kind.REDUCE_GRAD, EXPERT_BIAS, "tp"),
    ("tp2-dp2-sp", Kind.STEP, "aux_loss", "dp"),
    ("tp2-dp2-sp", Kind.STEP, "aux_loss", "model"),
    ("pp2", Kind.STEP, "aux_loss", "model"),
]


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_right_program_is_proved(layout, mode):
    plan = plan_of(layout, mode)
    proof = prove(plan, schedule_for(plan))
    assert proof.ok and not proof.beyond and proof.same_mathematics and proof.same_order == (mode == "exact")


@pytest.mark.parametrize("how", ["drop", "double", "axis"])
@pytest.mark.parametrize(("layout", "kind", "layer", "axis"), PLACES)
def test_a_collective_that_is_dropped_doubled_or_elsewhere_is_found_where_it_is(layout, kind, layer, axis, how):
    plan = plan_of(LAYOUTS[layout], "exact")
    findings = [
        each
        for each in prove(plan, schedule_for(plan), changed(how, kind, layer, axis)).findings
        if each.rule == VALUE_RULE
    ]
    assert findings and all(layer in finding.where for finding in findings)


def test_counts_of_equal_tokens_must_not_be_added_over_the_ranks_that_hold_them():
    """Without sequence parallelism tensor-parallel ranks count the same tokens."""
    plan = plan_of(LAYOUTS["tp2-dp2"], "exact")

    def actions(plan, kind, stage, *args, **kwargs):
        found = operations(plan, kind, stage, *args, **kwargs)
        counts = [each for each in found if each.layer == EXPERT_BIAS]
        return (*found, *(replace(each, axis="tp") for each in counts))

    (finding, *_) = [
        each for each in prove(plan, schedule_for(plan), Program(actions=actions)).findings if each.rule == VALUE_RULE
    ]
    assert EXPERT_BIAS in finding.where


def test_a_biased_router_that_compares_tokens_over_ranks_is_one_devices():
    """What ranks exchange are scores before their bias is counted."""
    biased = replace(
        plan_of(Layout(cp=2, tp=2, sequence_parallel=True), "exact"), model=replace(MODEL, router_bias=True)
    )
    proof = prove(biased, schedule_for(biased))
    assert proof.ok and proof.same_order, proof.findings
