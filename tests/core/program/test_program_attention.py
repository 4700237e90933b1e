"""Latent attention, context parallelism and multi-token prediction against closed forms."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from helpers.plans import product_plan
from shardproof.core.layout.stage_parameters import stage_parameters
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.parameters import (
    TOKEN_TABLE,
    count_parameters,
    layer_parameters,
    mtp_parameters,
    parameters,
)
from shardproof.core.plan.plan import Plan
from shardproof.core.program import (
    Collective,
    Message,
    Product,
    held_elements,
    layer_ops,
    operations,
    own_token_parameters,
    stage_ops,
)
from shardproof.core.schedule.action import Kind

GROUPED = ModelSpec("g", 4, 64, 128, 8, 4, 8, 96, 64)
LATENT = ModelSpec(
    "l",
    4,
    64,
    128,
    8,
    8,
    24,
    96,
    64,
    q_lora_rank=40,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=20,
)
B, S, H = 2, 32, 64


def plan_of(model=GROUPED, *, samples=16, **layout) -> Plan:
    return product_plan(model=model, samples=samples, micro=B, sequence=S, **layout)


def work_of(plan, part, tp_rank=0):
    (work,) = (each for each in layer_ops(plan, 0, tp_rank) if each.layer == f"layers.0.{part}")
    return work


def flops(found):
    return sum(operation.flops for operation in found if isinstance(operation, Product))


def sent(found, axis):
    return [
        (each.op, each.group_size, each.sent_bytes)
        for each in found
        if isinstance(each, Collective) and each.axis == axis
    ]


@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallelism_computes_an_equal_part_and_sends_an_equal_part(cp):
    whole, part = plan_of(), plan_of(cp=cp)
    for kind in (Kind.F, Kind.I, Kind.W):
        assert cp * flops(operations(part, kind, 0)) == flops(operations(whole, kind, 0))
    assert operations(part, Kind.SEND_F, 0) == (Message("", B * S * H * 2 // cp),)


def test_keys_and_values_are_gathered_forward_and_again_backward_where_their_gradients_go_home():
    """cp - 1 blocks of b*s/cp tokens, keys and values of 4 heads of 8: what a ring passes on (Liu et
    al. 2023, section 3)."""
    core, moved = work_of(plan_of(cp=4), "attention.core"), B * S // 4 * 2 * 4 * 8 * 2 * 3
    assert sent(core.forward, "cp") == [("all_gather", 4, moved)]
    assert sent(core.input_gradient, "cp") == [("all_gather", 4, moved), ("reduce_scatter", 4, moved)]
    assert core.input_gradient[0].op == "all_gather" and core.input_gradient[-1].op == "reduce_scatter"


@pytest.mark.parametrize(("cp", "inner"), [(2, 2), (4, 2), (8, 4)])
def test_neighbours_exchange_heads_and_gather_a_part_of_the_keys(cp, inner):
    """DeepSpeed-Ulysses (arXiv 2309.14509, section 3.2): queries, keys and values there (8 + 4 + 4 heads) and 8 heads
    back, of which (P - 1) / P leave; keys and values are then gathered by cp / P groups, of P times the tokens and
    1 / P of the heads."""
    core, outer = work_of(plan_of(cp=cp, cp_inner=inner), "attention.core"), cp // inner
    hidden = B * S // cp * 8 * 8 * 2
    back = ("all_to_all", inner, hidden * (inner - 1) // inner)
    there = ("all_to_all", inner, 2 * hidden * (inner - 1) // inner)
    assert sent(core.forward, "cp_inner") == [there, back]
    assert sent(core.input_gradient, "cp_inner") == [back, there]
    gathers = [("all_gather", outer, hidden * (outer - 1))] * (outer > 1)
    assert sent(core.forward, "cp_outer") == gathers and not sent(core.forward, "cp")
    (scores, _) = (each for each in core.forward if isinstance(each, Product))
    assert (scores.m, scores.n, scores.count) == (S // cp * inner, S, B * 8 // inner)


def test_a_rank_attends_from_its_queries_to_the_whole_sequence():
    scores, values = (each for each in work_of(plan_of(cp=4), "attention.core").forward if isinstance(each, Product))
    assert (scores.m, scores.n, scores.k, scores.count) == (S // 4, S, 8, B * 8)
    assert (values.m, values.n, values.k, values.count) == (S // 4, 8, S, B * 8)


def test_context_and_tensor_parallelism_cut_tokens_and_heads():
    plan = plan_of(cp=2, tp=2, sequence_parallel=True)
    assert sent(work_of(plan, "attention.core").forward, "cp") == [("all_gather", 2, B * S // 2 * 2 * 2 * 8 * 2)]
    assert sent(work_of(plan, "attention.qkv").forward, "tp") == [("all_gather", 2, B * S // 4 * H * 2)]
    assert operations(plan, Kind.SEND_F, 0) == (Message("", B * S // 4 * H * 2),)


@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_are_added_up_over_dp_and_cp_together(zero):
    plan = plan_of(cp=2, dp=4, zero=zero)
    elements, op, rounds = sum(held_elements(plan, 0)), "reduce_scatter" if zero else "all_reduce", 1 if zero else 2
    assert sent(operations(plan, Kind.REDUCE_GRAD, 0), "dp") == [(op, 8, -(-rounds * elements * 4 * 7 // 8))]
    assert [size for _, size, _ in sent(operations(plan, Kind.STEP, 0), "dp")] == ([8, 8, 8] if zero else [8])


def test_context_parallelism_leaves_the_program_of_one_rank_as_it_was():
    assert operations(plan_of(cp=1, tp=2), Kind.B, 0) == operations(plan_of(tp=2), Kind.B, 0)


def test_latent_attention_multiplies_the_six_matrices_of_deepseek_v2():
    """arXiv 2405.04434, equations 37-47: down to 40 and 32 + 8, up to 8 heads of 16 + 8 and of 16 + 20,
    and from 8 heads of 20."""
    plan = plan_of(LATENT)
    matrices = 64 * 40 + 40 * 8 * 24 + 64 * 40 + 32 * 8 * 36 + 8 * 20 * 64
    works = [work for work in layer_ops(plan, 0) if "attention" in work.layer]
    core = 2 * B * S * S * 8 * (24 + 20)
    assert flops(operation for work in works for operation in work.forward) == 2 * B * S * matrices + core
    assert flops(operation for work in works for operation in work.input_gradient) == 2 * B * S * matrices + 2 * core
    assert flops(operation for work in works for operation in work.weight_gradient) == 2 * B * S * matrices
    assert (
        sum(p.num_elements for p in layer_parameters(LATENT, 0) if "attention" in p.name and len(p.shape) == 2)
        == matrices
    )


def test_without_a_rank_for_queries_they_come_from_the_hidden_state():
    plan = plan_of(replace(LATENT, q_lora_rank=0))
    assert work_of(plan, "attention.q").forward == (Product("layers.0.attention.q", B * S, 8 * 24, H),)
    assert not any("q_down" in work.layer for work in layer_ops(plan, 0))


def test_latent_attention_gathers_low_rank_vectors_instead_of_hidden_states():
    plan = plan_of(LATENT, tp=2, sequence_parallel=True)
    own = B * S // 2 * 2
    assert work_of(plan, "attention.q_down").forward == (Product("layers.0.attention.q_down", B * S // 2, 40, H),)
    assert sent(work_of(plan, "attention.q_up").forward, "tp") == [("all_gather", 2, own * 40)]
    up = work_of(plan, "attention.kv_up")
    assert sent(up.forward, "tp") == [("all_gather", 2, own * (32 + 8))]  # and the rotary key of all heads
    assert sent(up.input_gradient, "tp") == [("reduce_scatter", 2, own * (32 + 8))]
    assert sent(up.weight_gradient, "tp") == [("all_gather", 2, own * 32)]
    names = {parameter.name for parameter in own_token_parameters(plan, 0)}
    assert {
        "layers.0.attention.q_down.weight",
        "layers.0.attention.kv_down.weight",
        "layers.0.attention.kv_norm.weight",
    } <= names
    assert "layers.0.attention.kv_up.weight" not in names


def test_under_context_parallelism_latent_attention_sends_whole_keys_and_values():
    plan = plan_of(LATENT, cp=2)
    assert sent(work_of(plan, "attention.core").forward, "cp") == [("all_gather", 2, B * S // 2 * 8 * (24 + 20) * 2)]


@pytest.mark.parametrize("model", [GROUPED, LATENT])
@pytest.mark.parametrize(
    "layout", [{"tp": 2}, {"tp": 4, "sequence_parallel": True}, {"cp": 2, "tp": 2, "sequence_parallel": True}]
)
def test_tensor_parallel_ranks_share_the_products_of_a_layer(model, layout):
    whole, cut = plan_of(model), plan_of(model, **layout)
    down = 0
    if model is LATENT and not cut.layout.sequence_parallel:  # every rank multiplies all tokens with the uncut matrices
        down = 2 * B * S * H * (40 + 32 + 8) * (cut.layout.tp - 1)
    total = sum(flops(work.forward) for tp_rank in range(cut.layout.tp) for work in layer_ops(cut, 0, tp_rank))
    assert cut.layout.cp * total == sum(flops(work.forward) for work in layer_ops(whole, 0)) + down


MTP = replace(LATENT, num_mtp_layers=2)


def test_a_prediction_module_is_a_projection_a_layer_and_a_head():
    """DeepSeek-V3, arXiv 2412.19437, section 2.2: [h, 2h] joins both inputs; table and head are the model's."""
    with_mtp, without = plan_of(MTP), plan_of(LATENT)
    layer = flops(operation for work in layer_ops(without, 0) for operation in work.forward)
    more = flops(operations(with_mtp, Kind.F, 0)) - flops(operations(without, Kind.F, 0))
    assert more == 2 * (layer + 2 * B * S * H * 2 * H + 2 * B * S * H * 96)
    own = sum(parameter.num_elements for parameter in mtp_parameters(MTP, 0))
    assert own == sum(parameter.num_elements for parameter in layer_parameters(LATENT, 0)) + 2 * H * H + 3 * H
    assert count_parameters(MTP) == count_parameters(LATENT) + 2 * own


