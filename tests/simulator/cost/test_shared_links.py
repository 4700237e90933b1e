"""Transfers of a plan on a node's network cards: who shares them, and that sharing only ever costs time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from helpers.plans import product_plan
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.program import message_bytes
from shardproof.core.schedule.action import Kind
from shardproof.simulator.cost.pricing import Pricing
from shardproof.simulator.cost.shared_links import shared_links
from shardproof.simulator.engine.attribution import sorts_of
from shardproof.simulator.engine.contention import overloaded_links
from shardproof.simulator.engine.engine import execute
from shardproof.simulator.network.topology import network_share_bytes_per_s
from shardproof.simulator.simulation.simulate import simulate
from shardproof.simulator.step.step import plan_graph

MODEL = replace(model_preset("llama3-8b"), num_layers=8)


def plan(layout: Layout, **cluster) -> Plan:
    return product_plan(
        layout,
        model=MODEL,
        cluster=replace(cluster_preset("dgx-h100", layout.world_size), **cluster),
        samples=8 * layout.dp,
        sequence=4096,
        profile="megatron-te",
        p2p_overlap=True,
    )


def loads(chosen: Plan):
    sorts = sorts_of(plan_graph(chosen))
    prices = Pricing(chosen).of_graph(sorts).prices
    return sorts, shared_links(chosen, sorts, prices), prices


def test_nothing_is_shared_inside_one_node():
    assert loads(plan(Layout(tp=2, pp=2, dp=2)))[1] is None


def test_a_message_stands_for_all_devices_of_its_stage_on_the_node():
    sorts, traffic, prices = loads(plan(Layout(tp=8, pp=2)))
    (send,) = [i for i, sort in enumerate(sorts.sorts) if sort.kind is Kind.SEND_F]
    action = int(np.flatnonzero(sorts.of_action == send)[0])
    route = int(traffic.route[action])
    assert traffic.routes[route] == {("out", 0): 8.0, ("in", 1): 8.0}
    share = network_share_bytes_per_s(plan(Layout(tp=8, pp=2)).cluster)
    moved = message_bytes(plan(Layout(tp=8, pp=2)))
    assert traffic.rate_bytes_per_s[route] == pytest.approx(min(share, moved / prices[send].total_s))


def test_two_groups_of_a_node_reduce_over_the_same_cards():
    sorts, traffic, _ = loads(plan(Layout(tp=2, pp=2, dp=8)))
    (reduce,) = [i for i, sort in enumerate(sorts.sorts) if sort.kind is Kind.REDUCE_GRAD and sort.pp_rank == 0]
    route = int(traffic.route[int(np.flatnonzero(sorts.of_action == reduce)[0])])
    assert traffic.routes[route] == {("out", 0): 2.0, ("in", 0): 2.0}  # four data-parallel ranks of each of two groups


def test_alone_no_transfer_is_too_much_for_its_cards():
    _, traffic, _ = loads(plan(Layout(tp=2, pp=2, dp=8)))
    for route, rate in zip(traffic.routes, traffic.rate_bytes_per_s, strict=True):
        assert all(rate * share <= traffic.capacity_bytes_per_s[link] * (1 + 1e-12) for link, share in route.items())


@pytest.mark.parametrize("slower", [1, 8, 64])
def test_sharing_never_shortens_a_step_and_costs_little_where_cards_are_fast(slower):
    chosen = plan(Layout(tp=2, pp=2, dp=16), node_network_bytes_per_s=400e9 / slower)
    graph = plan_graph(chosen)
    _, duration_s, overlap, links = Pricing(chosen).of_graph(sorts_of(graph))
    alone = execute(graph, duration_s, **overlap)
    step_s = simulate(chosen).report["step_time_s"]
    steps = graph.schedule.actions.kind == Kind.STEP
    apart_s = float(alone.start_s[steps].max() + duration_s[steps].max())
    assert step_s >= apart_s * (1 - 1e-9)
    if not overloaded_links(alone, links):
        assert step_s == pytest.approx(apart_s)
    assert sum(simulate(chosen).report["time_s"].values()) == step_s
