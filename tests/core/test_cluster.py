"""Clusters: every number has a source, and the hierarchy is a graph of levels."""

import dataclasses
import os

import networkx
import pytest

from shardproof.core.cluster import ClusterSpec
from shardproof.core.cluster_presets import CLUSTER_PRESETS, cluster_preset
from shardproof.core.errors import ClusterError, UnknownNameError


@pytest.mark.parametrize("name", CLUSTER_PRESETS)
def test_every_number_of_a_preset_has_a_source(name):
    cluster = cluster_preset(name, 16)
    numbers = {field.name for field in dataclasses.fields(ClusterSpec)} - {"name", "num_devices", "sources"}
    assert set(cluster.sources) == numbers
    assert cluster.name == name and all(cluster.sources.values())


def test_dgx_h100_of_512_devices_is_64_nodes_with_3_2_tb_per_s_of_network_bits_each():
    cluster = cluster_preset("dgx-h100", 512)
    assert cluster.num_nodes == 64
    assert cluster.node_network_bytes_per_s == 8 * 400e9 / 8
    assert cluster.peak_flops_per_s["bf16"] == 989.4e12


def test_the_graph_has_levels_not_devices():
    graph = cluster_preset("dgx-a100-80g", 1024).graph()
    assert list(networkx.topological_sort(graph)) == ["cluster", "node", "device"]
    assert (graph.nodes["node"]["count"], graph.nodes["device"]["count"]) == (128, 8)
    assert graph.edges["cluster", "node"]["bytes_per_s"] == 200e9
    assert graph.edges["node", "device"]["bytes_per_s"] == 300e9


def test_this_host_shares_its_memory_and_cores_among_its_ranks():
    one, many = cluster_preset("this-host", 1), cluster_preset("this-host", 64)
    assert many.device_memory_bytes == one.device_memory_bytes / 64
    assert many.peak_flops_per_s["fp32"] == pytest.approx(one.peak_flops_per_s["fp32"] * min(1, (os.cpu_count() or 1) / 64))
    assert many.num_nodes == 1


def test_every_problem_of_a_cluster_is_reported_together():
    with pytest.raises(ClusterError) as caught:
        dataclasses.replace(
            cluster_preset("dgx-h100", 8), devices_per_node=0, link_efficiency=1.5, network_latency_s=-1.0, peak_flops_per_s={"bf61": 1.0}
        )
    assert len(caught.value.problems) == 4


def test_an_unknown_cluster_offers_the_closest_one():
    with pytest.raises(UnknownNameError, match="did you mean 'dgx-h100'"):
        cluster_preset("dgx-h10", 8)


def test_a_cluster_can_be_hashed_so_that_plans_can_be():
    assert hash(cluster_preset("dgx-h100", 8)) == hash(cluster_preset("dgx-h100", 8))