def test_prediction_modules_lie_on_the_last_stage_with_a_token_table_of_their_own():
    plan = plan_of(MTP, pp=2)
    assert not any("mtp" in work.layer for work in stage_ops(plan, 0))
    names = [work.layer for work in stage_ops(plan, 1) if "attention" not in work.layer and "mlp" not in work.layer]
    assert (
        names[:4] == ["mtp.0.embedding.tokens", "mtp.0.projection", "mtp.0.head.output", "mtp.0.head.loss"]
        and names[-1] == "head.loss"
    )
    assert [p.name for p in stage_parameters(MTP, plan.stages[1])].count(TOKEN_TABLE) == 1
    assert sum(held_elements(plan, 0)) + sum(held_elements(plan, 1)) == count_parameters(MTP) + 96 * H
    table = [("all_gather", 2, 96 * H * 4)]
    assert (
        sent(operations(plan, Kind.STEP, 0), "embedding") == sent(operations(plan, Kind.STEP, 1), "embedding") == table
    )
    assert sent(operations(plan_of(LATENT, pp=2), Kind.STEP, 1), "embedding") == []


def test_names_of_operations_and_parameters_are_unique_with_every_kind_of_layer():
    model = replace(
        MTP, num_experts=4, experts_per_token=2, num_shared_experts=1, expert_ffn_hidden_size=16, first_dense_layers=1
    )
    layers = Counter(work.layer for work in stage_ops(plan_of(model), 0))
    names = Counter(parameter.name for parameter in parameters(model))
    assert set(layers.values()) == set(names.values()) == {1}


