"""The machine as a graph, the routes of messages through it, and what collectives load."""

from __future__ import annotations

import itertools
from dataclasses import replace

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.program import Collective
from shardproof.simulator.network.network import collective_s
from shardproof.simulator.network.topology import (
    capacity_bytes_per_s,
    collective_loads,
    route,
    spread_of,
    topology,
)

RAILS = replace(cluster_preset("dgx-h100", 64), nodes_per_leaf=2, rails=True, oversubscription=2.0)
FOUR_CARDS = replace(cluster_preset("dgx-a100-80g", 64), nics_per_node=4, nodes_per_leaf=0, rails=False)
TREE = replace(cluster_preset("dgx-a100-80g", 64), nodes_per_leaf=4, rails=False, oversubscription=3.0)
CLUSTERS = {"rails": RAILS, "four cards": FOUR_CARDS, "tree": TREE, "host": cluster_preset("this-host", 4)}
ranks64 = st.integers(0, 63)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_route_is_a_path_of_the_graph_from_device_to_device(name):
    cluster = CLUSTERS[name]
    graph = topology(cluster)
    by_link = {link: (tail, head) for tail, head, link in graph.edges(data="link") if link}
    device = {rank: node for node, rank in graph.nodes(data="rank") if rank is not None}
    assert sorted(device) == list(range(cluster.num_devices))
    for source in (0, 3, cluster.num_devices - 1):
        for destination in range(cluster.num_devices):
            place = device[source]
            for link in route(cluster, source, destination):
                tail, head = by_link[link]
                assert tail == place or (place, tail) in graph.edges or tail[0] == "leaf", (source, destination, link)
                assert graph.edges[tail, head]["bytes_per_s"] == capacity_bytes_per_s(cluster, link)
                place = head
            assert place == device[destination] or (place, device[destination]) in graph.edges


def test_without_rails_a_route_is_a_shortest_path():
    for cluster in (TREE, FOUR_CARDS):
        graph = topology(cluster)
        device = {rank: node for node, rank in graph.nodes(data="rank") if rank is not None}
        for destination in (1, 8, 31, 32, 63):
            path = networkx.shortest_path(graph, device[0], device[destination])
            links = [graph.edges[edge]["link"] for edge in itertools.pairwise(path)]
            assert [link for link in links if link] == list(route(cluster, 0, destination))


def test_a_message_to_another_rail_crosses_to_that_rails_device_first():
    assert route(RAILS, 0, 8) == (("card-out", 0, 0), ("card-in", 1, 0))
    assert route(RAILS, 0, 9) == (("device-up", 0, 0), ("device-down", 0, 1), ("card-out", 0, 1), ("card-in", 1, 1))
    assert route(RAILS, 1, 17) == (("card-out", 0, 1), ("leaf-up", 0, 1), ("leaf-down", 1, 1), ("card-in", 2, 1))
    assert route(RAILS, 5, 5) == ()


def test_neighbours_share_a_card_where_there_are_four_for_eight_devices():
    assert [route(FOUR_CARDS, rank, 8)[0] for rank in range(8)] == [("card-out", 0, rank // 2) for rank in range(8)]
    assert capacity_bytes_per_s(FOUR_CARDS, ("card-out", 0, 0)) == 200e9 * 0.92 / 4


def test_an_uplink_carries_its_nodes_injection_over_the_oversubscription():
    assert capacity_bytes_per_s(TREE, ("leaf-up", 0, 0)) == pytest.approx(4 * 200e9 * 0.92 / 3)
    assert capacity_bytes_per_s(RAILS, ("leaf-up", 0, 5)) == pytest.approx(2 * 400e9 * 0.92 / 8 / 2)


def test_a_graph_of_1024_devices_has_a_switch_per_node_a_card_per_device_and_a_leaf_per_rail():
    graph = topology(cluster_preset("dgx-h100", 1024))
    kinds = [node[0] for node in graph.nodes]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "device": 1024,
        "switch": 128,
        "card": 1024,
        "leaf": 4 * 8,
        "core": 1,
    }
    assert networkx.is_strongly_connected(graph)


def test_a_ring_over_two_nodes_loads_every_card_with_an_eighth_and_every_link_with_all():
    loads = collective_loads(RAILS, range(16), "all_gather")
    assert {loads["card-out", 0, card] for card in range(8)} == {1 / 8}
    assert {loads["device-up", 1, device] for device in range(8)} == {1.0}


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(("rails", "four cards", "tree")),
    st.sampled_from(("all_gather", "reduce_scatter", "all_to_all")),
    st.sampled_from(
        [range(8), range(16), range(64), range(0, 64, 8), range(0, 64, 16), range(0, 32, 4), range(3, 64, 8)]
    ),
    st.integers(1, 10**10),
)
def test_a_collective_takes_at_least_as_long_as_its_fullest_link(name, op, ranks, sent_bytes):
    cluster = CLUSTERS[name]
    loads = collective_loads(cluster, ranks, op)
    bound = max(sent_bytes * load / capacity_bytes_per_s(cluster, link) for link, load in loads.items())
    operation = Collective("", op, "dp", len(ranks), sent_bytes)  # type: ignore[arg-type]
    assert collective_s(cluster, spread_of(cluster, ranks), operation) >= bound * (1 - 1e-9)


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(0, 64, 4)))
def test_the_order_of_equal_ranks_changes_nothing(ranks):
    assert spread_of(TREE, ranks) == spread_of(TREE, range(0, 64, 4))


@given(ranks64, ranks64)
def test_the_way_back_uses_the_other_direction_of_the_same_cards(source, destination):
    def cards(links):
        return {(node, card) for kind, node, card in links if kind.startswith("card")}

    assert cards(route(TREE, source, destination)) == cards(route(TREE, destination, source))
