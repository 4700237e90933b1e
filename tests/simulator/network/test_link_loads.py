"""What a step sends over each link: against counting by hand, and against the laws that all layouts keep."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import networkx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers.plans import product_plan
from shardproof import Layout, Plan, simulate
from shardproof.core.base.errors import PlanError
from shardproof.core.commands.cli import main
from shardproof.core.machine.cluster import ClusterSpec
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.program import message_bytes
from shardproof.simulator.network.link_loads import LinkLoad, link_loads
from shardproof.simulator.network.topology import capacity_bytes_per_s, spread_of
from shardproof.simulator.step.step import lowered_schedule


def cluster(devices: int, per_node: int = 2, **changed: object) -> ClusterSpec:
    return replace(cluster_preset("dgx-h100", devices), devices_per_node=per_node, nics_per_node=0, **changed)


def plan(layout: Layout, per_node: int = 2, **more: object) -> Plan:
    machine = cluster(layout.world_size, per_node, nodes_per_leaf=0, rails=False)
    return product_plan(layout, model="llama3-8b", cluster=machine, samples=12, sequence=1024, **more)  # type: ignore[arg-type]


def by_link(found: Iterable[LinkLoad]) -> dict[tuple[str, int, int], dict[str, float]]:
    return {load.link: dict(load.bytes_of_axis) for load in found}


def test_messages_cross_the_links_between_their_stages() -> None:
    """Four ranks on nodes of two: the second of three hops leaves node 0; 12 microbatches go each way."""
    four = plan(Layout(pp=4), num_layers=4)
    loads, each = by_link(link_loads(four, lowered_schedule(four))), 12 * message_bytes(four)
    for node, card in ((0, 1), (1, 0)):
        assert loads["card-out", node, card]["pp"] == loads["card-in", node, card]["pp"] == each
    for node in (0, 1):
        for device in (0, 1):
            assert loads["device-up", node, device]["pp"] == loads["device-down", node, device]["pp"] == each
    assert all("pp" not in loads.get((way, *end), {}) for way in ("card-out", "card-in") for end in ((0, 0), (1, 1)))


def test_gradients_of_copies_on_every_node_load_each_card_with_what_a_rank_sends() -> None:
    """Copies on three nodes of one device: a ring sends 2 (n-1)/n of the gradients from each to the next."""
    three = plan(Layout(dp=3), per_node=1, num_layers=2, dtype="fp32")
    loads = by_link(link_loads(three, lowered_schedule(three)))
    gradients = 4 * three.num_parameters
    for node in range(3):
        for way in ("card-out", "card-in"):
            assert loads[way, node, 0]["dp"] == pytest.approx(2 * 2 / 3 * gradients, rel=1e-6)


layouts = st.builds(
    Layout,
    tp=st.sampled_from((1, 2, 4)),
    pp=st.sampled_from((1, 2, 3)),
    dp=st.sampled_from((1, 2, 3, 6)),
    cp=st.sampled_from((1, 2)),
    zero=st.integers(0, 3),
    order=st.sampled_from(("tp-cp-ep-dp-pp", "tp-pp-cp-ep-dp", "pp-tp-cp-ep-dp")),
)


@settings(max_examples=60)
@given(layouts, st.integers(1, 6), st.booleans(), st.sampled_from(("1F1B", "GPipe", "ZBH1")))
def test_what_leaves_arrives_and_no_link_is_busier_than_the_step_is_long(
    layout: Layout, per_node: int, leaves: bool, schedule: str
) -> None:
    assume(layout.zero < 3 or layout.pp == 1)
    assume(layout.world_size % min(per_node, layout.world_size) == 0)
    machine = cluster(layout.world_size, per_node, nodes_per_leaf=2 if leaves else 0, rails=False)
    # a group that fills its nodes unevenly is priced as if it did not (`Spread.per_node`)
    groups = [group for axes in ("tp", "cp", "tp-cp", "cp-dp") for group in layout.groups(axes)]
    assume(all(spread_of(machine, group).size == len(group) for group in groups))
    try:
        given_plan = product_plan(
            layout,
            model="llama3-8b",
            num_layers=6,
            cluster=machine,
            samples=12,
            sequence=1024,
            schedule=schedule if layout.pp > 1 else None,
        )
    except PlanError:
        assume(False)
        raise
    simulation = simulate(given_plan)
    found = link_loads(given_plan, simulation.run.graph.schedule)
    ways: dict[str, float] = defaultdict(float)
    for load in found:
        ways[load.link[0]] += load.num_bytes
        assert load.busy_s == pytest.approx(load.num_bytes / capacity_bytes_per_s(machine, load.link))
        assert load.busy_s <= simulation.report["step_time_s"]
    for one, other in (("device-up", "device-down"), ("card-out", "card-in"), ("leaf-up", "leaf-down")):
        assert ways[one] == pytest.approx(ways[other])
    assert [load.busy_s for load in found] == sorted((load.busy_s for load in found), reverse=True)


def test_the_verb_writes_the_machine_as_a_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choices = {"model": "mixtral-8x7b", "cluster": "dgx-h100", "devices": 32, "tp": 2, "ep": 8, "global-batch": 32}
    options = [text for name, value in choices.items() for text in (f"--{name}", str(value))]
    file = tmp_path / "links.graphml"
    assert main(["simulate", *options, "--links", str(file), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    graph = networkx.read_graphml(file)
    links = {edge["link"]: edge for _, _, edge in graph.edges(data=True) if "link" in edge}
    assert sum(edge["bytes"] > 0 for edge in links.values()) == report["links"]["used"]
    for row in report["links"]["busiest"]:
        edge = links[row["link"]]
        assert edge["bytes"] == row["bytes"] == pytest.approx(sum(row["bytes_of_axis"].values()), abs=4)
        assert edge["busy_s"] == pytest.approx(row["share_of_step"] * report["step_time_s"])
    assert sum("rank" in data for _, data in graph.nodes(data=True)) == 32
    assert main(["simulate", *options, "--links", str(file)]) == 0
    text = capsys.readouterr()
    assert "busiest link of each kind:" in text.out and "ep " in text.out and str(file) in text.err


def test_links_are_written_as_graphml_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--model", "tiny-gpt", "--links", str(tmp_path / "links.csv")]) == 2
    assert "end the name in .graphml" in capsys.readouterr().err and not list(tmp_path.iterdir())
