"""Recomputation by mode, by module and by layer, and the groups of equal parts that a stage consists of."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.plans import product_plan
from shardproof.core.base.errors import PlanError
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.roles import Role
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.core.program import (
    Collective,
    Product,
    group_ops,
    operations,
    recomputes_whole,
    stage_groups,
    stage_ops,
)
from shardproof.core.schedule.action import Kind

DENSE = ModelSpec("d", 6, 64, 128, 8, 4, 8, 96, 64)
LATENT = {
    "num_kv_heads": 8,
    "head_dim": 24,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
}
MIXED = replace(
    DENSE, num_experts=4, experts_per_token=2, num_shared_experts=1, expert_ffn_hidden_size=16, first_dense_layers=2
)
ALL = replace(MIXED, **LATENT, v_head_dim=20, num_mtp_layers=2)


def plan_of(model=ALL, recompute=None, *, stages=None, **layout) -> Plan:
    return product_plan(model=model, samples=8, micro=2, sequence=32, recompute=recompute, stages=stages, **layout)


def flops(found):
    return sum(operation.flops for operation in found if isinstance(operation, Product))


def repeated(plan, stage=0):
    """Names of the parts that a backward repeats, without their layer's."""
    return {work.layer.partition(".")[2].partition(".")[2] for work in stage_ops(plan, stage) if work.recomputed}


@pytest.mark.parametrize(
    ("modules", "parts"),
    [
        (("core_attn",), {"attention.core"}),
        (("mlp",), {"mlp.up", "mlp.down"}),
        (("mla_up_proj", "core_attn"), {"attention.q_up", "attention.kv_up", "attention.core"}),
        (("shared_experts",), {"mlp.shared.up", "mlp.shared.down"}),
        (("norm", "moe_act"), set()),
    ],
)
def test_selective_recomputation_repeats_the_parts_of_its_modules(modules, parts):
    assert repeated(plan_of(recompute=Recompute("selective", modules=modules))) == parts


def test_recomputing_experts_repeats_their_exchange_too():
    plan = plan_of(recompute=Recompute("selective", modules=("moe",)), dp=2, ep=2)
    names = ("router", "dispatch", "experts.up", "experts.down", "combine", "shared.up", "shared.down")
    assert repeated(plan) == {f"mlp.{name}" for name in names}
    more = Counter(operations(plan, Kind.I, 0)) - Counter(operations(plan_of(dp=2, ep=2), Kind.I, 0))
    assert sum(count for each, count in more.items() if getattr(each, "axis", "") == "ep") == 3 * (4 + 2)


def test_what_is_recomputed_is_the_forward_of_the_part_and_changes_nothing_else():
    none, full = plan_of(), plan_of(recompute=Recompute("full"))
    assert operations(none, Kind.F, 0) == operations(full, Kind.F, 0) and operations(none, Kind.W, 0) == operations(
        full, Kind.W, 0
    )
    outside = {"embedding.tokens", "head.output", "head.loss"}
    outside |= {
        f"mtp.{depth}.{part}"
        for depth in range(2)
        for part in ("embedding.tokens", "projection", "head.output", "head.loss")
    }
    for work in stage_ops(full, 0):
        assert work.recomputed == (() if work.layer in outside else work.forward)


@pytest.mark.parametrize(("pp", "layers"), [(1, (0, 1, 4)), (2, (0, 1, 4)), (3, (1, 2, 5)), (2, ()), (6, (3,))])
def test_full_recomputation_of_a_list_of_layers_repeats_those_and_no_others(pp, layers):
    plan = plan_of(MIXED, Recompute("full", layers=layers), pp=pp)
    again = {int(work.layer.split(".")[1]) for stage in range(pp) for work in stage_ops(plan, stage) if work.recomputed}
    assert again == set(layers) == {layer for layer in range(6) if recomputes_whole(plan, layer)}
    for stage in range(pp):
        groups = [group for group in stage_groups(plan, stage) if group.kind == "layer"]
        spread = [
            (group.blocks[0].layer + i, group.num(Role.ROUTER) > 0, group.recomputed)
            for group in groups
            for i in range(group.count)
        ]
        expected = [(layer, layer >= 2, layer in layers) for layer in plan.stages[stage].layers]
        assert spread == expected


def test_a_list_of_layers_leaves_out_those_of_multi_token_prediction():
    plan = plan_of(recompute=Recompute("full", layers=tuple(range(6))))
    assert [layer for layer in range(8) if recomputes_whole(plan, layer)] == list(range(6))
    assert [group.recomputed for group in stage_groups(plan, 0) if group.kind == "prediction"] == [False]


