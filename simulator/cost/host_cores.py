"""Ranks that share cores: with more ranks than cores, what computes at the same time contends for them as
transfers do for a link."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ...core.machine.cluster import ClusterSpec
from ...core.plan.plan import Plan
from ..engine.attribution import Sorts
from ..engine.contention import Traffic
from ..engine.seconds import Seconds

CORES = "cores"
"""The name of the shared resource; its unit is seconds of one core."""


def shares_cores(cluster: ClusterSpec, num_ranks: int) -> bool:
    """True when so many ranks may at some time want more cores than there are."""
    return 0 < cluster.num_cores < num_ranks


def skew_s(plan: Plan, work_s: float, meetings: int = 1) -> float:
    """Seconds that ranks with a core each wait for the slowest while they work for `work_s` and meet so many times,
    evenly: what they are apart grows with the root of the work since they met, as sums of independent delays do. With
    fewer cores than ranks they wait for cores instead."""
    waits = plan.layout.world_size > 1 and not shares_cores(plan.cluster, plan.layout.world_size)
    return plan.cluster.rank_skew_root_s * math.sqrt(work_s * meetings) if waits else 0.0


def core_loads(plan: Plan, sorts: Sorts, prices: Sequence[Seconds]) -> Traffic | None:
    """What the actions of a plan's graph load: one core each for as long as they take alone, and so do the equal
    actions of the ranks that are not simulated. None where there are cores for all.

    A blocked rank waits without a core. What is sent is copied by the ranks themselves and counts as work.
    """
    if not shares_cores(plan.cluster, plan.layout.world_size):
        return None
    working = np.array([seconds.total_s > 0 for seconds in prices])
    num_equal = plan.layout.world_size // plan.layout.pp
    capacity = float(plan.cluster.num_cores)
    route = np.where(working, 0, -1).astype(np.int32)
    return Traffic(route[sorts.of_action], ({CORES: float(num_equal)},), [1.0], {CORES: capacity})
