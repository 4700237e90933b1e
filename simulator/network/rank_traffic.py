"""The bytes between every two ranks in a step, from what their groups send."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from ...core.layout.rank_map import nodes_per_rack
from ...core.layout.rank_traffic import AxisTraffic, RankTraffic
from ...core.plan.plan import Plan
from ...core.schedule.schedule import Schedule
from .sent_bytes import MESSAGE, sent_bytes

MOST_ROWS = 128
"""Ranks, or nodes, up to which each has a row of its own."""


def rank_traffic(plan: Plan, schedule: Schedule, title: str = "") -> RankTraffic:
    """What ranks send each other in a step of a lowered schedule.

    A member of a collective sends its bytes to the next member, the last to the first, as around a ring; of an
    all-to-all each other member gets an even part. Trees and sums in switches spread the same bytes otherwise.
    Up to `MOST_ROWS` ranks have rows of their own, and as many nodes; above, rows are so many nodes that they suffice.
    """
    layout, cluster = plan.layout, plan.cluster
    pairs = _pairs(plan, schedule)
    node = cluster.devices_per_node
    num_nodes = -(-layout.world_size // node)
    in_rack = nodes_per_rack(num_nodes, cluster.nodes_per_leaf)
    unit = 1 if layout.world_size <= MOST_ROWS else node * _power_of_two(num_nodes / MOST_ROWS)
    num_units = -(-layout.world_size // unit)
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
    return RankTraffic(title, layout.world_size, node, in_rack, unit, matrices, tuple(axes))


def _pairs(plan: Plan, schedule: Schedule) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Senders, receivers and bytes of every pair that something is sent between, by axis."""
    found: defaultdict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = defaultdict(list)
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
            found[axis].append((senders, receivers, num_bytes))
    return {
        axis: tuple(np.concatenate(part) for part in zip(*parts, strict=True))  # type: ignore[misc]
        for axis, parts in found.items()
    }


def _power_of_two(least: float) -> int:
    return 1 << math.ceil(math.log2(max(least, 1.0)))
