"""Slow and failed links: shares of groups against looking at every group rank by rank, and times
against closed forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.machine.variation import Variation
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch
from shardproof.core.program import Collective
from shardproof.simulator.network.link_shares import LinkShares, rank_shares
from shardproof.simulator.network.network import collective_s, message_s
from shardproof.simulator.network.topology import Shares, Spread, degraded

H100 = cluster_preset("dgx-h100", 64)


def shares_of(**fields) -> np.ndarray:
    return rank_shares(Variation(**fields), H100)


def test_a_slow_device_link_slows_one_rank():
    link, network, leaf = shares_of(slow_links={"device-11": 0.25})
    assert link.tolist() == [0.25 if rank == 11 else 1 for rank in range(64)]
    assert (network == 1).all() and (leaf == 1).all()


def test_a_slow_card_slows_its_device_and_a_slow_node_all_of_its():
    assert np.flatnonzero(shares_of(slow_links={"card-3-1": 0.5})[1] == 0.5).tolist() == [25]
    assert np.flatnonzero(shares_of(slow_links={"node-3": 0.5})[1] == 0.5).tolist() == list(range(24, 32))


def test_the_device_of_a_failed_card_shares_its_neighbours():
    network = shares_of(failed_links="card-3-1")[1]
    assert network[24:32].tolist() == [0.5, 0.5, 1, 1, 1, 1, 1, 1]
    two = shares_of(failed_links="card-3-0, card-3-1")[1]
    assert two[24:32].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1, 1, 1, 1, 1])


def test_four_cards_for_eight_devices_leave_two_of_them_half_of_a_neighbours_card():
    cluster = replace(H100, nics_per_node=4)
    network = rank_shares(Variation(failed_links="card-0-3"), cluster)[1]
    assert network[:8].tolist() == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5]


def test_where_cards_are_left_over_the_device_of_a_failed_one_takes_such_a_card():
    cluster = replace(cluster_preset("dgx-h100", 4), nics_per_node=8)
    assert (rank_shares(Variation(failed_links="card-0-0"), cluster)[1] == 1).all()


def test_a_failed_rail_of_eight_leaves_seven_eighths_to_all_behind_the_leaf_switches():
    cluster = replace(H100, nodes_per_leaf=4)
    leaf = rank_shares(Variation(failed_links="leaf-1-2"), cluster)[2]
    assert leaf.tolist() == [1] * 32 + [7 / 8] * 32
    slow = rank_shares(Variation(slow_links={"leaf-1-2": 0.5}), cluster)[2]
    assert [rank for rank in range(64) if slow[rank] == 0.5] == [34, 42, 50, 58] and slow.min() == 0.5


LAYOUTS = [
    Layout(tp=4, pp=2, dp=8),
    Layout(tp=2, pp=4, dp=4, cp=2),
    Layout(tp=8, pp=2, dp=4, order="dp-tp-pp"),
    Layout(tp=2, pp=2, dp=16, ep=8, etp=1, sequence_parallel=True),
    Layout(tp=4, pp=2, dp=8, ep=4),
]


@settings(max_examples=25, deadline=None)
@given(layout=st.sampled_from(LAYOUTS), seed=st.integers(0, 2**32 - 1))
def test_a_cells_groups_are_as_slow_as_the_slowest_rank_in_any_of_them(layout, seed):
    """Against `Layout.groups`, rank by rank."""
    rng = np.random.default_rng(seed)
    names = [f"device-{rank}" for rank in rng.choice(64, 3, replace=False)] + [f"node-{rng.integers(8)}"]
    slow = dict(zip(names, rng.uniform(0.1, 1, 4).round(3).tolist(), strict=True))
    model = model_preset("mixtral-8x7b" if layout.ep > 1 else "llama3-8b")
    plan = Plan(model, H100, layout, Batch(64, 1, 2048), variation=Variation(slow_links=slow))
    found, ranks = LinkShares(plan), rank_shares(plan.variation, H100)
    groups = {
        "tp": layout.groups("tp"),
        "dp": layout.groups("cp-dp"),
        "cp": layout.groups("cp"),
        "model": layout.groups("tp-pp"),
    }
    if layout.ep > 1:
        groups |= {
            "ep": layout.expert_groups("ep"),
            "edp": layout.expert_groups("dp"),
            "etp": layout.expert_groups("tp"),
        }
    for axis, lists in groups.items():
        for dp_rank in range(layout.dp):
            for pp_rank in range(layout.pp):
                cell = {
                    layout.global_rank(tp=t, cp=c, dp=dp_rank, pp=pp_rank)
                    for t in range(layout.tp)
                    for c in range(layout.cp)
                }
                members = sorted({rank for group in lists if cell & set(group) for rank in group})
                expected = Shares(*ranks[:, members].min(axis=1).tolist())
                assert found.of_group(axis, 0, pp_rank=pp_rank, dp_rank=dp_rank) == expected, (axis, dp_rank, pp_rank)


def big(op: str, size: int) -> Collective:
    return Collective("", op, "dp", size, 64 * 2**30)


@pytest.mark.parametrize(
    ("op", "spread"), [("all_gather", Spread(8, 1)), ("all_gather", Spread(1, 8)), ("reduce_scatter", Spread(4, 4))]
)
def test_a_large_ring_takes_1_over_the_share_times_as_long(op, spread):
    """Nodes of eight H100 on eight cards: the cards limit a ring over nodes, the links one inside a node."""
    operation = big(op, spread.size)
    whole_s = collective_s(H100, spread, operation)
    for share in (0.5, 0.25):
        shares = Shares(network=share) if spread.num_nodes > 1 else Shares(link=share)
        assert collective_s(H100, replace(spread, shares=shares), operation) == pytest.approx(whole_s / share, rel=0.01)


def test_shares_of_links_that_a_group_does_not_use_change_nothing():
    assert collective_s(H100, Spread(1, 8, shares=Shares(network=0.1)), big("all_reduce", 8)) == collective_s(
        H100, Spread(1, 8), big("all_reduce", 8)
    )


def test_a_slow_uplink_limits_what_crosses_leaf_switches_as_oversubscription_does():
    """Half an uplink is as good as twice the oversubscription."""
    cluster = replace(H100, nodes_per_leaf=1)
    spread = Spread(8, 1, 8)
    slow_s = collective_s(cluster, replace(spread, shares=Shares(leaf=0.5)), big("all_gather", 8))
    assert slow_s == collective_s(replace(cluster, oversubscription=2.0), spread, big("all_gather", 8))


def test_a_message_over_half_a_card_takes_twice_as_long():
    whole_s, half_s = (message_s(degraded(H100, Shares(network=share)), 0, 8, 2**34) for share in (1.0, 0.5))
    cards_s = 2**34 / (H100.node_network_bytes_per_s * H100.network_efficiency / 8)
    assert half_s == pytest.approx(2 * cards_s, rel=0.01) and whole_s < half_s


@settings(max_examples=50, deadline=None)
@given(
    shares=st.tuples(*[st.floats(0.05, 1.0)] * 3),
    nodes=st.sampled_from([1, 2, 8]),
    local=st.sampled_from([1, 4, 8]),
    op=st.sampled_from(["all_reduce", "all_gather", "all_to_all"]),
    log_bytes=st.integers(8, 34),
)
def test_worse_links_never_make_a_collective_faster(shares, nodes, local, op, log_bytes):
    spread, operation = Spread(nodes, local, nodes), Collective("", op, "dp", nodes * local, 2**log_bytes)
    whole_s = collective_s(H100, spread, operation)
    assert collective_s(H100, replace(spread, shares=Shares(*shares)), operation) >= whole_s * (1 - 1e-12)
