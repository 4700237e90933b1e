"""Waits for copies between device and host, against a simulation that moves copies and work in small steps of time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.plans import plan
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.plan.runtime import Offload
from shardproof.simulator.cost.host_link import backward_wait_s, forward_wait_s, update_wait_s
from shardproof.simulator.memory.sizes import stage_sizes
from shardproof.simulator.search.search import search
from shardproof.simulator.simulation.simulate import simulate
from shardproof.verify.dynamic.twin import twin

LARGE = {"model": "llama3-8b", "cluster": cluster_preset("dgx-h100", 8), "dtype": "bf16", "mode": "fast"}
PARTS = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=7)


def ticks_forward(parts: list[tuple[int, int]]) -> int:
    """Ticks of a forward: each tick the device works on a part, unless it waits, and the link copies one unit of the
    first part that has any left; the last unit of a part leaves after its work."""
    time, left, done = 0, [copy for _, copy in parts], [0] * len(parts)
    at = 0

    def can_copy(part: int) -> bool:
        return part <= at and (left[part] > 1 or done[part] == parts[part][0] or part < at)

    while at < len(parts) or any(left):
        over = [part for part in range(at) if left[part]]
        waiting = at < len(parts) and done[at] == parts[at][0] and any(part < at for part in over)
        first = next((part for part in range(len(parts)) if left[part]), None)
        # what has been made by the end of this tick may leave in it
        if at < len(parts) and not waiting and done[at] < parts[at][0]:
            done[at] += 1
        if first is not None and can_copy(first):
            left[first] -= 1
        if at < len(parts) and done[at] == parts[at][0] and not any(left[part] for part in range(at)):
            at += 1
        time += 1
    return time


def ticks_backward(parts: list[tuple[int, int]]) -> int:
    """Ticks of a backward, part by part."""
    time, here = 0, parts[-1][1]
    for number in range(len(parts) - 1, -1, -1):
        while here:
            time, here = time + 1, here - 1
        here = parts[number - 1][1] if number else 0
        for _ in range(parts[number][0]):
            time, here = time + 1, max(0, here - 1)
    return time


@given(PARTS)
def test_a_forward_waits_as_a_simulation_tick_by_tick_does(parts):
    assert sum(work for work, _ in parts) + forward_wait_s(parts) == pytest.approx(ticks_forward(parts), abs=1)


@given(PARTS)
def test_a_backward_waits_as_a_simulation_tick_by_tick_does(parts):
    assert sum(work for work, _ in parts) + backward_wait_s(parts) == pytest.approx(ticks_backward(parts))


def test_short_copies_cost_nothing_but_where_no_layer_is_left_to_cover_them():
    assert forward_wait_s([(5.0, 2.0), (5.0, 2.0), (5.0, 0.0)]) == 0.0
    assert backward_wait_s([(5.0, 2.0), (5.0, 2.0), (5.0, 0.0)]) == 0.0
    assert backward_wait_s([(5.0, 2.0), (5.0, 2.0)]) == 2.0


def test_long_copies_make_the_pass_as_long_as_they_are():
    assert forward_wait_s([(1.0, 10.0)] * 4) == 36.0
    assert backward_wait_s([(1.0, 10.0)] * 4) == 37.0


def test_moments_pass_the_link_once_each_way():
    cluster = replace(cluster_preset("dgx-h100", 8), host_link_bytes_per_s=1e9)
    piece_s = 2**25 / 1e9
    assert update_wait_s(cluster, 10e9, 1.0, 2**25) == pytest.approx(9.0 + piece_s)
    assert update_wait_s(cluster, 10e9, 100.0, 2**25) == pytest.approx(2 * piece_s)
    assert update_wait_s(cluster, 0.0, 1.0, 2**25) == 0.0


def test_a_step_waits_for_moments_as_long_as_the_link_takes():
    plain, away = (plan(tp=8, sequence=4096, offload=each, **LARGE) for each in (Offload(), Offload(optimizer=1.0)))
    added_s = simulate(away).report["step_time_s"] - simulate(plain).report["step_time_s"]
    moved = stage_sizes(away)[0].offloaded_optimizer_bytes
    update_s = simulate(plain).report["time_s"]["optimizer"]
    assert moved == pytest.approx(plain.num_parameters, rel=1e-3)  # 8 bytes of each, over 8 ranks
    assert added_s == pytest.approx((moved + 2**25) / 55.6e9 - update_s, rel=1e-6)


def test_a_search_keeps_what_rests_in_host_memory():
    small = {**LARGE, "model": "llama3.2-3b", "cluster": cluster_preset("dgx-h100", 2)}
    away = plan(tp=2, sequence=4096, offload=Offload(4, 0.5), **small)
    assert {each.offload for each in search(away).plans} == {Offload(4, 0.5)}


def test_fp32_weights_pass_the_link_with_the_moments():
    moments, weights = (
        plan(tp=8, sequence=4096, offload=Offload(0, 1.0, masters=masters), **LARGE) for masters in (False, True)
    )
    times = [simulate(each).report["step_time_s"] for each in (moments, weights)]
    moved = stage_sizes(weights)[0].offloaded_optimizer_bytes
    assert moved == 3 * stage_sizes(moments)[0].offloaded_optimizer_bytes // 2
    assert times[1] - times[0] == pytest.approx((moved / 3 + 2**24) / 55.6e9, rel=1e-6)


def test_a_twin_offloads_the_layers_that_it_has():
    small, changes = twin(plan(tp=8, sequence=4096, offload=Offload(30, 1.0), **LARGE))
    assert small.offload == Offload(small.model.num_layers, 1.0)
    assert f"offload.activations 30 -> {small.model.num_layers}: to fit this host." in changes
