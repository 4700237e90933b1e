"""The bytes between every two ranks in a step, from what their groups send."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from ...core.layout.rank_map import nodes_per_rack
from ...core.layout.rank_traffic import AxisTraffic, RankTraffic
from ...core.plan.plan import AnyPlan, ModularPlan, Plan
from ...core.schedule.schedule import Schedule
from .bridge_bytes import bridge_bytes
from .sent_bytes import MESSAGE, sent_bytes

BRIDGE = "bridge"
"""The axis of what passes between modules: hidden states, and their gradients back."""

Pairs = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Senders, receivers and bytes of pairs of ranks."""

MOST_ROWS = 128
"""Ranks, or nodes, up to which each has a row of its own."""


def rank_traffic(plan: AnyPlan, schedules: Sequence[Schedule], title: str = "") -> RankTraffic:
    """What ranks send each other in a step of a lowered schedule; of several modules of each one's. What passes between
    modules is the axis `BRIDGE`; the few numbers that all of them agree on are counted within each.

    A member of a collective sends its bytes to the next member, the last to the first, as around a ring; of an
    all-to-all each other member gets an even part. Trees and sums in switches spread the same bytes otherwise.
    Up to `MOST_ROWS` ranks have rows of their own, and as many nodes; above, rows are so many nodes that they suffice.
    """
    cluster, num_ranks = plan.cluster, plan.world_size
    pairs = _pairs(plan, schedules)
    node = cluster.devices_per_node
    num_nodes = -(-num_ranks // node)
    in_rack = nodes_per_rack(num_nodes, cluster.nodes_per_leaf)
    unit = 1 if num_ranks <= MOST_ROWS else node * _power_of_two(num_nodes / MOST_ROWS)
    num_units = -(-num_ranks // unit)
    matrices, axes = {}, []
    for name, (senders, receivers, num_bytes) in pairs.items():
        matrices[name] = np.zeros((num_units, num_units))
        np.add.at(matrices[name], (senders // unit, receivers // unit), num_bytes)
        rack = node * in_rack
        axes.append(
            AxisTraffic(
                name,
                float(num_bytes.sum()),
                float(num_bytes[senders // node != receivers // node].sum()),
                float(num_bytes[senders // rack != receivers // rack].sum()),
                float(np.bincount(senders, num_bytes).max()),
            )
        )
    axes.sort(key=lambda axis: -axis.num_bytes)
    matrices = {axis.name: matrices[axis.name] for axis in axes}
    return RankTraffic(title, num_ranks, node, in_rack, unit, matrices, tuple(axes))


def _pairs(plan: AnyPlan, schedules: Sequence[Schedule]) -> dict[str, Pairs]:
    """What is sent by axis."""
    found: defaultdict[str, list[Pairs]] = defaultdict(list)
    for part, schedule in zip(plan.parts, schedules, strict=True):
        for axis, pairs in _of_part(part, schedule):
            found[axis].append(pairs)
    if isinstance(plan, ModularPlan):
        for join, backward in product(plan.joins, (False, True)):
            between = bridge_bytes(plan, *join, backward=backward)
            senders, receivers = np.array(list(between)).T
            found[BRIDGE].append((senders, receivers, np.array(list(between.values()), dtype=np.float64)))
    return {
        axis: tuple(np.concatenate(part) for part in zip(*parts, strict=True))  # type: ignore[misc]
        for axis, parts in found.items()
    }


def _of_part(plan: Plan, schedule: Schedule) -> Iterator[tuple[str, Pairs]]:
    """What the groups of one model send, by axis."""
    for (axis, op, members), each in sent_bytes(plan, schedule).items():
        group, sent = np.array(members), np.array(each)
        if op == MESSAGE:
            senders, receivers, num_bytes = group[:1], group[1:], sent
        elif op == "all_to_all":
            senders, receivers = np.repeat(group, len(group)), np.tile(group, len(group))
            others = senders != receivers
            senders, receivers = senders[others], receivers[others]
            num_bytes = np.repeat(sent / (len(group) - 1), len(group) - 1)
        else:
            senders, receivers, num_bytes = group, np.roll(group, -1), sent
        if sent.any():
            yield axis, (senders, receivers, num_bytes)


def _power_of_two(least: float) -> int:
    return 1 << math.ceil(math.log2(max(least, 1.0)))
