"""`Variation`: names of devices and links, and what counts as saying nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import shardproof
from helpers.plans import product_plan
from shardproof.core.base.errors import PlanError
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.machine.variation import (
    NO_VARIATION,
    LinkName,
    Variation,
    devices_named,
    link_named,
)
from shardproof.core.plan.plan import Plan

CLUSTER = cluster_preset("dgx-h100", 32)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("device-17", [17]),
        ("device-8-10", [8, 9, 10]),
        ("node-2", list(range(16, 24))),
        ("node-2-3", list(range(16, 32))),
        ("device-3, node-0", list(range(8))),
    ],
)
def test_names_stand_for_ranks(text, ranks):
    assert devices_named(text, CLUSTER) == ranks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device-32", "'device-32' is not among the 32 devices"),
        ("node-4", "'node-4' is not among the 4 nodes"),
        ("device-9-8", "is not among the 32 devices"),
        ("17", "'17' names no device. Write device-17"),
        ("", "'' names no device"),
    ],
)
def test_a_name_that_is_none_says_what_works(text, message):
    with pytest.raises(ValueError, match=message):
        devices_named(text, CLUSTER)


def test_links_have_a_kind_and_numbers():
    assert link_named("card-3-1", CLUSTER) == LinkName("card", 3, 1)
    assert link_named("device-31", CLUSTER) == LinkName("device", 31)
    assert link_named("leaf-0-7", CLUSTER) == LinkName("leaf", 0, 7)
    for name in ("card-3-8", "card-4-0", "leaf-1-0", "node-4"):
        with pytest.raises(ValueError, match="is not in the cluster"):
            link_named(name, CLUSTER)
    with pytest.raises(ValueError, match="names no link"):
        link_named("card-3", CLUSTER)


def test_a_cluster_without_leaf_switches_has_none_to_name():
    with pytest.raises(ValueError, match="0 x 8 groups of nodes x rails"):
        link_named("leaf-0-0", cluster_preset("h800-pod", 32))


def test_only_what_is_said_counts():
    assert Variation().is_nothing and Variation() == NO_VARIATION
    assert not Variation(stragglers={"device-1": 1.0}).is_nothing
    assert not Variation(jitter=0.1, samples=0).is_random
    assert Variation(expert_imbalance=0.0).is_random
    assert Variation(device_mtbf_s=1e6, checkpoint_s=1.0).is_random is False


def plan_with(**fields) -> Plan:
    return product_plan(
        model="llama3-8b", cluster=CLUSTER, samples=32, sequence=1024, variation=Variation(**fields), tp=4, pp=2, dp=4
    )


def test_a_plan_with_variation_round_trips():
    plan = plan_with(
        stragglers={"device-17": 1.25, "node-2": 1.5},
        slow_links={"card-3-1": 0.5},
        failed_links="leaf-0-1, card-0-0",
        device_classes={"dgx-h200": "node-1"},
        seed=7,
        jitter=0.02,
        distribution="pareto",
        device_mtbf_s=1e8,
        checkpoint_s=60.0,
    )
    assert Plan.from_toml(plan.to_toml()) == plan
    assert "[variation]" not in replace(plan, variation=NO_VARIATION).to_toml()


def test_the_example_of_the_documentation_is_a_plan():
    text = (Path(shardproof.__file__).parent / "docs" / "what_if.md").read_text(encoding="utf-8")
    example = re.search(r"```toml\n(.*?)```", text, re.DOTALL)[1]
    base = (
        '[model]\npreset = "mixtral-8x7b"\n[cluster]\npreset = "dgx-h100"\nnum_devices = 128\n[layout]\nep = '
        "8\n[batch]\n"
    )
    variation = Plan.from_toml(f"{base}global = 128\nsequence = 4096\n{example}").variation
    assert variation.has_differences and variation.is_random and variation.device_mtbf_s == 1.8e8


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stragglers": {"device-1": 0.5}}, "how many times longer a device computes: at least 1"),
        ({"slow_links": {"card-0-0": 1.5}}, "the share of its rate that is left: above 0, at most 1"),
        ({"failed_links": "device-3"}, "cuts a device off. Use slow_links={device-3 = 0.05}"),
        ({"failed_links": ", ".join(f"card-2-{card}" for card in range(8))}, "leaves none of the 8 cards of 2"),
        (
            {"device_classes": {"dgx-h200": "node-1", "dgx-a100-40g": "device-9"}},
            ("device-9 is of class dgx-h200 already"),
        ),
        ({"expert_capacity": 1.25}, "is about experts, but model llama3-8b has none"),
        ({"device_mtbf_s": 1e6}, "checkpoints that cost nothing have no best interval"),
    ],
)
def test_what_cannot_be_is_refused_with_a_way_out(fields, message):
    with pytest.raises(PlanError) as caught:
        plan_with(**fields)
    assert message in str(caught.value)


def test_several_cards_of_a_node_may_fail_as_long_as_one_works():
    assert plan_with(failed_links=", ".join(f"card-2-{card}" for card in range(7))).variation.has_differences
