"""What ZeRO-2 and 3 cost a stack besides the bytes they send: units that nothing covers, gathers begun too late, and
tensors that go one by one."""

from __future__ import annotations

from typing import NamedTuple

from ...core.layout.stage_parameters import stage_parameters
from ...core.plan.plan import Plan
from ...core.program import Held, num_shards, stage_groups
from ..compute.compute import host_s
from ..stack.profile import Profile


class Uncovered(NamedTuple):
    """Whether nothing overlaps with the gathers of dense weights, those of experts, and the reductions of gradients."""

    dense: bool
    expert: bool
    reduced: bool


PERSISTENT_ELEMENTS = 100_000
"""Elements up to which ZeRO-3 leaves a tensor whole (deepspeed/runtime/zero/constants.py,
stage3_param_persistence_threshold)."""

LIST_CALLS = 2
"""Calls of the host for each part of a list that is gathered or scattered: a view and a copy. Counted."""


def table_share(plan: Plan, stage: int, num_elements: int) -> float:
    """Share of a stage's parameters that lie in its tables, of which tied ones are one."""
    content, model = plan.stages[stage], plan.model
    tables = content.embedding + content.head - (model.tied_embeddings and content.embedding and content.head)
    return tables * model.vocab_size * model.hidden_size / plan.layout.tp / num_elements


def alone_s(plan: Plan, stage: int, ring_s: float) -> float:
    """Seconds that one pass over a stage's weights takes longer where every tensor is gathered or scattered alone, in a
    list with a part for each rank: the latency of a ring and the host's calls. Small tensors rest on every rank."""
    tensors = sum(each.num_elements > PERSISTENT_ELEMENTS for each in stage_parameters(plan.model, plan.stages[stage]))
    return tensors * (ring_s + host_s(plan.cluster, LIST_CALLS * num_shards(plan, stage).dense))


def units(plan: Plan, stage: int, held: Held) -> Held:
    """Elements of the dense weights of one block of a stage and of its experts, on average, as they are gathered:
    together where experts are on all ranks, apart where they are cut over ranks."""
    blocks = sum(group.count for group in stage_groups(plan, stage) if group.kind in ("layer", "prediction"))
    tables = round(table_share(plan, stage, sum(held)) * sum(held))
    dense, expert = (held.dense - tables) // max(1, blocks), held.expert // max(1, blocks)
    return Held(dense, expert) if plan.layout.ep > 1 else Held(dense + expert, 0)


def uncovered(plan: Plan, profile: Profile, unit: Held, *, backward: bool) -> Uncovered:
    """What nothing overlaps with, in a pass over blocks whose weights are gathered and reduced in such units.

    A gather takes those after it along until `gather_ahead_elements` are under way: a block's dense weights and
    then its experts, backward the other way round. So the next block's are begun early over what lies between, the
    unit that takes them along included. A reduction is waited for at once where more than as many gradients would
    wait, or the device has one queue.
    """
    ahead = profile.gather_ahead_elements
    last = unit.dense if backward else unit.expert
    far = sum(unit) >= ahead
    near = last >= ahead if unit.expert else far
    reduced = (profile.one_queue and plan.layout.sequence_parallel) or max(unit) >= ahead
    return Uncovered(far if backward else near, near if backward else far, reduced)


def shared_card_s(crossing_s: float, covering_s: float, hidden_s: float) -> float:
    """Seconds that what a pass sends between nodes takes longer on cards over which weights and
    gradients are sent meanwhile.

    Of `covering_s`, the pass sends for `crossing_s`. Where both are under way each has half of a card, and what is
    hidden takes its share of the pass. Never does a card carry both in less than the sum of their seconds.
    """
    halved_s = crossing_s * min(1.0, hidden_s / covering_s) / 2 if covering_s else 0.0
    return max(halved_s, hidden_s + crossing_s - covering_s)
