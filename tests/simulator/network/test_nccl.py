"""NCCL's algorithms: what it takes at which size, its published latencies, and measured tables of several machines."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.paths import DATA
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.program import Collective
from shardproof.simulator.network.nccl import TREE_CORRECTION, Line, tree_correction
from shardproof.simulator.network.network import best_algorithm, collective_s
from shardproof.simulator.network.topology import Spread

TABLES = json.loads((DATA / "nccl_tests.json").read_text())
H100 = cluster_preset("dgx-h100", 2048)
RING_ONLY = replace(H100, nvls_efficiency=0.0)
KIB, MIB, GIB = 2**10, 2**20, 2**30
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def collective(op: str, ranks: int, payload: float) -> Collective:
    return Collective("", op, "dp", ranks, round(payload * (ranks - 1) * (2 if op == "all_reduce" else 1) / ranks))  # type: ignore[arg-type]


def seconds(cluster, op: str, payload: float, nodes: int, per_node: int = 8) -> float:
    return collective_s(cluster, Spread(nodes, per_node), collective(op, nodes * per_node, payload))


def chosen(cluster, op: str, payload: float, nodes: int, per_node: int = 8) -> str:
    choice = best_algorithm(cluster, Spread(nodes, per_node), collective(op, nodes * per_node, payload))
    return f"{choice.algorithm}/{choice.protocol}"


def test_eight_h100_reduce_by_ring_ll_to_1_mib_and_in_the_switch_beyond():
    """What NCCL printed of itself in nccl-tests issue 309, where the switch begins at 2 MiB. From there to 16 MiB
    rings are within 4% here."""
    assert {chosen(H100, "all_reduce", 2**power, 1) for power in range(3, 21)} == {"ring/LL"}
    assert {chosen(H100, "all_reduce", 2**power, 1) for power in range(25, 35)} == {"nvls/Simple"}
    for power in range(21, 25):
        choice = best_algorithm(H100, Spread(1, 8), collective("all_reduce", 8, 2**power))
        in_switch = next((other for name, _, other in choice.others if name == "nvls"), choice.seconds)
        assert in_switch < 1.04 * choice.seconds


def test_several_h100_nodes_reduce_by_tree_ll_then_tree_of_switches_then_ring():
    assert chosen(H100, "all_reduce", 64, 4) == "tree/LL"
    assert chosen(H100, "all_reduce", 128 * MIB, 4) == "nvls-tree/Simple"
    assert chosen(H100, "all_reduce", 8 * GIB, 4) == "ring/Simple"
    assert chosen(H100, "all_reduce", 8 * GIB, 2) == "nvls-tree/Simple"
    assert chosen(H100, "all_reduce", 512 * MIB, 248) == "nvls-tree/Simple"


@pytest.mark.parametrize(
    ("op", "nodes", "per_node", "microseconds"),
    [
        ("all_reduce", 1, 8, 6.6 + 14 * 0.6),  # ring, LL
        ("all_gather", 1, 8, 6.6 + 7 * 0.6),
        ("all_reduce", 4, 8, 6.6 + 2 * (7 * 0.6 + 2 * 5.0)),  # tree, LL; issue 309 measures 34.8
        ("all_gather", 4, 8, 6.6 + 28 * 1.0 + 3 * 2.7),  # a step posts for 1 us, three of 31 cross
        ("all_gather", 16, 1, 6.6 + 15 * 5.0),  # nothing hides the network
    ],
)
def test_latency_of_an_empty_collective_is_the_one_of_nccls_cost_model(op, nodes, per_node, microseconds):
    assert seconds(H100, op, 0, nodes, per_node) == pytest.approx(microseconds * 1e-6)


@pytest.mark.parametrize(("ranks", "measured"), [(5, 258), (6, 265), (7, 270), (8, 273)])
def test_sums_in_the_switch_slow_down_with_fewer_devices_as_nccl_issue_1455_measured(ranks, measured):
    rate = 16 * GIB / seconds(H100, "all_reduce", 16 * GIB, 1, ranks) / 1e9
    assert rate == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_of_two_to_four_devices_the_bus_bandwidth_is_a_rings_as_nccl_issue_1455_measured(ranks):
    bus = 2 * (ranks - 1) / ranks * 16 * GIB / seconds(H100, "all_reduce", 16 * GIB, 1, ranks) / 1e9
    assert bus == pytest.approx(367, rel=0.02)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table["name"])
def test_measured_tables_are_met(table):
    """Bandwidth within a few percent, and the whole table in the middle: small sizes carry hosts and fabrics
    that no preset knows."""
    cluster = cluster_preset(table["preset"], table["ranks"])
    per_node = table["ranks"] // table["nodes"]
    errors = {
        size: seconds(cluster, table["op"], size, table["nodes"], per_node) / (us * 1e-6) - 1
        for size, us in table["rows"]
    }
    assert all(abs(error) < 0.10 for size, error in errors.items() if size >= GIB), errors
    assert statistics.fmean(map(abs, errors.values())) < 0.125, errors
    # 4 MiB took longer than 8 MiB there
    assert max(map(abs, errors.values())) < 0.37 or "all-to-all" in table["name"], errors


def test_measured_tables_are_met_within_8_percent_on_average_and_nowhere_much_too_slow():
    errors = []
    for table in TABLES:
        cluster = cluster_preset(table["preset"], table["ranks"])
        per_node = table["ranks"] // table["nodes"]
        errors += [
            seconds(cluster, table["op"], size, table["nodes"], per_node) / (us * 1e-6) - 1
            for size, us in table["rows"]
        ]
    assert len(errors) == 146
    assert statistics.fmean(map(abs, errors)) < 0.08
    assert statistics.median(map(abs, errors)) < 0.05
    assert max(errors) < 0.22


def test_tensor_parallelism_over_two_nodes_uses_all_cards_of_a_node():
    """A flat ring through one card would take eight times as long."""
    payload, share = GIB, 400e9 * 0.92 / 8
    bound = 2 * 15 / 16 * payload / (8 * share)
    assert bound <= seconds(RING_ONLY, "all_reduce", payload, 2) < 1.1 * bound


def test_half_the_network_of_a_node_doubles_the_time_of_large_collectives_between_nodes():
    half = replace(H100, node_network_bytes_per_s=200e9)
    for op in ("all_gather", "all_to_all"):
        assert seconds(half, op, 8 * GIB, 8) == pytest.approx(2 * seconds(H100, op, 8 * GIB, 8), rel=0.02)


def test_sharp_nearly_halves_a_large_reduction_over_many_nodes():
    a100 = cluster_preset("dgx-a100-80g", 512)
    with_sharp = replace(a100, sharp=True)
    assert chosen(with_sharp, "all_reduce", GIB, 64) == "sharp/Simple"
    assert seconds(with_sharp, "all_reduce", GIB, 64) < 0.65 * seconds(a100, "all_reduce", GIB, 64)
    assert seconds(with_sharp, "all_reduce", GIB, 1) == seconds(a100, "all_reduce", GIB, 1)


def test_an_all_to_all_sends_to_the_node_and_to_others_at_once():
    free = replace(
        H100, node_link_latency_s=0.0, network_latency_s=0.0, collective_launch_s=0.0, collective_ramp_bytes=0.0
    )
    payload, share = 8 * GIB, 400e9 * 0.92 * 0.87 / 8
    assert seconds(free, "all_to_all", payload, 4) == pytest.approx(24 / 32 * payload / share)
    assert seconds(free, "all_to_all", payload, 1) == pytest.approx(7 / 8 * payload / (450e9 * 0.81 * 0.94))


@pytest.mark.parametrize("protocol", TREE_CORRECTION)
def test_a_trees_correction_meets_nccls_table_at_powers_of_two(protocol):
    for step, share in enumerate(TREE_CORRECTION[protocol]):
        assert tree_correction(protocol, 64 * 2**step) == share
    assert tree_correction(protocol, 8) == TREE_CORRECTION[protocol][0]
    assert tree_correction(protocol, 2**40) == 1


def test_a_line_pays_half_its_ramp_at_its_ramp_bytes():
    assert Line("ring", "Simple", 1.0, 0.0, 10.0, ramp_bytes=5e6).seconds(5e6) == 6.0


def test_on_a100_ll128_pays_the_ramp_too():
    """Fifteen megabytes under way on 234 GB/s, twice, half of it paid at 15 MB."""
    a100 = cluster_preset("dgx-a100-80g", 8)
    with_ramp, without = (seconds(replace(a100, ll128_ramp_share=share), "all_gather", 15e6, 1) for share in (1.0, 0.0))
    assert chosen(a100, "all_gather", 15e6, 1) == "ring/LL128"
    assert with_ramp - without == pytest.approx(15e6 / (300e9 * 0.78) / 2)


def test_the_choice_says_what_the_others_would_have_taken():
    reported = str(best_algorithm(RING_ONLY, Spread(1, 8), collective("all_gather", 8, 100 * MIB)))
    assert reported.startswith("ring/LL128 ") and "GB/s on the bus (ring/Simple" in reported
    with pytest.raises(ValueError, match="a group of one"):
        best_algorithm(H100, Spread(1, 1), collective("all_gather", 1, 8))


spreads = st.builds(Spread, st.integers(1, 40), st.integers(1, 8)).filter(lambda spread: spread.size > 1)
payloads = st.floats(1, 1e11)


@settings(max_examples=200, deadline=None)
@given(spreads, st.sampled_from(OPERATIONS), payloads, st.floats(1, 8), st.booleans())
def test_more_bytes_never_take_less_time(spread, op, payload, more, sharp):
    cluster = replace(H100, sharp=sharp)
    few, many = (collective_s(cluster, spread, collective(op, spread.size, size)) for size in (payload, payload * more))
    assert few <= many * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(
    spreads,
    st.sampled_from(OPERATIONS),
    payloads,
    st.sampled_from(
        (
            "node_link_bytes_per_s",
            "node_network_bytes_per_s",
            "link_efficiency",
            "network_efficiency",
            "nvls_efficiency",
        )
    ),
    st.floats(0.1, 1),
)
def test_more_bandwidth_never_slows_a_collective(spread, op, payload, field, share):
    slow = replace(H100, **{field: getattr(H100, field) * share})
    operation = collective(op, spread.size, payload)
    assert collective_s(H100, spread, operation) <= collective_s(slow, spread, operation) * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(
    spreads,
    st.sampled_from(OPERATIONS),
    payloads,
    st.sampled_from(("node_link_latency_s", "network_latency_s", "collective_launch_s")),
)
def test_less_latency_never_slows_a_collective(spread, op, payload, field):
    operation = collective(op, spread.size, payload)
    assert collective_s(replace(H100, **{field: 0.0}), spread, operation) <= collective_s(H100, spread, operation) * (
        1 + 1e-9
    )


@settings(max_examples=100, deadline=None)
@given(spreads, st.sampled_from(OPERATIONS), payloads)
def test_without_latency_and_with_endless_bandwidth_a_collective_is_free(spread, op, payload):
    free = replace(
        H100,
        node_link_latency_s=0.0,
        network_latency_s=0.0,
        collective_launch_s=0.0,
        collective_ramp_bytes=0.0,
        leaf_latency_s=0.0,
        node_link_bytes_per_s=1e30,
        node_network_bytes_per_s=1e30,
    )
    assert math.isclose(collective_s(free, spread, collective(op, spread.size, payload)), 0, abs_tol=1e-15)
