"""Tapes of operations against a brute-force list of tensor lifetimes, and states of a schedule against its actions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Runtime
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.core.plan.sections import Batch, ScheduleChoice
from shardproof.core.schedule import CATALOG, lower
from shardproof.simulator.memory.layers import full_recompute
from shardproof.simulator.memory.peaks import peaks_by_action, peaks_by_state
from shardproof.simulator.memory.tape import EMPTY, Node, tape_memory
from shardproof.simulator.stack.profiles import profile_of

SIZES = st.integers(0, 9)
NODES = st.builds(lambda *sizes: Node("node", *sizes), SIZES, SIZES, SIZES, SIZES, SIZES)
"""What a node keeps, its gradient, others alive meanwhile, and the temporary tensors of forward and backward."""

TAPES = st.lists(NODES, max_size=6)


def most_alive(nodes: list[Node]) -> tuple[int, int]:
    """Peaks of forward and backward from lifetimes `[first, last]` in steps: forward of node i is step i, its
    backward step 2n - 1 - i."""
    n = len(nodes)
    lifetimes = []
    for i, node in enumerate(nodes):
        back = 2 * n - 1 - i
        lifetimes += [
            (i, back, node.saved_bytes),
            (i, i, node.forward_bytes),
            (back, back, node.backward_bytes + node.transient_bytes),
        ]
        lifetimes.append((back, back + 1, node.gradient_bytes))  # the node before takes it
    alive = [sum(size for first, last, size in lifetimes if first <= step <= last) for step in range(2 * n)]
    return max(alive[:n], default=0), max(alive[n:], default=0)


@given(TAPES)
def test_peaks_are_those_of_the_lifetimes(nodes: list[Node]) -> None:
    memory = tape_memory(nodes)
    assert (memory.forward_bytes, memory.backward_bytes) == most_alive(nodes)
    assert memory.retained_bytes == sum(node.saved_bytes for node in nodes)


@given(TAPES, st.integers(1, 5))
def test_equal_tapes_in_a_row_are_a_tape_added_to_itself(nodes: list[Node], count: int) -> None:
    one, total = tape_memory(nodes), EMPTY
    for _ in range(count):
        total = total + one
    assert (total.retained_bytes, total.deferred_bytes) == (
        one.times(count).retained_bytes,
        one.times(count).deferred_bytes,
    )
    assert (total.forward_bytes, total.backward_bytes) == (
        one.times(count).forward_bytes,
        one.times(count).backward_bytes,
    )


@given(TAPES.filter(bool))
def test_a_recomputed_layer_keeps_its_input_and_peaks_with_everything_and_its_output(nodes: list[Node]) -> None:
    whole, retained = tape_memory(nodes), min(1, nodes[0].saved_bytes)
    again = tape_memory(full_recompute(tuple(nodes), retained))
    assert again.retained_bytes == retained
    assert again.backward_bytes == whole.backward_bytes + retained


def test_a_recomputed_module_comes_back_for_its_own_backward_only() -> None:
    nodes = [Node("a", 5), Node("b", 7, dropped_bytes=7, recompute="mlp"), Node("c", 1)]
    memory = tape_memory(nodes)
    assert memory.retained_bytes == 6
    assert memory.backward_bytes == 12  # c has gone when b's 7 are back
    assert memory.backward_peak == "b"
    assert memory.forward_bytes == 12


@pytest.mark.parametrize("profile", ["shardproof", "megatron-te", "megatron-2021"])
@pytest.mark.parametrize("name", sorted(CATALOG))
def test_states_have_the_peaks_of_the_actions(name: str, profile: str) -> None:
    vpp = (
        2
        if name
        in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "VHalf", "VMin")
        else 1
    )
    layout = Layout(tp=2, pp=4, dp=2, vpp=vpp, zero=1)
    plan = Plan(
        model=model_preset("gpt3-175b"),
        cluster=cluster_preset("dgx-a100-80g", layout.world_size),
        layout=layout,
        batch=Batch(2 * 16, 1, 2048),
        runtime=Runtime(profile),
        schedule=ScheduleChoice(name),
    )
    schedule = lower(schedule_for(plan))
    assert peaks_by_state(plan, profile_of(plan).memory, schedule) == peaks_by_action(
        plan, profile_of(plan).memory, schedule
    )
