"""Communication seconds: where groups lie, messages, hosts, measured curves, and how little a look-up may cost."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from shardproof.core.base.errors import ClusterError
from shardproof.core.machine.cluster import ClusterSpec
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.program import Collective
from shardproof.simulator.network.network import best_algorithm, collective_s, message_s
from shardproof.simulator.network.topology import Spread, spread_of

A100 = cluster_preset("dgx-a100-80g", 64)
LINK = 300e9 * 0.78
SHARE = 200e9 * 0.92 / 8
FREE = replace(
    A100,
    node_link_latency_s=0.0,
    network_latency_s=0.0,
    collective_launch_s=0.0,
    collective_ramp_bytes=0.0,
    leaf_latency_s=0.0,
)
HOST = replace(FREE, collective_library="gloo")


def collective(op: str, size: int, sent_bytes: int) -> Collective:
    return Collective("layer", op, "tp", size, sent_bytes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "spread"),
    [([3], (1, 1)), ([0, 1, 2], (1, 3)), ([0, 8, 16], (3, 1)), ([6, 7, 8], (2, 2)), ([0, 4, 8, 12, 16, 20], (3, 2))],
)
def test_spread_counts_nodes_and_members(ranks, spread):
    assert spread_of(A100, ranks) == Spread(*spread)


def test_spread_counts_leaf_switches_of_20_nodes_each():
    cluster = cluster_preset("dgx-a100-80g", 1024)
    assert spread_of(cluster, range(0, 1024, 8)) == Spread(128, 1, 7)
    assert spread_of(replace(cluster, nodes_per_leaf=0), range(0, 1024, 8)) == Spread(128, 1)


@pytest.mark.parametrize("cluster", [FREE, HOST], ids=["nccl", "gloo"])
@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_inside_a_node_all_bytes_use_links_and_across_single_devices_all_use_the_network(cluster, op, size):
    assert collective_s(cluster, Spread(1, size), collective(op, size, 10**9)) == pytest.approx(1e9 / LINK)
    assert collective_s(cluster, Spread(size, 1), collective(op, size, 10**9)) == pytest.approx(1e9 / SHARE)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 8), (3, 5), (6, 4)])
def test_a_gather_across_nodes_is_as_fast_as_its_cards_since_links_work_meanwhile(nodes, per_node):
    size, shard = nodes * per_node, 10**8
    expected = (size - 1) * shard / min(LINK, per_node * SHARE)
    assert collective_s(
        FREE, Spread(nodes, per_node), collective("all_gather", size, (size - 1) * shard)
    ) == pytest.approx(expected)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 8), (3, 5), (6, 4)])
def test_on_hosts_a_gather_sends_each_shard_once_per_other_node_and_copies_one_after_the_other(nodes, per_node):
    size, shard = nodes * per_node, 10**7
    expected = (nodes - 1) * shard / SHARE + (per_node - 1) * nodes * shard / LINK
    assert collective_s(
        HOST, Spread(nodes, per_node), collective("all_gather", size, (size - 1) * shard)
    ) == pytest.approx(expected)
    part = 10**6
    expected = (size - per_node) * part / SHARE + (per_node - 1) * part / LINK
    assert collective_s(
        HOST, Spread(nodes, per_node), collective("all_to_all", size, (size - 1) * part)
    ) == pytest.approx(expected)


def test_on_hosts_a_group_of_one_is_free_and_latency_counts_hops():
    slow = replace(HOST, node_link_latency_s=1.0, network_latency_s=100.0)
    assert collective_s(slow, Spread(1, 1), collective("all_reduce", 1, 0)) == 0
    assert collective_s(slow, Spread(1, 6), collective("all_gather", 6, 0)) == 5
    assert collective_s(slow, Spread(3, 2), collective("all_gather", 6, 0)) == 1 + 200
    assert collective_s(slow, Spread(1, 8), collective("all_reduce", 8, 0)) == 6
    assert best_algorithm(slow, Spread(1, 8), collective("all_to_all", 8, 0)).algorithm == "exchange"


def test_message_between_nodes_uses_the_devices_share():
    assert message_s(FREE, 0, 7, 10**9) == pytest.approx(1e9 / LINK)
    assert message_s(FREE, 7, 8, 10**9) == pytest.approx(1e9 / SHARE)


@pytest.mark.parametrize(
    ("megabytes", "ranks", "channels"),
    [(1, 8, 4), (64, 8, 4), (65, 8, 8), (256, 8, 16), (600, 8, 32), (8, 2, 16), (8, 4, 8), (8, 64, 1)],
)
def test_a_message_inside_a_node_takes_the_channels_that_its_size_and_communicator_give_it(megabytes, ranks, channels):
    """Four channels up to 64 MiB among eight ranks, as sendrecv on eight B200 shows: 84 GB/s to 64 MiB, then
    twice as much a step."""
    cluster = replace(FREE, channel_bytes_per_s=1e9)
    num_bytes = megabytes * 2**20
    assert message_s(cluster, 0, 1, num_bytes, ranks=ranks) == pytest.approx(num_bytes / (channels * 1e9))


def test_a_message_between_nodes_of_h100_takes_two_channels_rather_than_the_whole_card():
    h100 = cluster_preset("dgx-h100", 16)
    assert message_s(h100, 0, 8, 10**9) == pytest.approx(1e9 / (2 * 18.3e9), rel=1e-3)
    assert message_s(replace(h100, channel_bytes_per_s=0.0), 0, 8, 10**9) == pytest.approx(
        1e9 / (50e9 * 0.92), rel=2e-3
    )


def test_an_empty_message_costs_a_launch_and_a_hop():
    assert message_s(A100, 0, 7, 0) == pytest.approx(8.4e-6 + 3.4e-6)
    assert message_s(A100, 7, 8, 0) == pytest.approx(8.4e-6 + 14e-6)


def test_oversubscription_slows_what_crosses_leaf_switches_only():
    """Two nodes a leaf, four times oversubscribed. A ring of nodes in order crosses once for every two nodes:
    half the rate remains."""
    flat, over = replace(FREE, nodes_per_leaf=2), replace(FREE, nodes_per_leaf=2, oversubscription=4.0)
    assert message_s(over, 0, 8, 10**9) == message_s(flat, 0, 8, 10**9)
    assert message_s(over, 0, 16, 10**9) == pytest.approx(4 * message_s(flat, 0, 16, 10**9))
    inside, across = spread_of(over, range(16)), spread_of(over, range(64))
    assert (inside, across) == (Spread(2, 8, 1), Spread(8, 8, 4))
    gather, exchange = collective("all_gather", 64, 10**9), collective("all_to_all", 64, 10**9)
    assert collective_s(over, inside, gather) == collective_s(flat, inside, gather)
    assert collective_s(over, across, gather) == pytest.approx(2 * collective_s(flat, across, gather))
    assert collective_s(over, across, exchange) == pytest.approx(4 * 48 / 56 * collective_s(flat, across, exchange))
    scattered = spread_of(over, range(0, 64, 16))  # one node of every leaf: each step crosses
    gather = collective("all_gather", 4, 10**9)
    assert collective_s(over, scattered, gather) == pytest.approx(4 * collective_s(flat, scattered, gather))


def test_crossing_leaf_switches_adds_their_latency():
    cluster = replace(A100, nodes_per_leaf=1, leaf_latency_s=1.0)
    assert message_s(cluster, 0, 8, 0) == pytest.approx(1.0, abs=1e-3)
    assert collective_s(cluster, spread_of(cluster, range(0, 32, 8)), collective("all_gather", 4, 0)) == pytest.approx(
        3.0, abs=1e-3
    )


def test_the_rank_order_decides_which_links_a_group_uses():
    """Gradients of 1 GB over eight ranks: neighbours use NVLink, ranks eight apart a card each."""
    gradients = collective("reduce_scatter", 8, 10**9)
    near, far = (collective_s(A100, spread_of(A100, ranks), gradients) for ranks in (range(8), range(0, 64, 8)))
    assert far / near == pytest.approx(LINK / SHARE, rel=0.05)


CURVE = {"all_gather-2-1000": 1e-3, "all_gather-2-100000": 1e-2, "all_gather-4-1000": 5.0, "message-2-1000": 7.0}


def test_a_measured_collective_is_read_off_its_curve():
    host = replace(cluster_preset("this-host", 4), collective_curve=CURVE)
    gather = {
        size: collective_s(host, Spread(1, 2), collective("all_gather", 2, size // 2))
        for size in (10, 1000, 10000, 100000, 10**6)
    }
    assert gather == pytest.approx({10: 1e-3, 1000: 1e-3, 10000: 10**-2.5, 100000: 1e-2, 10**6: 1e-1})
    assert collective_s(host, Spread(1, 4), collective("all_gather", 4, 750)) == 5.0
    assert collective_s(host, Spread(1, 3), collective("all_gather", 3, 10)) == collective_s(
        cluster_preset("this-host", 4), Spread(1, 3), collective("all_gather", 3, 10)
    )
    assert message_s(host, 0, 1, 1000) == 7.0
    assert best_algorithm(host, Spread(1, 2), collective("all_gather", 2, 500)).algorithm == "measured"


def test_a_measured_curve_survives_a_plan_file():
    plan = Plan.from_toml(
        '[model]\npreset = "gpt3-125m"\n[cluster]\npreset = "this-host"\nnum_devices = 2\ncollective_curve = { '
        "all_gather-2-1000 = 1e-3 }\n"
        '[layout]\ntp = 2\n[batch]\nglobal = 2\nsequence = 128\n[schedule]\nname = "1F1B"\n'
    )
    assert Plan.from_toml(plan.to_toml()).cluster.collective_curve == {"all_gather-2-1000": 1e-3}


@pytest.mark.parametrize(
    "key", ["all_gather", "all_gather-2", "gather-2-1000", "all_gather-two-1000", "all_gather-2-0"]
)
def test_a_curve_with_a_wrong_key_is_refused(key):
    with pytest.raises(ClusterError, match="keys such as all_reduce-2-4096"):
        replace(A100, collective_curve={key: 1.0})


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("nvls_efficiency", 1.5, "at most 1"),
        ("oversubscription", 0.5, "at least 1"),
        ("nodes_per_leaf", -1, "must be a whole number of at least 0"),
        ("collective_library", "mpi", "not one of nccl, gloo"),
    ],
)
def test_an_impossible_network_is_refused(field, value, rule):
    with pytest.raises(ClusterError, match=rule):
        replace(A100, **{field: value})


def test_a_collective_is_priced_in_microseconds():
    operation, spread = collective("all_reduce", 64, 10**8), Spread(8, 8)
    collective_s(A100, spread, operation)
    best = min(_timed(A100, spread, operation) for _ in range(5))
    assert best < 50e-6  # 3 us on an idle core of the development machine


def _timed(cluster: ClusterSpec, spread: Spread, operation: Collective) -> float:
    start = time.perf_counter()
    for _ in range(200):
        collective_s(cluster, spread, operation)
    return (time.perf_counter() - start) / 200
