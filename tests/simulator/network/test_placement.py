"""Replicas that lie differently over nodes: against every group of the layout, and what they cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import product_plan
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import DataParallel
from shardproof.simulator.network.placement import replicas_placed_equally
from shardproof.simulator.network.spreads import Spreads
from shardproof.simulator.network.topology import spread_of
from shardproof.simulator.simulation.simulate import simulate
from shardproof.simulator.step.step import simulate_first

LAYOUTS = [
    Layout(tp=8, pp=2, dp=3),
    Layout(tp=2, pp=3, dp=4, order="pp-tp-dp"),
    Layout(tp=4, pp=3, dp=4, order="pp-dp-tp"),
    Layout(tp=2, cp=3, pp=2, dp=4),
    Layout(tp=3, dp=8),
    Layout(tp=2, pp=2, dp=6),
    Layout(tp=4, pp=3, dp=2),
    Layout(tp=8, dp=4, order="dp-tp-pp"),
    Layout(dp=24, ep=8),
    Layout(dp=24, ep=6),
    Layout(tp=2, dp=12, ep=4, etp=1, sequence_parallel=True),
    Layout(tp=2, pp=2, dp=12, ep=3),
]


def plan_of(layout: Layout, **changes) -> Plan:
    name, experts = ("mixtral-8x7b", {"num_experts": 24}) if layout.ep > 1 else ("llama3-8b", {})
    sizes = {"num_layers": 12, "num_heads": 24, "num_kv_heads": 24, "head_dim": 128, **experts}
    return product_plan(
        layout, model=name, cluster="dgx-h100", **sizes, samples=4 * layout.dp, sequence=1536, **changes
    )


def patterns(plan: Plan, dp_rank: int) -> list[object]:
    """How the groups of one replica lie, rank by rank: nodes of tp, cp and expert groups, and who of
    neighbouring stages shares one."""
    layout, per_node = plan.layout, plan.cluster.devices_per_node
    ranks = [rank for rank in range(layout.world_size) if layout.coordinates(rank)["dp"] == dp_rank]
    found: list[object] = []
    for groups in [
        layout.groups("tp"),
        layout.groups("cp"),
        *([layout.expert_groups("ep")] if plan.model.is_moe else []),
    ]:
        found += [spread_of(plan.cluster, next(group for group in groups if rank in group)) for rank in ranks]
    for rank in ranks:
        here = layout.coordinates(rank)
        if here["pp"] + 1 < layout.pp:
            peer = layout.global_rank(**{**here, "pp": here["pp"] + 1})
            found.append(rank // per_node == peer // per_node)
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.degrees} {layout.order}")
def test_replicas_are_placed_equally_exactly_where_their_groups_do(layout):
    plan = plan_of(layout)
    equal = all(patterns(plan, dp_rank) == patterns(plan, 0) for dp_rank in range(layout.dp))
    assert replicas_placed_equally(plan) is equal


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.degrees} {layout.order}")
def test_members_are_the_group_of_the_replicas_own_rank(layout):
    plan = plan_of(layout)
    groups = {
        "tp": layout.groups("tp"),
        "cp": layout.groups("cp"),
        "dp": layout.groups("cp-dp"),
        "model": layout.groups("tp-pp"),
    }
    groups |= {"ep": layout.expert_groups("ep"), "etp": layout.expert_groups("tp"), "edp": layout.expert_groups("dp")}
    for dp_rank in range(layout.dp):
        spreads = Spreads(plan, dp_rank)
        for pp_rank in range(layout.pp):
            here = layout.global_rank(dp=dp_rank, pp=pp_rank)
            assert spreads.global_rank(pp_rank) == here
            for axis, lists in groups.items():
                assert spreads.members(axis, 0, pp_rank).tolist() == sorted(
                    next(group for group in lists if here in group)
                ), axis


def test_shards_of_hybrid_sharding_are_those_around_the_rank():
    plan = plan_of(Layout(tp=2, dp=8, zero=3), data_parallel=DataParallel(shard=4))
    assert Spreads(plan, 5).members("dp_shard", 0, 0).tolist() == [8, 10, 12, 14]
    assert Spreads(plan, 5).members("dp_replicate", 0, 0).tolist() == [2, 10]
    assert Spreads(plan).members("dp_shard", 0, 0).tolist() == [0, 2, 4, 6]


def test_a_replica_whose_tensor_parallel_groups_cross_nodes_sets_the_pace():
    """Replicas of 6 ranks on nodes of 8: tp pairs are three ranks apart, so those of replicas 1 and 2
    lie on two nodes each."""
    plan = plan_of(Layout(tp=2, pp=3, dp=4, order="pp-tp-dp"))
    simulation, first = simulate(plan), simulate_first(plan)
    assert not replicas_placed_equally(plan) and simulation.dp_rank in (1, 2)
    assert simulation.report["step_time_s"] > first.report["step_time_s"]
    assert simulation.report["time_s"]["tp_comm"] > 2 * first.report["time_s"]["tp_comm"]
    assert sum(simulation.report["time_s"].values()) == simulation.report["step_time_s"]
    assert "variation" not in simulation.report


def test_replicas_that_are_placed_equally_are_simulated_once_and_all_of_them_give_the_same():
    plan = plan_of(Layout(tp=2, pp=2, dp=6))
    assert simulate(plan).report == simulate_first(plan).report


def test_oversubscribed_leaf_switches_make_replicas_differ():
    plan = plan_of(Layout(tp=8, pp=3, dp=4))
    shaped = replace(plan, cluster=replace(plan.cluster, nodes_per_leaf=6))
    assert replicas_placed_equally(plan) and replicas_placed_equally(shaped)
    narrow = replace(shaped, cluster=replace(shaped.cluster, oversubscription=4.0))
    assert not replicas_placed_equally(narrow)
    assert simulate(narrow).report["step_time_s"] >= simulate_first(narrow).report["step_time_s"]
