"""The dependency graph of a schedule: the waits that the engine resolves, found apart from it."""

from __future__ import annotations

import networkx
import pytest

from shardproof import Schedule, build, lower
from shardproof.core.schedule.catalog import CATALOG
from shardproof.core.schedule.dependencies import circle_of
from shardproof.simulator.engine.graph import build_graph


def schedule_of(name: str, microbatches: int = 6) -> Schedule:
    entry = CATALOG[name]
    pp = 4 if name.startswith("DualPipe") else 3
    count = 2 * pp if entry.problem(pp=pp, num_microbatches=microbatches, vpp=entry.nearest_vpp(1)) else microbatches
    return lower(build(name, pp=pp, num_microbatches=count, vpp=entry.nearest_vpp(1)))


def engine_graph(schedule: Schedule) -> networkx.DiGraph:
    """The engine's waits, with each receive next to its send: it ends with that."""
    engine = build_graph(schedule)
    rows = [(rank, at) for rank, row in enumerate(schedule.rows()) for at in range(len(row))]
    graph = networkx.DiGraph()
    graph.add_nodes_from(rows)
    for waits in engine.waits:
        graph.add_edges_from((rows[source], rows[at]) for at, source in enumerate(waits.tolist()) if source >= 0)
    for at, partner in enumerate(engine.partner.tolist()):
        if partner >= 0 and engine.is_receive[at]:
            graph.add_edge(rows[partner], rows[at])
    return graph


def reached(graph: networkx.DiGraph, schedule: Schedule) -> set[tuple[object, object]]:
    """What has to end before what, of all pairs that compute or reduce: two ways of writing the same waits agree."""
    shown = {node for node in graph if "RECV" not in str(action_at(schedule, node))}
    closure = networkx.transitive_closure_dag(graph)
    return {(tail, head) for tail, head in closure.edges if tail in shown and head in shown}


def action_at(schedule: Schedule, node: tuple[int, int]) -> object:
    return schedule.row(node[0])[node[1]]


@pytest.mark.parametrize("name", CATALOG)
def test_the_graph_of_a_schedule_has_the_waits_of_the_engine(name: str) -> None:
    schedule = schedule_of(name)
    assert reached(schedule.graph(), schedule) == reached(engine_graph(schedule), schedule)


def test_nodes_and_edges_say_what_they_are() -> None:
    graph = lower(build("1F1B", pp=2, num_microbatches=2)).graph()
    assert graph.nodes[1, 1] == {"action": "1F0", "kind": "F", "stage": 1, "microbatch": 0, "lane": "compute"}
    whys = {(graph.nodes[a]["action"], graph.nodes[b]["action"]): why for a, b, why in graph.edges(data="why")}
    assert whys["0F0", "0SEND_F0"] == "input" and whys["0SEND_F0", "1RECV_F0"] == "message"
    assert whys["1RECV_F0", "1F0"] == "message" and whys["1F0", "1B0"] == "forward"
    assert whys["0B1", "0REDUCE_GRAD"] == "gradients" and whys["0F0", "0F1"] == "list"


def test_gathered_weights_come_before_what_computes_with_them() -> None:
    schedule = Schedule.from_csv("0UNSHARD,0F0,0B0,0RESHARD,0REDUCE_GRAD,0STEP\n")
    graph = schedule.graph()
    whys = {(graph.nodes[a]["action"], graph.nodes[b]["action"]): why for a, b, why in graph.edges(data="why")}
    assert whys["0UNSHARD", "0F0"] == "weights" and whys["0B0", "0RESHARD"] == "gradients"


def test_a_backward_before_its_forward_is_a_circle_and_a_schedule_that_runs_has_none() -> None:
    circle = circle_of(Schedule.from_csv("0B0,0F0,0REDUCE_GRAD,0STEP\n").graph())
    assert sorted(circle) == [(0, 0), (0, 1)]
    assert circle_of(schedule_of("1F1B").graph()) == []


def test_before_lowering_there_are_no_messages_and_no_inputs_of_other_ranks() -> None:
    graph = build("GPipe", pp=2, num_microbatches=2).graph()
    assert {why for *_, why in graph.edges(data="why")} <= {"list", "forward"}
