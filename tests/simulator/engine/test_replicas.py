"""Replicas that differ: coupled columns against single runs, by hand, and against the plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.core.base.errors import ScheduleError
from shardproof.core.schedule import build, lower
from shardproof.core.schedule.action import Kind
from shardproof.simulator.engine import kernel
from shardproof.simulator.engine.engine import execute
from shardproof.simulator.engine.graph import Graph, build_graph
from shardproof.simulator.engine.replicas import all_coupled, execute_replicas, plain_replicas


def graph_of(
    name: str = "1F1B", pp: int = 4, num_microbatches: int = 8, vpp: int = 1, active: int | None = None
) -> Graph:
    return build_graph(
        lower(build(name, pp=pp, vpp=vpp, num_microbatches=num_microbatches), max_active_stages=active),
        sends="rendezvous",
    )


def durations(graph: Graph, num_columns: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).exponential(size=(len(graph.rank), num_columns))


def test_one_replica_is_the_plain_run():
    graph = graph_of()
    duration_s = durations(graph, 1, 1)
    one, run = execute_replicas(graph, duration_s, all_coupled(1)).run(0), execute(graph, duration_s[:, 0])
    assert np.array_equal(one.start_s, run.start_s)
    assert np.array_equal(one.end_s, run.end_s)


@pytest.mark.parametrize("coupled", [True, False])
def test_equal_replicas_all_do_what_one_does(coupled):
    graph = graph_of("Interleaved1F1B", vpp=2)
    column = durations(graph, 1, 2)
    replicas = execute_replicas(graph, np.repeat(column, 6, axis=1), all_coupled(6) if coupled else {})
    assert np.array_equal(replicas.end_s, np.repeat(execute(graph, column[:, 0]).end_s[:, None], 6, axis=1))


def test_replicas_that_are_not_coupled_are_runs_of_their_own():
    graph = graph_of("ZBH1")
    duration_s = durations(graph, 5, 3)
    replicas = execute_replicas(graph, duration_s, {})
    for column in range(5):
        assert np.array_equal(
            replicas.end_s[:, column], execute(graph, np.ascontiguousarray(duration_s[:, column])).end_s
        )


def test_a_device_twice_as_slow_holds_up_every_replica_at_its_reductions():
    graph = graph_of(pp=2, num_microbatches=4)
    kind = graph.schedule.actions.kind
    duration_s = np.select(
        [kind == Kind.F, kind == Kind.B, kind == Kind.REDUCE_GRAD, kind == Kind.STEP], [1.0, 2.0, 5.0, 1.0], 0.0
    )
    duration_s = np.repeat(duration_s[:, None], 3, axis=1)
    slow = np.isin(kind, [Kind.F, Kind.B]) & (graph.rank == 1)
    duration_s[slow, 2] *= 2
    replicas = execute_replicas(graph, duration_s, all_coupled(3))
    # rank 1 of the slow replica: F0 at 1, then 4 x (2 + 4) seconds: its reduction starts at 25; rank 0's
    # last backward ends 2 later
    reduce = [int(np.flatnonzero((kind == Kind.REDUCE_GRAD) & (graph.rank == rank))[0]) for rank in range(2)]
    assert replicas.start_s[reduce].tolist() == [[27.0] * 3, [25.0] * 3]
    assert replicas.makespan_s.tolist() == [27 + 5 + 1] * 3
    alone = execute_replicas(graph, duration_s, {})
    assert alone.makespan_s.tolist() == [3 * 5 + 6, 3 * 5 + 6, 33], (
        "a replica without the slow device would be done at 21"
    )


def test_two_seeded_runs_side_by_side_are_each_the_run_alone():
    graph = graph_of()
    duration_s = durations(graph, 6, 4)
    both = execute_replicas(graph, duration_s, all_coupled(3))
    for run in (slice(0, 3), slice(3, 6)):
        assert np.array_equal(both.end_s[:, run], execute_replicas(graph, duration_s[:, run], all_coupled(3)).end_s)


def test_an_expert_group_computes_together_and_reduces_with_all():
    graph = graph_of(pp=2, num_microbatches=2)
    kind = graph.schedule.actions.kind
    replicas = execute_replicas(graph, durations(graph, 4, 5), {Kind.F: 2, Kind.B: 2, Kind.REDUCE_GRAD: 4})
    for wanted, group in ((Kind.F, 2), (Kind.B, 2), (Kind.REDUCE_GRAD, 4)):
        starts = replicas.start_s[kind == wanted].reshape(-1, 4 // group, group)
        assert (starts == starts[:, :, :1]).all()
    assert (replicas.start_s[kind == Kind.F][:, 0] != replicas.start_s[kind == Kind.F][:, 2]).any()


def test_groups_that_do_not_divide_the_columns_are_refused():
    graph = graph_of()
    with pytest.raises(ScheduleError, match="groups of 3 for REDUCE_GRAD do not divide 4 columns"):
        execute_replicas(graph, durations(graph, 4, 6), {Kind.REDUCE_GRAD: 3})
    with pytest.raises(ScheduleError, match=r"shape \(4,\)"):
        execute_replicas(graph, np.ones(4), {})


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(["1F1B", "ZBH1", "DualPipe", "1F1B gathered"]),
    blocks=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 2**32 - 1),
    led=st.booleans(),
    forward_group=st.booleans(),
)
def test_compiled_columns_are_the_plain_ones_to_the_last_bit(name, blocks, group, seed, led, forward_group):
    graph = graph_of(name.split()[0], num_microbatches=8, active=1 if "gathered" in name else None)
    rng = np.random.default_rng(seed)
    size, width = len(graph.rank), blocks * group
    duration_s = rng.exponential(size=(size, width)) * rng.integers(0, 2, size=(size, width))
    groups = np.ones(len(Kind), dtype=np.int32)
    groups[[Kind.REDUCE_GRAD, Kind.UNSHARD]] = group
    groups[Kind.F] = group if forward_group else 1
    is_reduction = graph.schedule.actions.kind == Kind.REDUCE_GRAD
    extra = (
        {key: np.where(is_reduction, rng.exponential(size=size), 0.0) for key in ("lead_s", "tail_s")} if led else {}
    )
    found = execute_replicas(graph, duration_s, {kind: int(groups[kind]) for kind in Kind}, **extra)
    expected = plain_replicas(graph, duration_s, groups, **extra)
    assert np.array_equal(found.start_s, expected.start_s)
    assert np.array_equal(found.end_s, expected.end_s)
    if width == 1 and led:
        alone = execute(graph, np.ascontiguousarray(duration_s[:, 0]), **extra)
        assert np.array_equal(alone.start_s, expected.start_s[:, 0])
    assert kernel.IS_COMPILED or found.graph is graph


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), order=st.permutations(range(4)))
def test_permuting_equal_ranks_permutes_their_times(seed, order):
    graph = graph_of("ZBVZeroBubble", vpp=2)
    duration_s = durations(graph, 4, seed)
    straight, permuted = (
        execute_replicas(graph, columns, all_coupled(4)) for columns in (duration_s, duration_s[:, order])
    )
    assert np.array_equal(straight.end_s[:, order], permuted.end_s)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), column=st.integers(0, 3), factor=st.floats(1.0, 3.0))
def test_a_slower_replica_never_speeds_anything_up(seed, column, factor):
    graph = graph_of()
    duration_s = durations(graph, 4, seed)
    before = execute_replicas(graph, duration_s, all_coupled(4))
    duration_s[:, column] *= factor
    assert (execute_replicas(graph, duration_s, all_coupled(4)).end_s >= before.end_s).all()
