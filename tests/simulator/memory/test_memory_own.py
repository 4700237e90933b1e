"""What our backend holds in REDUCE_GRAD, STEP and split backwards, by hand; the runs themselves:
tests/backend/ranks/test_own_runs.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from helpers.plans import product_plan
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.machine.host import EXCHANGED_BYTES
from shardproof.core.model.model_presets import model_preset
from shardproof.core.model.parameters import count_parameters
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.core.plan.sections import Batch, Numerics, Precision
from shardproof.core.schedule import lower
from shardproof.core.schedule.action import Kind
from shardproof.simulator.memory.changes import all_changes
from shardproof.simulator.memory.memory import rank_memories
from shardproof.simulator.memory.own import own_step_bytes
from shardproof.simulator.memory.peaks import peaks_by_action, peaks_by_state
from shardproof.simulator.memory.sizes import stage_sizes
from shardproof.simulator.memory.tape import Node, split_peak_bytes, tape_memory
from shardproof.simulator.memory.tensors import rotary_table_bytes
from shardproof.simulator.stack.profiles import profile_of

LLAMA = replace(model_preset("tiny-llama"), num_layers=4)


def plan_of(layout: Layout, schedule: str = "1F1B", *, mode: str = "fast", sequence: int = 8, model=LLAMA) -> Plan:
    return product_plan(layout, model=model, samples=8, sequence=sequence, dtype="fp32", schedule=schedule, mode=mode)


def test_with_copies_gradients_are_held_so_many_times_while_they_are_reduced():
    # more gradients than are exchanged between members over gloo
    large = replace(LLAMA, hidden_size=128, ffn_hidden_size=384, head_dim=16)
    weights = 4 * count_parameters(large)
    for library, mode, times in (("gloo", "fast", 2), ("gloo", "exact", 5), ("shm", "fast", 3), ("shm", "exact", 3)):
        plan = plan_of(Layout(dp=2), mode=mode, model=large)
        plan = replace(plan, cluster=replace(plan.cluster, collective_library=library))
        (memory,) = rank_memories(plan, lower(schedule_for(plan)))
        assert memory.peak_action == "0REDUCE_GRAD"
        # weights, two moments; no activation is kept any more
        assert memory.peak_bytes == (3 + times) * weights + rotary_table_bytes(plan)


@pytest.mark.parametrize(("copies", "times"), [(2, 4), (3, 3 + 1 / 3), (4, 3 + 1 / 4)])
def test_gradients_of_less_than_a_megabyte_are_exchanged_and_held_some_times_more(copies, times):
    cluster = replace(cluster_preset("this-host", copies), collective_library="gloo")
    plan = Plan(
        LLAMA, cluster, Layout(dp=copies), Batch(12, 1, 8), precision=Precision("fp32"), numerics=Numerics("fast")
    )
    gradients = 4 * count_parameters(LLAMA)
    assert gradients < EXCHANGED_BYTES
    (sizes,) = stage_sizes(plan)
    assert sizes.reduce_bytes == gradients + int(times * gradients)


def test_without_copies_the_step_holds_gradients_once():
    gradients = 4 * count_parameters(LLAMA)
    for mode in ("fast", "exact"):
        # where the sums are on other ranks (ZeRO), what comes
        assert own_step_bytes(plan_of(Layout(), mode=mode), 0, (0,), 0) == gradients
        assert own_step_bytes(plan_of(Layout(), mode=mode), 0, (0,), gradients) == 0


def test_a_copy_whose_samples_end_as_several_sums_has_one_of_each_once_they_are_reduced():
    plan = replace(plan_of(Layout(dp=2), mode="exact"), batch=Batch(6, 1, 8))
    schedule = lower(schedule_for(plan))
    _, _, sums = all_changes(plan, schedule, profile_of(plan).memory)
    (size,) = (each.gradients_bytes for each in stage_sizes(plan))
    held = {name: sums.during[schedule.actions.kind == kind].tolist() for name, kind in Kind.__members__.items()}
    # of six samples a copy has the first three: of the tree over all the nodes [0, 2) and [2, 3)
    assert held["REDUCE_GRAD"] == [2 * size] and held["STEP"] == [size]


def test_a_tied_table_is_held_twice_more_where_its_ends_lie_on_two_ranks():
    model = replace(LLAMA, tied_embeddings=True, vocab_size=65536)  # the table is all there is
    plan = plan_of(Layout(pp=2), model=model)
    table = 4 * model.vocab_size * model.hidden_size
    sizes = stage_sizes(plan)
    held = own_step_bytes(plan, 0, (0,), sizes[0].gradients_bytes) + sizes[0].gradients_bytes
    assert held >= sizes[0].weights_bytes + sizes[0].gradients_bytes + 2 * table


def test_a_split_backward_keeps_inputs_and_output_gradients_until_the_weight_gradients_run():
    first = Node(
        "first", 10, gradient_bytes=4, weight_input_bytes=10, weight_gradient_bytes=6, backward_bytes=5, weight_bytes=5
    )
    second = Node(
        "second", 20, gradient_bytes=6, weight_input_bytes=15, weight_gradient_bytes=8, backward_bytes=7, weight_bytes=7
    )
    # starts with 30 kept; second: + 6; then 10 + 15 + 8 = 33 are held, the gradient of 6, and first's of 4
    assert split_peak_bytes([first, second]) == 33 + 6 + 4
    tape = tape_memory([first, second])
    assert (tape.deferred_bytes, tape.split_bytes, tape.weight_bytes) == (39, 43, 7)
    assert tape.backward_bytes == 30 + 6 + 7


def test_two_tapes_split_as_one_tape_of_all_their_nodes_when_nothing_lives_across():
    nodes = [
        Node(str(i), 10 + i, 0, weight_input_bytes=5, weight_gradient_bytes=i, backward_bytes=3 * i, weight_bytes=i)
        for i in range(5)
    ]
    whole, parts = tape_memory(nodes), tape_memory(nodes[:2]) + tape_memory(nodes[2:])
    assert whole == replace(parts, backward_peak=whole.backward_peak)


@pytest.mark.parametrize("schedule", ["ZBH1", "ZBVZeroBubble", "DualPipeV", "Interleaved1F1B", "1F1B"])
def test_peaks_by_state_are_those_of_every_action(schedule):
    vpp = 1 if schedule in ("ZBH1", "1F1B") else 2
    plan = plan_of(Layout(pp=2, vpp=vpp, dp=2), schedule, sequence=64, model=replace(LLAMA, num_layers=8))
    lowered = lower(schedule_for(plan))
    assert peaks_by_state(plan, profile_of(plan).memory, lowered) == peaks_by_action(
        plan, profile_of(plan).memory, lowered
    )
