"""Communication seconds: where groups lie, and the limits of the model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardproof.core.cluster_presets import cluster_preset
from shardproof.core.program import Collective
from shardproof.simulator.network import Spread, collective_s, message_s, spread_of

CLUSTER = replace(cluster_preset("dgx-a100-80g", 64), node_link_latency_s=0.0, network_latency_s=0.0, link_efficiency=1.0)
LINK = CLUSTER.node_link_bytes_per_s
SHARE = CLUSTER.node_network_bytes_per_s / 8


def collective(op: str, size: int, sent_bytes: int) -> Collective:
    return Collective("layer", op, "tp", size, sent_bytes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "spread"), [([3], (1, 1)), ([0, 1, 2], (1, 3)), ([0, 8, 16], (3, 1)), ([6, 7, 8], (2, 2)), ([0, 4, 8, 12, 16, 20], (3, 2))]
)
def test_spread_counts_nodes_and_members(ranks, spread):
    assert spread_of(CLUSTER, ranks) == Spread(*spread)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_inside_a_node_all_bytes_use_links_and_across_single_devices_all_use_the_network(op, size):
    assert collective_s(CLUSTER, Spread(1, size), collective(op, size, 10**9)) == pytest.approx(1e9 / LINK)
    assert collective_s(CLUSTER, Spread(size, 1), collective(op, size, 10**9)) == pytest.approx(1e9 / SHARE)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 8), (3, 5), (6, 4)])
def test_hierarchical_gather_sends_each_shard_once_per_other_node(nodes, per_node):
    size, shard = nodes * per_node, 10**7
    expected = (nodes - 1) * shard / SHARE + (per_node - 1) * nodes * shard / LINK
    assert collective_s(CLUSTER, Spread(nodes, per_node), collective("all_gather", size, (size - 1) * shard)) == pytest.approx(expected)
    part = 10**6
    expected = (size - per_node) * part / SHARE + (per_node - 1) * part / LINK
    assert collective_s(CLUSTER, Spread(nodes, per_node), collective("all_to_all", size, (size - 1) * part)) == pytest.approx(expected)


def test_group_of_one_is_free_and_latency_counts_hops():
    slow = replace(CLUSTER, node_link_latency_s=1.0, network_latency_s=100.0)
    assert collective_s(slow, Spread(1, 1), collective("all_reduce", 1, 0)) == 0
    assert collective_s(slow, Spread(1, 6), collective("all_gather", 6, 0)) == 5
    assert collective_s(slow, Spread(3, 2), collective("all_gather", 6, 0)) == 1 + 200
    assert collective_s(slow, Spread(1, 8), collective("all_reduce", 8, 0)) == 6


def test_message_between_nodes_uses_the_devices_share():
    assert message_s(CLUSTER, 0, 7, 10**9) == pytest.approx(1e9 / LINK)
    assert message_s(CLUSTER, 7, 8, 10**9) == pytest.approx(1e9 / SHARE)