def test_bias_of_queries_keys_and_values_alone_and_norms_of_heads_are_parameters():
    plain, more = GROUPED, replace(GROUPED, qkv_bias=True, qk_norm=True)
    added = {p.name: p.shape for p in layer_parameters(more, 0)}.items() - {
        p.name: p.shape for p in layer_parameters(plain, 0)
    }.items()
    assert dict(added) == {
        "layers.0.attention.qkv.bias": (4 * (2 + 2) * 8,),
        "layers.0.attention.query_norm.weight": (8,),
        "layers.0.attention.key_norm.weight": (8,),
    }


@pytest.mark.parametrize(
    "layout", [{"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"tp": 4, "pp": 2, "sequence_parallel": True}]
)
@pytest.mark.parametrize(
    "model", [GROUPED, LATENT, MTP, replace(GROUPED, qk_norm=True), replace(GROUPED, norm="layernorm", bias=True)]
)
def test_what_a_rank_knows_in_part_is_added_up_over_tp(model, layout):
    plan = plan_of(model, **layout)
    for stage in range(plan.layout.pp):
        elements, tp = sum(parameter.num_elements for parameter in own_token_parameters(plan, stage)), plan.layout.tp
        expected = [("all_reduce", tp, -(-2 * (tp - 1) * elements * 4 // tp))] if elements else []
        assert sent(operations(plan, Kind.REDUCE_GRAD, stage), "tp") == expected


def test_norms_of_heads_are_summed_over_tp_without_sequence_parallelism_too():
    names = [parameter.name for parameter in own_token_parameters(plan_of(replace(GROUPED, qk_norm=True), tp=2), 0)]
    assert len(names) == 2 * 4 and names[0] == "layers.0.attention.query_norm.weight"
