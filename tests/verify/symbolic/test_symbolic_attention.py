"""The symbolic proof of attention variants and multi-token prediction: what is right is proved, and
every operation counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import plan
from shardproof.core.layout.layout import Layout
from shardproof.core.model.model import ModelSpec
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.core.program import operations, stage_ops
from shardproof.core.schedule import lower
from shardproof.core.schedule.action import Kind
from shardproof.verify.symbolic.layers import Program
from shardproof.verify.symbolic.symbolic import VALUE_RULE, prove

QWEN = ModelSpec("qwen", 1, 32, 48, 8, 4, 4, 256, 32, qk_norm=True, qkv_bias=True)
LATENT = ModelSpec(
    "latent",
    1,
    32,
    48,
    4,
    4,
    12,
    256,
    32,
    q_lora_rank=10,
    kv_lora_rank=14,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
)
WIDE = replace(LATENT, name="wide", q_lora_rank=0, v_head_dim=12, bias=True, norm="layernorm")
AHEAD = ModelSpec("ahead", 1, 32, 48, 4, 4, 8, 256, 32, num_mtp_layers=2)
TIED = replace(AHEAD, name="tied", num_mtp_layers=1, tied_embeddings=True, qk_norm=True)
SINKS = replace(QWEN, name="sinks", attention_sinks=True, sliding_window=3)
BLOOM = replace(QWEN, name="bloom", position="alibi", embedding_norm=True, norm="layernorm", bias=True, qkv_bias=False)
MODELS = [QWEN, LATENT, WIDE, AHEAD, TIED, SINKS, BLOOM]
UP = Recompute("selective", modules=("core_attn", "mla_up_proj"))


def plan_of(
    model: ModelSpec, mode: str = "exact", *, recompute: Recompute | None = None, schedule: str = "1F1B", **degrees
) -> Plan:
    layout = Layout(**degrees)
    return plan(layout, model=model, samples=4 * layout.dp, recompute=recompute, schedule=schedule, mode=mode)


def proof_of(plan: Plan, program: Program | None = None):
    return prove(plan, lower(schedule_for(plan)), program)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize(
    "choices",
    [
        {"tp": 4},
        {"tp": 2, "dp": 2, "pp": 2, "sequence_parallel": True},
        {"tp": 4, "sequence_parallel": True, "recompute": Recompute("full")},
    ],
    ids=["tp4", "tp2-dp2-pp2-sp", "recomputed"],
)
def test_exact_numerics_make_the_same_sums_in_the_same_order(model, choices):
    proof = proof_of(plan_of(model, **choices))
    assert proof.findings == () and proof.num_values > 50


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_fast_numerics_make_the_same_sums_in_another_order(model):
    proof = proof_of(plan_of(model, "fast", tp=2, dp=2, sequence_parallel=True))
    assert proof.same_mathematics and not proof.same_order


@pytest.mark.parametrize("model", [LATENT, WIDE], ids=lambda model: model.name)
def test_recomputed_up_projections_are_the_same(model):
    assert proof_of(plan_of(model, tp=4, recompute=UP)).findings == ()


def mutants(plan: Plan, chosen: str):
    """(layer, phase, how, program) for every operation of the layers whose name contains a text, dropped or doubled."""
    for work in stage_ops(plan, 0):
        for phase in ("forward", "input_gradient", "weight_gradient", "recomputed") if chosen in work.layer else ():
            for index in range(len(getattr(work, phase))):
                for how in ("drop", "double"):

                    def works(plan, stage, tp_rank, layer=work.layer, phase=phase, index=index, how=how):
                        return [
                            _changed(each, phase, index, how) if each.layer == layer else each
                            for each in stage_ops(plan, stage, tp_rank)
                        ]

                    yield work.layer, phase, how, Program(works=works)


def _changed(work, phase, index, how):
    found = list(getattr(work, phase))
    found[index : index + 1] = [] if how == "drop" else [found[index]] * 2
    return replace(work, **{phase: tuple(found)})


@pytest.mark.parametrize(
    ("plan", "chosen", "least"),
    [
        pytest.param(plan_of(LATENT, tp=2, sequence_parallel=True, recompute=UP), "attention", 60, id="latent"),
        pytest.param(plan_of(TIED, tp=2), "mtp.0", 24, id="ahead"),
        pytest.param(plan_of(AHEAD, "fast", tp=2, sequence_parallel=True), "mtp.1", 26, id="ahead-fast-sp"),
    ],
)
def test_every_operation_of_every_layer_counts(plan, chosen, least):
    num_mutants = 0
    for layer, phase, how, program in mutants(plan, chosen):
        wrong = [finding for finding in proof_of(plan, program).findings if finding.rule == VALUE_RULE]
        assert wrong, (layer, phase, how)
        num_mutants += 1
    assert num_mutants >= least


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("forgotten", ["query_norm", "heads"])
def test_a_forgotten_sum_over_heads_is_found(sequence_parallel, forgotten):
    """The program that leaves out the exchange of head norms, or that says a rank knows all of them."""
    plan = plan_of(QWEN, tp=4, sequence_parallel=sequence_parallel)

    def without_exchange(plan, kind, stage, *args, **kwargs):
        found = operations(plan, kind, stage, *args, **kwargs)
        return tuple(each for each in found if kind is not Kind.REDUCE_GRAD or each.layer != "heads")

    def own_tokens(plan, stage):
        return [each for each in Program().own_tokens(plan, stage) if "query_norm" not in each.name]

    program = Program(actions=without_exchange) if forgotten == "heads" else Program(own_tokens=own_tokens)
    findings = proof_of(plan, program).findings
    wrong = [finding.where for finding in findings if finding.rule == VALUE_RULE]
    assert wrong == ["0REDUCE_GRAD, layers.0.attention.query_norm.weight"]
