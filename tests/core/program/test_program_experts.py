"""Layers with experts against closed forms: products, the tokens that are sent, who holds and who adds up what."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest

from helpers.plans import product_plan
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.parameters import count_parameters, layer_parameters, parameters
from shardproof.core.plan.sections import Numerics, Precision
from shardproof.core.program import (
    Collective,
    Held,
    Product,
    held_elements,
    layer_ops,
    local_elements,
    num_copies,
    num_shards,
    operations,
    own_token_parameters,
)
from shardproof.core.schedule.action import Kind

MODEL = ModelSpec(
    *("m", 4, 64, 128, 8, 8, 8, 96, 64),
    num_experts=8,
    experts_per_token=2,
    num_shared_experts=2,
    expert_ffn_hidden_size=32,
    first_dense_layers=1,
)
B, S, H, K, E, F = 2, 32, 64, 2, 8, 32
"""Samples of a microbatch, sequence, hidden size, experts of a token, experts, width of one."""


plan_of = partial(product_plan, model=MODEL, samples=16, micro=B, sequence=S, shard=None)


def flops(found):
    return sum(operation.flops for operation in found if isinstance(operation, Product))


def sent_in_all(plan, axis, *kinds):
    """Bytes of a stage's collectives over an axis, by operation and size of the group."""
    total = Counter()
    for op, size, num_bytes in (each for kind in kinds for each in sent(operations(plan, kind, 0), axis)):
        total[op, size] += num_bytes
    return total


def sent(found, axis):
    return [
        (each.op, each.group_size, each.sent_bytes)
        for each in found
        if isinstance(each, Collective) and each.axis == axis
    ]


def forward(plan, layer, part, tp_rank=0):
    return [
        operation for work in layer_ops(plan, layer, tp_rank) if f".{part}" in work.layer for operation in work.forward
    ]


