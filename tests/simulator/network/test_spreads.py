"""`Spreads`: the groups of rank 0 of every pipeline rank are those that `Layout` enumerates, and
shifted groups are placed in the same way."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plans import product_plan
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch, DataParallel, ScheduleChoice
from shardproof.core.schedule.action import Kind
from shardproof.simulator.cost.pricing import Pricing
from shardproof.simulator.network.spreads import Spreads
from shardproof.simulator.network.topology import spread_of

DEGREES = st.sampled_from([1, 2, 3, 4])


def plan(layout: Layout, schedule: str = "1F1B", per_node: int = 8, **more) -> Plan:
    sizes = {
        "num_layers": 12,
        "num_heads": 24,
        "num_kv_heads": 24,
        "num_experts": 24,
        "ffn_hidden_size": 14400,
        "max_positions": 4608,
    }
    cluster = replace(cluster_preset("dgx-h100", layout.world_size), devices_per_node=per_node)
    choices = {"schedule": schedule, "microbatches": 24, "sequence": 4608, **more}
    return product_plan(layout, model="mixtral-8x7b", cluster=cluster, **sizes, **choices)


@settings(max_examples=60, deadline=None)
@given(
    DEGREES,
    st.sampled_from([1, 2, 4]),
    DEGREES,
    st.sampled_from([1, 2, 3, 4]),
    DEGREES,
    st.permutations(["tp", "cp", "ep", "dp"]),
)
def test_groups_are_those_of_the_layout(tp, cp, dp, pp, ep, order):
    if tp * cp * dp % (tp * ep):
        ep = 1
    layout = Layout(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, order="-".join([*order, "pp"]), sequence_parallel=tp > 1)
    spreads = Spreads(plan(layout, per_node=layout.world_size))
    for pp_rank in range(pp):
        first = layout.global_rank(pp=pp_rank)
        for axis, axes in (("tp", "tp"), ("cp", "cp"), ("dp", "cp-dp")):
            assert spreads.members(axis, pp_rank, pp_rank).tolist() == sorted(layout.group_of(first, axes))
        for axis, name in (("ep", "ep"), ("etp", "tp"), ("edp", "dp")):
            (group,) = (group for group in layout.expert_groups(name) if first in group)
            assert spreads.members(axis, pp_rank, pp_rank).tolist() == sorted(group)


@pytest.mark.parametrize("per_node", [2, 3, 4, 6, 8, 12])
def test_spreads_looked_up_by_shift_are_those_of_the_members(per_node):
    layout = Layout(tp=2, cp=1, dp=3, pp=4)
    found = Spreads(plan(layout, per_node=per_node))
    for pp_rank in range(4):
        for axis in ("tp", "dp", "model"):
            ranks = found.members(axis, pp_rank, pp_rank).tolist()
            assert found.spread(axis, pp_rank, pp_rank) == spread_of(found._plan.cluster, ranks)


def test_replicas_and_tied_ends_name_both_pipeline_ranks():
    spreads = Spreads(plan(Layout(tp=2, dp=2, pp=4), "DualPipe"))
    assert spreads.members("replica", 0, 0).tolist() == [0, 2, 12, 14]
    assert spreads.members("replica", 1, 2).tolist() == [4, 6, 8, 10]


def test_hybrid_shards_are_neighbours_and_replicas_are_apart():
    layout = Layout(tp=2, dp=8, zero=3)
    spreads = Spreads(plan(layout, data_parallel=DataParallel(shard=4)))
    assert spreads.members("dp_shard", 0, 0).tolist() == [0, 2, 4, 6]
    assert spreads.members("dp_replicate", 0, 0).tolist() == [0, 8]


def test_a_plan_with_zero_finds_its_tied_ends_after_the_same_plan_without_was_priced():
    layout = Layout(pp=4, dp=2)
    plain = Plan(
        model_preset("tiny-gpt"),
        cluster_preset("dgx-a100-80g", 8),
        layout,
        Batch(16, 1, 32),
        schedule=ScheduleChoice("DualPipe"),
    )
    sharded = replace(plain, layout=replace(layout, zero=1))
    shared: dict = {}
    Pricing(plain, shared=shared).seconds(Kind.STEP, 0)
    assert Pricing(sharded, shared=shared).seconds(Kind.STEP, 0) == Pricing(sharded, shared={}).seconds(Kind.STEP, 0)
