"""Which ranks a collective of a pipeline rank joins, and how they lie over the machine."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...core.layout.layout import AXES, Layout
from ...core.machine.cluster import ClusterSpec
from ...core.plan.plan import Plan
from ...core.program import num_shards, tied_ends
from .topology import Spread, spread_of

DENSE_AXES: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "tp_cp": ("tp", "cp"),
    "dp": ("cp", "dp"),
    "tp_cp_dp": ("tp", "cp", "dp"),
}
"""Axis of a collective -> axes of the dense rank grid that its group spans; gradients of dense layers
are added over cp too."""

EXPERT_AXES: Mapping[str, tuple[str, ...]] = {"ep": ("ep",), "etp": ("tp",), "edp": ("dp",)}
"""The same for the grid in which experts see the ranks."""


CONTEXT_AXES = ("cp_inner", "cp_outer")
"""Neighbours on the cp axis of the dense grid, and ranks as far apart as there are neighbours."""


RANK_AXES = frozenset({*DENSE_AXES, *EXPERT_AXES, *CONTEXT_AXES})
"""Axes whose group is the same for all stages of a pipeline rank."""


class Spreads:
    """The groups of a plan's tensor-parallel rank 0 of one data-parallel rank (0) on every pipeline
    rank, each looked at once.

    Groups that are shifted copies of each other are placed in the same way where the shift is a whole number of leaf
    switches; only one of them is laid out.
    """

    def __init__(self, plan: Plan, dp_rank: int = 0):
        self._plan = plan
        self._dp_rank = dp_rank
        # Devices after which the network looks the same: those of one leaf switch, or of one node.
        self._period = plan.cluster.devices_per_node * max(1, plan.cluster.nodes_per_leaf)
        # Spreads by axis and where they are asked for, by (axis, size, place in the period, extent); and those of
        # several axes by pipeline rank.
        self._at: dict[tuple[object, ...], Spread] = {}
        self._known: dict[tuple[object, ...], Spread] = {}
        self._of_ranks: dict[tuple[tuple[str, ...], int], tuple[Spread, ...]] = {}
        # How many global ranks one step along an axis is, in the grid of dense layers and in that of experts.
        self._dense = strides(plan.layout, plan.layout.sizes)
        self._expert = strides(plan.layout, plan.layout.expert_sizes)

    def spread(self, axis: str, stage: int, pp_rank: int) -> Spread:
        """How the group over `axis` of a stage on its pipeline rank lies over nodes.

        Axes are those of `core.program.Collective`.
        """
        place = (axis, pp_rank) if axis in RANK_AXES else (axis, stage, pp_rank)
        if place not in self._at:
            ranks = self.members(axis, stage, pp_rank)
            key = (axis, len(ranks), int(ranks[0]) % self._period, int(ranks[-1] - ranks[0]))
            if key not in self._known:
                self._known[key] = spread_of(self._plan.cluster, ranks.tolist())
            self._at[place] = self._known[key]
        return self._at[place]

    def of_rank(self, axes: tuple[str, ...], stage: int, pp_rank: int) -> tuple[Spread, ...]:
        """The spreads over several axes that do not depend on the stage."""
        key = (axes, self.shift(pp_rank))
        if key not in self._of_ranks:
            self._of_ranks[key] = tuple(self.spread(axis, stage, pp_rank) for axis in axes)
        return self._of_ranks[key]

    def between(self, pp_rank: int, peer: int) -> ClusterSpec:
        """The cluster as messages between two pipeline ranks find it: here, whichever they are, as it is."""
        return self._plan.cluster

    def shift(self, pp_rank: int) -> int:
        """Equal for pipeline ranks whose groups are placed in the same way: how far their first rank is into a leaf
        switch's nodes."""
        return self.global_rank(pp_rank) % self._period

    def global_rank(self, pp_rank: int) -> int:
        """The rank that stands for a pipeline rank."""
        return self._dp_rank * self._dense["dp"] + pp_rank * self._dense["pp"]

    def members(self, axis: str, stage: int, pp_rank: int) -> np.ndarray:
        """Global ranks of the group."""
        plan, dense, here = self._plan, self._dense, self.global_rank(pp_rank)
        if axis in DENSE_AXES:
            return _group(here, [(plan.layout.sizes[name], dense[name]) for name in DENSE_AXES[axis]])
        if axis in CONTEXT_AXES:
            inner, stride = plan.layout.cp_inner, dense["cp"]
            return _group(here, [(inner, stride) if axis == "cp_inner" else (plan.layout.cp_outer, stride * inner)])
        if axis in EXPERT_AXES:
            return _group(here, [(plan.layout.expert_sizes[name], self._expert[name]) for name in EXPERT_AXES[axis]])
        if axis in ("replica", "expert_replica"):
            each = "dp" if axis == "replica" else "edp"
            return np.sort(np.concatenate([self.members(each, stage, owner) for owner in plan.placement.ranks[stage]]))
        if axis.endswith(("_shard", "_replicate")):
            whole, _, part = axis.rpartition("_")
            shards = getattr(num_shards(plan, stage), "dense" if whole in ("dp", "replica") else "expert")
            copies = self.members(whole, stage, pp_rank)
            place = int(np.searchsorted(copies, here))
            return copies[place // shards * shards :][:shards] if part == "shard" else copies[place % shards :: shards]
        match axis:
            case "embedding":
                return np.array([self.global_rank(end) for end in tied_ends(plan, pp_rank)])
            case "model":
                return _group(here, [(plan.layout.tp, dense["tp"]), (plan.layout.pp, dense["pp"])])
        raise AssertionError(f"no group is known over {axis!r}")


def strides(layout: Layout, sizes: Mapping[str, int]) -> dict[str, int]:
    """Axis -> distance of neighbouring ranks along it, in the grid of the given axis sizes."""
    named = layout.order.split("-")
    found, stride = {}, 1
    for axis in [*named, *(axis for axis in AXES if axis not in named)]:
        found[axis] = stride
        stride *= sizes[axis]
    return found


def _group(rank: int, axes: list[tuple[int, int]]) -> np.ndarray:
    """All ranks that differ from one only along (size, stride) axes, ascending."""
    found = np.array([rank - sum(rank // stride % size * stride for size, stride in axes)])
    for size, stride in axes:
        if size > 1:
            found = np.add.outer(np.arange(size) * stride, found).ravel()
    return np.sort(found)