LAYOUTS = [
    {"dp": 4},
    {"dp": 4, "ep": 4},
    {"tp": 2, "ep": 4, "dp": 4, "sequence_parallel": True},
    {"tp": 2, "ep": 4, "etp": 1, "dp": 2, "sequence_parallel": True},
    {"tp": 4, "etp": 2, "ep": 2, "dp": 1, "sequence_parallel": True},
    {"tp": 2, "ep": 2, "dp": 2},
    {"cp": 2, "ep": 8, "dp": 4},
    {"pp": 2, "tp": 2, "cp": 2, "ep": 8, "etp": 1, "dp": 2, "sequence_parallel": True},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_multiplies_the_matrices_a_token_meets_in_every_layout(layout):
    """Per token and layer 2h(4h) of attention, 4sh of its core, 6hf for each expert it takes or shares (gated), 2hE of
    the router; the router alone is computed by every tensor-parallel rank where tokens are not cut."""
    plan = plan_of(**layout)
    tp, cp, dp, pp = (getattr(plan.layout, axis) for axis in ("tp", "cp", "dp", "pp"))
    ranks = [(stage, tp_rank) for stage in range(pp) for tp_rank in range(tp)]
    total = plan.num_microbatches * dp * cp * sum(flops(operations(plan, Kind.F, *rank)) for rank in ranks)
    router = 2 * H * E * (1 if plan.layout.sequence_parallel else tp)
    attention, dense, moe = 8 * H * H + 4 * S * H, 6 * H * 128, 6 * H * F * (K + 2) + router
    assert total == 16 * S * (4 * attention + dense + 3 * moe + 2 * H * 96)
    backward = plan.num_microbatches * dp * cp * sum(flops(operations(plan, Kind.B, *rank)) for rank in ranks)
    assert backward == 2 * total


def test_an_all_to_all_each_way_moves_a_copy_per_expert_but_for_the_local_share():
    """Rajbhandari et al. 2022, DeepSpeed-MoE: of b*s*k copies of h elements 1 - 1/ep leave the rank, to the experts and
    back. How many go to each expert is sent first, one int64 for each expert and sequence."""
    plan = plan_of(dp=4, ep=4)
    one_way, counts = B * S * K * H * 2 * 3 // 4, B * E * 8 * 3 // 4
    for part, kind in (
        ("dispatch", "forward"),
        ("combine", "forward"),
        ("dispatch", "input_gradient"),
        ("combine", "input_gradient"),
    ):
        (work,) = (each for each in layer_ops(plan, 1) if each.layer == f"layers.1.mlp.{part}")
        reported = [("all_to_all", 4, counts)] if (part, kind) == ("dispatch", "forward") else []
        assert sent(getattr(work, kind), "ep") == [*reported, ("all_to_all", 4, one_way)]
        assert len(getattr(work, kind)) == len(reported) + 1
    assert sent(forward(plan, 0, "mlp"), "ep") == []  # a dense layer
    assert sent(forward(plan_of(dp=4), 1, "mlp"), "ep") == []  # all experts are at home


def test_expert_tensor_parallelism_gathers_before_the_experts_and_scatters_after_them():
    plan = plan_of(tp=2, ep=4, dp=4, sequence_parallel=True)
    copies = B * S // 2 * K * H * 2
    assert sent(forward(plan, 1, "dispatch"), "etp") == [("all_gather", 2, B * E * 8), ("all_gather", 2, copies)]
    assert [each.op for each in forward(plan, 1, "dispatch")] == ["all_to_all", "all_gather"] * 2
    assert [each.op for each in forward(plan, 1, "combine")] == ["reduce_scatter", "all_to_all"]
    assert sent(forward(plan, 1, "combine"), "etp") == [("reduce_scatter", 2, copies)]
    folded = plan_of(tp=2, ep=4, etp=1, dp=4, sequence_parallel=True)
    assert forward(folded, 1, "dispatch")[1:] == [
        Collective("layers.1.mlp.dispatch", "all_to_all", "ep", 4, copies * 3 // 4)
    ]


@pytest.mark.parametrize("etp", [1, 2])
def test_ranks_with_the_same_tokens_send_a_part_each_and_gather_results_and_gradients(etp):
    """The copies of half the tokens are sent; then the other rank gets this one's results, its input gradients,
    and those of weights."""
    plan = plan_of(tp=2, ep=2, dp=2, etp=etp)
    works = {each.layer.removeprefix("layers.1.mlp."): each for each in layer_ops(plan, 1)}
    assert sent(works["dispatch"].forward, "ep")[1] == ("all_to_all", 2, B * S * K * H * 2 // 4)
    assert sent(works["dispatch"].forward, "tp") == []
    assert (
        sent(works["combine"].forward, "tp")
        == sent(works["dispatch"].input_gradient, "tp")
        == [("all_gather", 2, B * S * H)]
    )
    assert sent(works["combine"].input_gradient, "tp") == [("all_gather", 2, B * S * K * 2)]


def test_exact_numerics_move_nodes_of_the_tree_over_an_experts_width_and_of_the_batch():
    """Half of an expert's 8 leaves is one node, in fp32; two copies of the experts have the samples of two
    data-parallel ranks each, which are one node of the batch's tree."""
    plan = plan_of(tp=2, ep=2, dp=2, sequence_parallel=True)
    exact = replace(plan, numerics=Numerics("exact", gradient_token_block=8, reduction_token_block=4))
    combine = [each for each in forward(exact, 1, "combine") if each.axis == "etp"]
    assert [(each.op, each.sent_bytes) for each in combine] == [("all_to_all", B * S // 2 * K * H * 4)]
    exact = replace(plan_of(dp=4, ep=2), numerics=exact.numerics)
    expert = held_elements(exact, 0).expert
    found = sent(operations(exact, Kind.REDUCE_GRAD, 0), "edp")
    assert found == [("all_to_all", 2, expert // 2 * 4), ("all_gather", 2, expert // 2 * 4)]


@pytest.mark.parametrize(("ep", "experts", "tokens"), [(1, 8, 16), (2, 4, 32), (8, 1, 128)])
def test_local_experts_are_one_grouped_product_over_an_equal_share_of_all_copies(ep, experts, tokens):
    """b*s*k = 128 copies arrive at every rank whatever ep is: fewer experts, with more tokens each."""
    up, down = (each for each in forward(plan_of(dp=8, ep=ep), 1, "experts") if isinstance(each, Product))
    assert (up.m, up.n, up.k, up.count, up.grouped) == (tokens, 2 * F, H, experts, True)
    assert (down.m, down.n, down.k, down.count, down.grouped) == (tokens, H, F, experts, True)


def test_a_share_that_is_no_whole_number_of_tokens_is_rounded_up():
    plan = plan_of(model=replace(MODEL, num_experts=6))
    (up, _) = (each for each in forward(plan, 1, "experts") if isinstance(each, Product))
    assert up.m == -(-B * S * K // 6) == 22


def test_the_router_works_in_fp32_on_own_tokens():
    plan = plan_of(tp=2, ep=4, etp=1, dp=2, sequence_parallel=True)
    assert forward(plan, 1, "router") == [Product("layers.1.mlp.router", B * S // 2, E, H, dtype="fp32")]
    assert "layers.1.mlp.router.weight" in [parameter.name for parameter in own_token_parameters(plan, 0)]


def test_backward_is_input_and_weight_gradients_with_experts_too():
    plan = plan_of(tp=2, ep=4, dp=4, sequence_parallel=True)
    whole, i, w = (Counter(operations(plan, kind, 0)) for kind in (Kind.B, Kind.I, Kind.W))
    assert whole == i + w
    assert not any(isinstance(each, Collective) and each.axis in ("ep", "etp") for each in w)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_parameter_is_held_once_over_its_grid(layout):
    plan = plan_of(**layout)
    ep, etp, tp = plan.layout.ep, plan.layout.expert_tp, plan.layout.tp
    for parameter in layer_parameters(MODEL, 1):
        grid = range(etp if parameter.expert else tp)
        held = sum(local_elements(plan, parameter, rank) for rank in grid) * (ep if parameter.expert else 1)
        assert held == parameter.num_elements * (1 if parameter.cut else len(grid))


def test_expert_elements_are_apart_from_dense_ones():
    plan = plan_of(dp=4, ep=4)
    expert = 3 * 3 * H * F * E // 4
    assert sum(held_elements(plan, 0)) == count_parameters(MODEL) - 3 * expert
    assert held_elements(plan, 0).expert == expert


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_experts_are_added_up_over_their_own_data_parallelism(zero):
    """tp*cp*dp = 16 ranks: 8 copies of dense parameters over dp and cp, two of each expert with ep=8, etp=1."""
    plan = plan_of(tp=2, cp=2, dp=4, ep=8, etp=1, sequence_parallel=True, zero=zero)
    held = held_elements(plan, 0)
    assert num_copies(plan, 0) == num_shards(plan, 0) == Held(8, 2)
    dense, expert = (
        sent_in_all(plan, axis, Kind.REDUCE_GRAD, *([Kind.B] if zero > 1 else [])) for axis in ("dp", "edp")
    )
    if zero == 0:
        assert dense == {("all_reduce", 8): held.dense * 4 * 2 * 7 // 8}
        assert expert == {("all_reduce", 2): held.expert * 4}
    else:
        assert dense == {("reduce_scatter", 8): held.dense * 4 * 7 // 8}
        assert expert == {("reduce_scatter", 2): held.expert * 4 // 2}
    gathered = operations(plan, Kind.UNSHARD if zero == 3 else Kind.STEP, 0)
    expected = [("all_gather", 2, held.expert // 2 * 2)] if zero else []
    assert sent(gathered, "edp") == expected


def test_experts_without_copies_are_not_reduced():
    plan = plan_of(dp=8, ep=8, zero=1)
    assert sent(operations(plan, Kind.REDUCE_GRAD, 0), "edp") == sent(operations(plan, Kind.STEP, 0), "edp") == []


def test_hybrid_sharding_scatters_in_a_shard_group_and_adds_up_over_its_copies():
    """Zhao et al. 2023, PyTorch FSDP, section 3.2.2: a reduce-scatter over 4 ranks, then an all-reduce of the
    quarter over 2 groups."""
    plan = plan_of(dp=8, ep=2, zero=3, shard=4)
    held = held_elements(plan, 0)
    assert num_shards(plan, 0) == Held(4, 2) and num_copies(plan, 0) == Held(8, 4)
    # after every microbatch
    assert sent_in_all(plan, "dp_shard", Kind.B) == {("reduce_scatter", 4): held.dense * 4 * 3 // 4}
    assert sent_in_all(plan, "dp_replicate", Kind.REDUCE_GRAD) == {("all_reduce", 2): held.dense}
    assert sent_in_all(plan, "edp_shard", Kind.B) == {("reduce_scatter", 2): held.expert * 2}
    assert sent_in_all(plan, "edp_replicate", Kind.REDUCE_GRAD) == {("all_reduce", 2): held.expert * 2}
    routers = sum(each.num_elements for each in parameters(plan.model) if ".router." in each.name)  # compute in fp32
    gathered = sent_in_all(plan, "dp_shard", Kind.UNSHARD)
    assert gathered == {("all_gather", 4): (held.dense - routers) * 2 * 3 // 4 + routers * 4 * 3 // 4}
    assert (
        sent_in_all(plan, "dp", Kind.REDUCE_GRAD, Kind.B)
        == sent_in_all(plan, "edp", Kind.REDUCE_GRAD, Kind.B)
        == Counter()
    )


def test_bf16_gradients_halve_what_is_reduced():
    plan = plan_of(dp=4, ep=2)
    half = replace(plan, precision=Precision("bf16", "bf16"))
    for axis in ("dp", "edp"):
        ((_, _, full),), ((_, _, less),) = (sent(operations(each, Kind.REDUCE_GRAD, 0), axis) for each in (plan, half))
        assert full == 2 * less


@pytest.mark.parametrize("zero", [0, 1])
def test_without_zero_the_norm_adds_the_squares_of_all_experts(zero):
    norm = [
        each
        for each in operations(plan_of(dp=4, ep=4, zero=zero), Kind.STEP, 0)
        if getattr(each, "layer", "") == "grad_norm"
    ]
    assert [(each.axis, each.group_size) for each in norm] == ([("dp", 4)] if zero else [("ep", 4)])
