"""Traffic between ranks: against what the program counts for each rank, and against the links that it crosses."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from helpers.modules import modular, module
from helpers.plans import product_plan
from shardproof import Layout, ModularPlan, Plan
from shardproof.core.base.errors import LayoutError
from shardproof.core.layout.rank_traffic import RankTraffic
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.plan.schedule_of import part_schedule
from shardproof.core.program import Collective, Message
from shardproof.core.program.of_rank import step_of_rank
from shardproof.simulator.network import rank_traffic as home
from shardproof.simulator.network.link_loads import link_loads
from shardproof.simulator.network.rank_traffic import rank_traffic
from shardproof.simulator.step.step import lowered_schedule


def plan(layout: Layout, model: str = "llama3-8b", **more: object) -> Plan:
    machine = replace(cluster_preset("dgx-h100", layout.world_size), devices_per_node=4, nics_per_node=0, rails=False)
    return product_plan(layout, model=model, num_layers=4, cluster=machine, samples=16, sequence=1024, **more)  # type: ignore[arg-type]


CASES = {
    "dense": plan(Layout(tp=2, pp=2, dp=4, zero=1, sequence_parallel=True)),
    "exact": plan(Layout(tp=2, pp=2, dp=3), mode="exact"),
    "context": plan(Layout(tp=2, cp=2, pp=2, dp=2, zero=2)),
    "experts": plan(Layout(tp=2, pp=2, dp=4, ep=4, etp=1), model="mixtral-8x7b"),
    "replicas": plan(Layout(pp=4, dp=2), schedule="DualPipe"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_rank_sends_what_its_program_says(case: str) -> None:
    schedule = lowered_schedule(CASES[case])
    found = rank_traffic(CASES[case], [schedule])
    for rank in range(found.num_ranks):
        expected: defaultdict[str, float] = defaultdict(float)
        for action, works in step_of_rank(CASES[case], schedule, rank).items():
            for work, count in works.items():
                if action is not None and isinstance(work, Collective) and work.group_size > 1:
                    expected[work.axis] += count * work.sent_bytes
                elif isinstance(work, Message):
                    expected["pp"] += count * work.num_bytes
        sent = {axis: float(matrix[rank].sum()) for axis, matrix in found.matrices.items() if matrix[rank].any()}
        assert sent == pytest.approx({axis: num_bytes for axis, num_bytes in expected.items() if num_bytes})


@pytest.mark.parametrize("case", ["dense", "experts"])
def test_what_leaves_nodes_is_what_their_cards_send(case: str) -> None:
    schedule = lowered_schedule(CASES[case])
    cards: defaultdict[str, float] = defaultdict(float)
    for load in link_loads(CASES[case], schedule):
        for axis, num_bytes in load.bytes_of_axis.items():
            cards[axis] += num_bytes * (load.link[0] == "card-out")
    for axis in rank_traffic(CASES[case], [schedule]).axes:
        assert axis.between_nodes_bytes == pytest.approx(cards[axis.name])


def test_rows_of_many_ranks_are_nodes_with_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = lowered_schedule(CASES["experts"])
    fine = rank_traffic(CASES["experts"], [schedule])
    assert (fine.unit_name, fine.num_units) == ("rank", 16)
    for most, unit, name in ((8, 4, "node"), (2, 8, "2 nodes")):
        monkeypatch.setattr(home, "MOST_ROWS", most)
        coarse = rank_traffic(CASES["experts"], [schedule])
        assert (coarse.ranks_per_unit, coarse.unit_name) == (unit, name)
        blocks = fine.matrix.reshape(16 // unit, unit, 16 // unit, unit).sum(axis=(1, 3))
        np.testing.assert_allclose(coarse.matrix, blocks)
        assert coarse.axes == fine.axes


def traffic_of_modules(plan: ModularPlan) -> RankTraffic:
    return rank_traffic(plan, [part_schedule(plan, part, part.num_microbatches) for part in plan.parts])


def test_two_halves_of_a_model_on_ranks_of_their_own_send_what_its_two_stages_do() -> None:
    whole = modular(module("whole", tp=2, pp=2), samples=6)
    halves = modular(module("a", tp=2), module("b", ["a"], tp=2), samples=6)
    one, two = traffic_of_modules(whole), traffic_of_modules(halves)
    assert two.num_ranks == 4 and set(two.matrices) == {"tp", "bridge", "model"}
    np.testing.assert_array_equal(two.matrices["tp"], one.matrices["tp"])
    assert two.matrices["bridge"].sum() > 0 == two.matrices["bridge"][:2, :2].sum()
    assert two.matrices["bridge"][2:, :2].sum() == one.matrices["pp"][2:, :2].sum()  # gradients, to both replicas


def test_modules_send_over_their_bridges_what_every_rank_receives() -> None:
    """Three modules, one of which has stages: hidden states come once to each rank that holds them, gradients too."""
    plan = modular(module("a", pp=2), module("b", tp=2), module("c", ["a", "b"], dp=2), samples=4, schedule="GPipe")
    found = traffic_of_modules(plan)
    states = 4 * 24 * plan.parts[0].model.hidden_size * 4  # samples, tokens, features, bytes
    bridge = found.matrices["bridge"]
    received = bridge.sum(axis=0)
    assert received[[4, 5]].tolist() == [states, states]  # half of the samples, of two inputs
    assert received[:4].tolist() == [0, states, states, states]
    assert found.matrices["pp"].sum() == 2 * states and found.matrices["pp"][0, 1] == states
    assert not found.matrices["tp"][:2].any() and found.matrices["tp"][2:4].any()


def test_one_axis_alone_and_one_that_sends_nothing() -> None:
    found = rank_traffic(CASES["dense"], [lowered_schedule(CASES["dense"])])
    alone = found.only("pp")
    assert (alone.matrix == found.matrices["pp"]).all() and [axis.name for axis in alone.axes] == ["pp"]
    with pytest.raises(LayoutError, match="nothing is sent over cp"):
        found.only("cp")
