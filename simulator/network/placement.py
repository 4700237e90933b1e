"""Whether data-parallel replicas are placed in the same way over nodes, so that one of them stands for all."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ...core.layout.layout import Layout
from ...core.machine.cluster import ClusterSpec
from ...core.plan.plan import Plan
from .link_shares import rank_index
from .spreads import strides


def replicas_placed_equally(plan: Plan) -> bool:
    """True when tensor-, context- and expert-parallel groups and neighbouring stages of every replica
    share nodes in the same way.

    Leaf switches count only where they are oversubscribed; elsewhere crossing them costs a
    microsecond (`leaf_latency_s`).
    """
    return all(_same_shift(plan.layout, size) for size in levels(plan.cluster))


def levels(cluster: ClusterSpec) -> tuple[int, ...]:
    """Devices of the units of the machine whose borders matter: a node, and what is behind
    oversubscribed leaf switches."""
    node = cluster.devices_per_node
    behind = node * cluster.nodes_per_leaf if cluster.oversubscription > 1 and cluster.nodes_per_leaf else 0
    return (node, behind) if behind else (node,)


def shift_of(plan: Plan, dp_rank: int) -> int:
    """How far a replica's first rank is into the largest unit; replicas with equal shifts are placed in the same
    way."""
    return int(dp_rank * strides(plan.layout, plan.layout.sizes)["dp"] % levels(plan.cluster)[-1])


@lru_cache(maxsize=256)
def _same_shift(layout: Layout, unit: int) -> bool:
    """Whether every replica is cut by the borders of units of `unit` ranks as the first one is."""
    if layout.dp == 1 or layout.world_size <= unit:
        return True
    units = rank_index(layout, "dense") // unit  # [tp, cp, dp, pp]
    # of the ranks of a cell, neighbour by neighbour
    within = _borders(units.transpose(2, 3, 0, 1).reshape(layout.dp, layout.pp, -1))
    between = np.diff(units[0, 0], axis=-1) != 0  # messages: does the next pipeline rank lie elsewhere
    replicas = np.concatenate([within.reshape(layout.dp, -1), between.reshape(layout.dp, -1)], axis=1)
    if (replicas != replicas[:1]).any():
        return False
    experts = rank_index(layout, "expert") // unit  # [etp, ep, edp, pp]
    by_copy = experts.transpose(2, 3, 0, 1)
    return all((borders == borders[:1]).all() for borders in (_borders(by_copy), _borders(by_copy.swapaxes(2, 3))))


def _borders(units: np.ndarray) -> np.ndarray:
    """Where neighbours along the last axis lie in different units."""
    return np.diff(units, axis=-1) != 0
