"""Transfers that share links: by hand, by the definition of max-min fairness, and compiled against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.core.base.errors import ScheduleError
from shardproof.core.schedule import build, lower
from shardproof.core.schedule.action import SENDS, Kind
from shardproof.simulator.engine import kernel
from shardproof.simulator.engine.contention import (
    Traffic,
    _Fluid,
    execute_shared,
    overloaded_links,
    plain_shared,
    uncontended_until,
)
from shardproof.simulator.engine.engine import execute
from shardproof.simulator.engine.graph import Graph, build_graph

MESSAGES = [int(kind) for kind in SENDS]


def graph_of(name: str, pp: int, num_microbatches: int, sends="buffered") -> Graph:
    vpp = {"ZBVZeroBubble": 2, "Interleaved1F1B": 2}.get(name, 1)
    return build_graph(lower(build(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches)), sends=sends)


def two_ranks_that_reduce(reduce_s: tuple[float, float]) -> tuple[Graph, np.ndarray, np.ndarray]:
    """F 1 s, B 2 s, no time for messages: rank 1 reduces from 4 s on, rank 0 from 6 s on."""
    graph = graph_of("1F1B", 2, 1)
    kind = graph.schedule.actions.kind
    duration_s = np.select([kind == Kind.F, kind == Kind.B], [1.0, 2.0], 0.0)
    reduce = np.array([int(np.flatnonzero((kind == Kind.REDUCE_GRAD) & (graph.rank == rank))[0]) for rank in range(2)])
    duration_s[reduce] = reduce_s
    return graph, duration_s, reduce


def routes(graph: Graph, of: dict[int, int]) -> np.ndarray:
    route = np.full(len(graph.rank), -1)
    route[list(of)] = list(of.values())
    return route


@pytest.mark.parametrize("run", [execute_shared, plain_shared])
def test_two_reductions_over_one_card_share_it_while_both_run(run):
    graph, duration_s, reduce = two_ranks_that_reduce((4.0, 4.0))
    traffic = Traffic(routes(graph, {reduce[0]: 0, reduce[1]: 0}), ({"card": 1.0},), [10.0], {"card": 10.0})
    shared = run(graph, duration_s, traffic)
    # rank 1: 20 bytes alone in 4-6, the other 20 at half rate in 6-10. rank 0: 20 bytes in 6-10, 20 alone in 10-12
    assert shared.start_s[reduce].tolist() == [6, 4]
    assert shared.end_s[reduce] == pytest.approx([12, 10], rel=1e-8)
    assert execute(graph, duration_s).end_s[reduce].tolist() == [10, 8]
    assert overloaded_links(execute(graph, duration_s), traffic) == ["card"]


@pytest.mark.parametrize("run", [execute_shared, plain_shared])
def test_a_transfer_slower_than_its_fair_share_loses_nothing(run):
    graph, duration_s, reduce = two_ranks_that_reduce((5.0, 20.0))
    traffic = Traffic(
        routes(graph, {reduce[0]: 0, reduce[1]: 1}), ({"card": 1.0}, {"card": 1.0}), [10.0, 2.0], {"card": 10.0}
    )
    # rank 1 asks for 2 bytes/s and keeps them; rank 0 has 8 left for its 50 bytes
    assert run(graph, duration_s, traffic).end_s[reduce] == pytest.approx([6 + 50 / 8, 24], rel=1e-8)


@pytest.mark.parametrize("run", [execute_shared, plain_shared])
def test_a_link_that_carries_equal_transfers_too_counts_them(run):
    graph, duration_s, reduce = two_ranks_that_reduce((4.0, 4.0))
    traffic = Traffic(routes(graph, {reduce[1]: 0}), ({"uplink": 4.0},), [10.0], {"uplink": 16.0})
    assert run(graph, duration_s, traffic).end_s[reduce] == pytest.approx([10, 4 + 40 / 4], rel=1e-8)


def test_while_no_link_is_too_full_nothing_changes_to_the_last_bit():
    graph = graph_of("1F1B", 4, 12, "rendezvous")
    kind = graph.schedule.actions.kind
    rng = np.random.default_rng(3)
    duration_s = rng.exponential(size=len(kind))
    route = np.where(np.isin(kind, MESSAGES), graph.rank, -1)
    traffic = Traffic(
        route,
        tuple({("out", rank): 1.0} for rank in range(4)),
        [1.0 / 3] * 4,
        {("out", rank): 2.0 / 3 for rank in range(4)},
    )
    run = execute(graph, duration_s)
    for shared in (execute_shared(graph, duration_s, traffic), plain_shared(graph, duration_s, traffic)):
        assert np.array_equal(shared.start_s, run.start_s)
        assert np.array_equal(shared.end_s, run.end_s)


@st.composite
def networks(draw) -> tuple[tuple[dict[int, float], ...], list[float], dict[int, float]]:
    """Routes over up to four links, their rates, and capacities that are sometimes scarce."""
    capacity = {link: draw(st.floats(0.5, 8.0)) for link in range(draw(st.integers(1, 4)))}
    some_links = st.dictionaries(st.sampled_from(sorted(capacity)), st.sampled_from([1.0, 1.0, 0.5, 3.0]), max_size=3)
    found = tuple(draw(st.lists(some_links, min_size=1, max_size=6)))
    return found, [draw(st.floats(0.25, 4.0)) for _ in found], capacity


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble", "DualPipe"]),
    sends=st.sampled_from(["buffered", "rendezvous", "blocking"]),
    network=networks(),
    seed=st.integers(0, 2**32 - 1),
    led=st.booleans(),
    quiet=st.sampled_from([0.0, 0.5, 0.9]),
)
def test_compiled_fluid_is_the_plain_one_to_the_last_bit_and_never_faster_than_alone(
    name, sends, network, seed, led, quiet
):
    graph = graph_of(name, 4, 8, sends)
    rng = np.random.default_rng(seed)
    size, kind = len(graph.rank), graph.schedule.actions.kind
    duration_s = rng.exponential(size=size) * (rng.integers(0, 8, size=size) > 0)
    transfers = np.isin(kind, [*MESSAGES, int(Kind.REDUCE_GRAD)])
    extra = {}
    if led:
        extra = {
            key: np.where(kind == Kind.REDUCE_GRAD, rng.exponential(size=size), 0.0) for key in ("lead_s", "tail_s")
        }
    alone = execute(graph, duration_s, **extra)
    # before that nothing meets, and the compiled loops begin there
    transfers &= alone.start_s >= quiet * alone.end_s.max()
    traffic = Traffic(np.where(transfers, rng.integers(-1, len(network[0]), size=size), -1), *network)
    found, expected = (
        execute_shared(graph, duration_s, traffic, **extra),
        plain_shared(graph, duration_s, traffic, **extra),
    )
    if overloaded_links(alone, traffic):
        assert uncontended_until(alone, traffic) <= alone.end_s[traffic.route >= 0].max()
    elif not kernel.IS_COMPILED:
        assert uncontended_until(alone, traffic) == np.inf
    assert np.array_equal(found.start_s, expected.start_s)
    assert np.array_equal(found.end_s, expected.end_s)
    # Rates sum to a capacity up to the slack of 1e-9, and remaining work is subtracted in steps.
    assert (found.end_s >= alone.end_s * (1 - 1e-7)).all()
    for link, capacity in traffic.capacity_bytes_per_s.items():
        load = sum(
            duration_s[i] * traffic.rate_bytes_per_s[traffic.route[i]] * traffic.routes[traffic.route[i]].get(link, 0.0)
            for i in np.flatnonzero(traffic.route >= 0)
        )
        assert found.end_s.max() >= load / capacity * (1 - 1e-7)


@settings(max_examples=100, deadline=None)
@given(network=networks(), num_transfers=st.integers(1, 8), seed=st.integers(0, 2**32 - 1))
def test_every_transfer_is_at_full_rate_or_among_the_fastest_on_a_full_link(network, num_transfers, seed):
    """The definition of max-min fairness (Bertsekas and Gallager, section 6.5.2: each session
    has a bottleneck link)."""
    graph = graph_of("GPipe", 1, 8)
    routes_of, rate, capacity = network
    route = np.random.default_rng(seed).integers(0, len(routes_of), size=len(graph.rank))
    fluid = _Fluid(graph, np.ones(len(graph.rank)), Traffic(route, *network), None, None)
    for i in range(num_transfers):
        fluid.enter(i, 0.0)
    rates = [fluid.speed[i] * rate[route[i]] for i in range(num_transfers)]
    load = {link: sum(routes_of[route[i]].get(link, 0.0) * rates[i] for i in range(num_transfers)) for link in capacity}
    for link in capacity:
        assert load[link] <= capacity[link] * (1 + 2e-9)
    for i in range(num_transfers):
        bottlenecks = [
            link
            for link in routes_of[route[i]]
            if load[link] > capacity[link] * (1 - 1e-6)
            and all(
                rates[i] >= rates[other] * (1 - 1e-9)
                for other in range(num_transfers)
                if link in routes_of[route[other]]
            )
        ]
        assert fluid.speed[i] == 1.0 or bottlenecks


@pytest.mark.skipif(not kernel.IS_COMPILED, reason="the plain loops look at the whole run")
def test_compiled_loops_begin_where_links_may_first_be_too_full():
    graph, duration_s, reduce = two_ranks_that_reduce((4.0, 4.0))
    traffic = Traffic(routes(graph, {reduce[0]: 0, reduce[1]: 0}), ({"card": 1.0},), [10.0], {"card": 10.0})
    # The two meet from 6 s to 8 s of 10; the answer may be early by some of the bins into which the run is cut.
    assert 4.5 < uncontended_until(execute(graph, duration_s), traffic) <= 6
    wide = Traffic(traffic.route, traffic.routes, [10.0], {"card": 20.0})
    assert uncontended_until(execute(graph, duration_s), wide) == np.inf


def test_a_lead_on_a_transfer_is_refused():
    graph, duration_s, reduce = two_ranks_that_reduce((4.0, 4.0))
    lead_s = np.zeros(len(duration_s))
    lead_s[reduce[0]] = 1.0
    traffic = Traffic(routes(graph, {int(graph.waits[1, reduce[0]]): 0}), ({"card": 1.0},), [10.0], {"card": 10.0})
    with pytest.raises(ScheduleError, match="0REDUCE_GRAD has a lead on 0B0"):
        execute_shared(graph, duration_s, traffic, lead_s=lead_s)


def test_wrong_numbers_are_refused():
    graph = graph_of("GPipe", 1, 1)
    none = np.full(len(graph.rank), -1)
    with pytest.raises(ScheduleError, match="no capacity is given for link card"):
        Traffic(none, ({"card": 1.0},), [1.0], {})
    with pytest.raises(ScheduleError, match="not a finite number above 0"):
        Traffic(none, ({"card": 1.0},), [1.0], {"card": 0.0})
    with pytest.raises(ScheduleError, match="1 routes with 2 rates"):
        Traffic(none, ({"card": 1.0},), [1.0, 2.0], {"card": 1.0})
    with pytest.raises(ScheduleError, match="1 routes and 4 durations for 4 actions"):
        execute_shared(graph, np.ones(4), Traffic(none[:1], (), [], {}))
