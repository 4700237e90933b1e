"""The program against closed forms: floating-point operations, ring traffic, ZeRO's bytes, and who
holds how many parameters."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from helpers.plans import product_plan
from shardproof.core.layout.layout import Layout
from shardproof.core.layout.stage_parameters import stage_parameters, stage_usages
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.blocks import stage_blocks
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.model_presets import model_preset
from shardproof.core.model.parameters import TOKEN_TABLE, count_parameters
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch
from shardproof.core.program import (
    Collective,
    Message,
    Product,
    block_ops,
    gradient_elements,
    operations,
    own_token_parameters,
    rank_elements,
    stage_elements,
    stage_ops,
)
from shardproof.core.schedule.action import Kind

MODEL = ModelSpec(
    "m",
    4,
    48,
    96,
    6,
    6,
    8,
    102,
    64,
    activation="gelu",
    norm="layernorm",
    position="learned",
    tied_embeddings=True,
    bias=True,
)


plan_of = partial(product_plan, model=MODEL, samples=12, micro=2, dtype="fp32")


def flops(found):
    return sum(operation.flops for operation in found if isinstance(operation, Product))


def sent(found, axis):
    return [
        (operation.op, operation.sent_bytes)
        for operation in found
        if isinstance(operation, Collective) and operation.axis == axis
    ]


def step_flops(plan, kinds=(Kind.F, Kind.B)):
    layout = plan.layout
    return sum(
        flops(operations(plan, kind, stage, tp_rank))
        for kind in kinds
        for stage in range(layout.num_stages)
        for tp_rank in range(layout.tp)
    )


@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 3, "sequence_parallel": True}, {"tp": 6, "cp": 2}])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_ranks_with_equal_shares_have_one_program_and_others_their_own(layout, recompute):
    plan = plan_of(recompute=recompute, **layout)
    for stage in range(plan.layout.num_stages):
        works = [stage_ops(plan, stage, tp_rank) for tp_rank in range(plan.layout.tp)]
        content = plan.stages[stage]
        blocks = stage_blocks(plan.model, content.layers, embedding=content.embedding, head=content.head)
        own = [[op for block in blocks for op in block_ops(plan, block, rank)] for rank in range(plan.layout.tp)]
        assert works == [tuple(ops) for ops in own]
        assert all((one is other) == (one == other) for one in works for other in works)


@pytest.mark.parametrize("layout", [{}, {"tp": 3}, {"pp": 4}, {"tp": 2, "pp": 2, "dp": 3}, {"pp": 2, "vpp": 2}])
def test_flops_are_those_of_the_megatron_formula_in_every_layout(layout):
    """Narayanan et al. 2021, section 5.1 and appendix: 24 B s l h^2 + 4 B s^2 l h per forward of the layers with
    ffn = 4h, 2 B s h V for the logits; a backward is twice a forward. (Their equation 3 counts the layers' forward
    twice, for full recomputation.)"""
    model = replace(MODEL, ffn_hidden_size=4 * 48)
    plan = plan_of(model=model, **layout)
    b, s, l, h, v = 2, 24, 4, 48, 102  # noqa: E741 - the paper's letters
    forward = 24 * b * s * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h))
    assert step_flops(plan, (Kind.F,)) == pytest.approx(forward, rel=1e-12)
    assert step_flops(plan) == pytest.approx(3 * forward, rel=1e-12)


def test_full_recompute_adds_the_layers_forward_and_selective_only_the_attention_core():
    none, selective, full = (plan_of(recompute=mode) for mode in ("none", "selective", "full"))
    core = [work for work in stage_ops(none, 0) if work.layer.endswith("core")]
    layers = [work for work in stage_ops(none, 0) if work.layer.startswith("layers")]
    backward = flops(operations(none, Kind.B, 0))
    assert flops(operations(selective, Kind.B, 0)) - backward == sum(flops(work.forward) for work in core)
    assert flops(operations(full, Kind.B, 0)) - backward == sum(flops(work.forward) for work in layers)
    assert operations(full, Kind.F, 0) == operations(none, Kind.F, 0) and operations(full, Kind.W, 0) == operations(
        none, Kind.W, 0
    )


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_full_backward_is_its_input_and_weight_gradients(mode, recompute):
    plan = plan_of(mode=mode, recompute=recompute, tp=3, pp=2)
    for stage in range(2):
        for tp_rank in range(3):
            whole, i, w = (Counter(operations(plan, kind, stage, tp_rank)) for kind in (Kind.B, Kind.I, Kind.W))
            assert whole == i + w


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_a_layer_has_two_ring_all_reduces_of_bsh_each_way(dtype, size):
    plan = plan_of(tp=3, dtype=dtype)
    one_layer = 2 * 24 * 48 * size * 2 * 2 // 3  # b s h bytes times 2 (n-1)/n
    assert Counter(sent(operations(plan, Kind.F, 0), "tp"))["all_reduce", one_layer] == 2 * 4 + 1  # and the embedding
    assert Counter(sent(operations(plan, Kind.I, 0), "tp"))["all_reduce", one_layer] == 2 * 4 + 1  # and the head


def test_sequence_parallel_moves_the_same_bytes_in_halves_and_gathers_again_for_weight_gradients():
    """Korthikanti et al. 2022, section 4.2.2: an all-gather and a reduce-scatter are one ring all-reduce."""
    plain, split = plan_of(tp=3), plan_of(tp=3, sequence_parallel=True)
    bsh = 2 * 24 * 48 * 4
    total = lambda plan, kind: sum(size for _, size in sent(operations(plan, kind, 0), "tp"))  # noqa: E731
    softmax = total(plain, Kind.F) - 9 * bsh * 4 // 3
    assert total(split, Kind.F) == 9 * bsh * 4 // 3 + softmax  # embedding and head share one of the nine
    assert total(split, Kind.I) == total(plain, Kind.I) == 9 * bsh * 4 // 3
    assert Counter(op for op, _ in sent(operations(split, Kind.W, 0), "tp")) == {"all_gather": 2 * 4 + 1}
    assert operations(split, Kind.SEND_F, 0) == (Message("", bsh // 3),)
    assert operations(plain, Kind.SEND_F, 0) == (Message("", bsh),)
    norms_and_row_biases = 4 * (4 + 2) * 48 + 2 * 48
    assert sent(operations(split, Kind.REDUCE_GRAD, 0), "tp") == [("all_reduce", norms_and_row_biases * 4 * 4 // 3)]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_replaces_the_all_reduce_by_a_reduce_scatter_and_a_parameter_gather(zero):
    """Rajbhandari et al. 2020, section 7: stages 1 and 2 move as much as plain data parallelism, stage 3 half as much
    again (here its gather is per UNSHARD). Gradients are fp32, weights bf16."""
    plan = plan_of(model=replace(MODEL, tied_embeddings=False), dp=3, micro=1, zero=zero, dtype="bf16")
    elements = stage_elements(plan, 0)
    gather = [("all_gather", -(-elements // 3) * 2 * 2)]
    reduces = Kind.B if zero >= 2 else Kind.REDUCE_GRAD  # after every microbatch
    reduced, unshard = sent(operations(plan, reduces, 0), "dp"), sent(operations(plan, Kind.UNSHARD, 0), "dp")
    step = [entry for entry in sent(operations(plan, Kind.STEP, 0), "dp") if entry[1] > 1000]
    if zero == 0:
        assert reduced == [("all_reduce", -(-elements * 4 * 4 // 3))]
    else:
        assert reduced == [("reduce_scatter", -(-elements * 4 * 2 // 3))]
    assert unshard == (gather if zero == 3 else [])
    assert step == (gather if zero in (1, 2) else [])


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_gradient_norm_over_parts_is_summed_over_dp_before_the_model_group(zero):
    norm = [
        each
        for each in operations(plan_of(dp=3, tp=2, zero=zero), Kind.STEP, 0)
        if getattr(each, "layer", "") == "grad_norm"
    ]
    assert [each.axis for each in norm] == (["dp", "model"] if zero else ["model"])


def test_only_uncut_vectors_know_their_own_tokens_and_only_with_sequence_parallelism():
    plain, split = (plan_of(tp=3, sequence_parallel=chosen) for chosen in (False, True))
    names = [parameter.name for parameter in own_token_parameters(split, 0)]
    assert own_token_parameters(plain, 0) == () and len(names) == 4 * (2 * 2 + 2) + 2
    assert (
        "layers.0.mlp.down.bias" in names
        and "layers.0.mlp.up.bias" not in names
        and "embedding.positions.weight" not in names
    )


@pytest.mark.parametrize("layout", [{}, {"tp": 3}, {"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2}, {"tp": 6, "pp": 4}])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_held_once_but_for_replicas_and_a_second_tied_table(layout, tied):
    model = replace(MODEL, tied_embeddings=tied)
    plan = plan_of(model=model, **layout)
    tp, stages = plan.layout.tp, plan.layout.num_stages
    held = sum(rank_elements(plan, pp_rank, tp_rank) for pp_rank in range(plan.layout.pp) for tp_rank in range(tp))
    whole = sum(
        parameter.num_elements
        for stage in plan.stages
        for parameter in stage_parameters(model, stage)
        if parameter.cut is None
    )
    second_table = 102 * 48 if tied and stages > 1 else 0
    assert held == count_parameters(model) + (tp - 1) * whole + second_table


def test_a_tied_table_used_at_both_ends_of_one_stage_has_two_sums():
    one, two = plan_of(), plan_of(pp=2)
    assert gradient_elements(one, 0) - stage_elements(one, 0) == 102 * 48
    assert [usage.key for usage in stage_usages(MODEL, one.stages[0])[:2]] == [
        f"{TOKEN_TABLE}@embedding",
        f"{TOKEN_TABLE}@output",
    ]
    assert gradient_elements(two, 1) == stage_elements(two, 1)
    assert stage_usages(MODEL, two.stages[1])[-1].key == f"{TOKEN_TABLE}@output"
    table = sent(operations(two, Kind.STEP, 1), "embedding")
    assert table == [("all_gather", 102 * 48 * 4)] and sent(operations(one, Kind.STEP, 0), "embedding") == []


def test_exact_numerics_on_aligned_power_of_two_cuts_move_what_a_ring_moves():
    model = replace(MODEL, num_heads=4, num_kv_heads=4, head_dim=12, vocab_size=128)
    fast, exact = (plan_of(model=model, samples=8, micro=1, tp=2, dp=4, mode=mode) for mode in ("fast", "exact"))
    total = lambda plan, kind, axis: sum(size for _, size in sent(operations(plan, kind, 0), axis))  # noqa: E731
    assert total(exact, Kind.I, "tp") == total(fast, Kind.I, "tp")
    assert total(exact, Kind.REDUCE_GRAD, "dp") == total(fast, Kind.REDUCE_GRAD, "dp")


def test_an_unaligned_cut_ships_two_nodes_and_so_more_bytes():
    """Six samples over two ranks: the first holds [0, 3), which is the nodes [0, 2) and [2, 3)."""
    plan = plan_of(samples=6, micro=1, dp=2, mode="exact")
    elements = gradient_elements(plan, 0)
    assert sent(operations(plan, Kind.REDUCE_GRAD, 0, 0, 0), "dp")[0] == ("all_to_all", 2 * (elements // 2) * 4)


def test_the_70b_plan_holds_its_parameters_over_pp_8_and_tp_8():
    plan = Plan(
        model_preset("llama3-70b"), cluster_preset("dgx-h100", 512), Layout(tp=8, pp=8, dp=8), Batch(1024, 1, 8192)
    )
    norms = sum(p.num_elements for stage in plan.stages for p in stage_parameters(plan.model, stage) if p.cut is None)
    held = sum(rank_elements(plan, pp_rank, tp_rank) for pp_rank in range(8) for tp_rank in range(8))
    assert held == count_parameters(plan.model) + 7 * norms