@pytest.mark.parametrize(
    ("recompute", "said"),
    [
        (
            {"mode": "selective", "layers": (0,)},
            r'layers=\[0\] .* recompute.mode="selective" says otherwise. Set recompute.mode = "full"',
        ),
        ({"mode": "full", "layers": (0,), "num_layers": 1}, r"num_layers=1 says otherwise"),
        ({"mode": "full", "layers": (2, 0, 2)}, r"must name every layer once, in order. Use \[0, 2\]"),
        ({"mode": "full", "layers": (-1,)}, r"has the layers 0 to 5, and no layer -1"),
    ],
)
def test_a_list_of_layers_that_is_none_is_refused(recompute, said):
    with pytest.raises(PlanError, match=said):
        plan_of(DENSE, Recompute(**recompute))


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_distributed_inputs_are_gathered_once_a_layer_and_nothing_else_is_sent_more(tp):
    """Two samples of 32 tokens, 64 wide, in bf16: each rank sends its part, 1/tp of 8192 bytes,
    to the tp - 1 others."""
    retained, spread = (plan_of(DENSE, Recompute("full", distribute=spread), tp=tp) for spread in (False, True))
    assert operations(retained, Kind.F, 0) == operations(spread, Kind.F, 0)
    more = Counter(operations(spread, Kind.I, 0)) - Counter(operations(retained, Kind.I, 0))
    gathers = [Collective(f"layers.{layer}", "all_gather", "tp", tp, 8192 // tp * (tp - 1)) for layer in range(6)]
    assert more == Counter(gathers if tp > 1 else [])


@pytest.mark.parametrize(
    ("limit", "layers"), [(0, []), (1, [0, 3]), (2, [0, 1, 3, 4]), (3, [0, 1, 2, 3, 4, 5]), (9, [0, 1, 2, 3, 4, 5])]
)
def test_full_recomputation_of_so_many_layers_takes_the_first_of_each_stage(limit, layers):
    """Megatron-LM's `--recompute-method block --recompute-num-layers`; prediction modules keep what they need."""
    plan = plan_of(recompute=Recompute("full", num_layers=limit), pp=2)
    assert [layer for layer in range(8) if recomputes_whole(plan, layer)] == layers


def test_limited_recomputation_counts_from_the_first_layer_of_uneven_and_empty_stages():
    plan = plan_of(recompute=Recompute("full", num_layers=2), pp=4, stages="Et||tttt|tL")
    assert [layer for layer in range(6) if recomputes_whole(plan, layer)] == [0, 1, 2, 5]


def groups_of(plan, stage):
    """(prefix of the first block or its kind, count, recomputed) of every group."""
    groups = stage_groups(plan, stage)
    return [(group.blocks[0].prefix or group.kind, group.count, group.recomputed) for group in groups]


def test_a_stage_is_its_groups():
    plan = plan_of(recompute=Recompute("full", num_layers=3))
    assert groups_of(plan, 0) == [
        ("embedding", 1, False),
        ("layers.0", 2, True),
        ("layers.2", 1, True),
        ("layers.3", 3, False),
        ("mtp.0", 2, False),
        ("head", 1, False),
    ]


@given(
    model=st.sampled_from([DENSE, MIXED, ALL]),
    stages=st.sampled_from(["Et*6L", "Ett|ttttL", "E|t*6|L", "Ettt||tttL", "Et|tttt|tL"]),
    recompute=st.sampled_from(
        [Recompute(), Recompute("selective"), Recompute("full"), Recompute("full", 1), Recompute("full", 4)]
    ),
    tp=st.sampled_from([1, 2, 4]),
)
def test_the_groups_of_a_stage_do_what_its_layers_do(model, stages, recompute, tp):
    plan = plan_of(model, recompute, stages=stages, pp=stages.count("|") + 1, tp=tp, sequence_parallel=tp == 4)
    for stage in range(plan.layout.pp):
        for part in ("forward", "input_gradient", "weight_gradient", "recomputed"):
            one_by_one = Counter(nameless(each) for work in stage_ops(plan, stage) for each in getattr(work, part))
            grouped: Counter[object] = Counter()
            for group in stage_groups(plan, stage):
                for work in group_ops(plan, group):
                    for each in getattr(work, part):
                        grouped[nameless(each)] += group.count
            assert grouped == one_by_one


def nameless(operation):
    return replace(operation, layer="")


def test_layers_without_experts_are_dense_groups():
    ends = ("embedding", 1, False), ("head", 1, False)
    assert groups_of(plan_of(DENSE), 0) == [ends[0], ("layers.0", 6, False), ends[1]]
    assert groups_of(plan_of(MIXED, stages="Ett|ttttL", pp=2), 0) == [ends[0], ("layers.0", 2, False)]
    assert groups_of(plan_of(MIXED, stages="E|t*6|L", pp=3), 1) == [("layers.0", 2, False), ("layers.2", 4, False)]
