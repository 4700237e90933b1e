"""`RankMap`: which rank lies on which node and in which rack, and its place on every axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..base.errors import LayoutError
from .layout import Layout

MODULE = "module"
"""The axis that numbers the models of a run of several."""

ALL_AXES = ("tp", "cp", "ep", "etp", "dp", "pp", MODULE)
"""Axes that a map may have, in the order in which they are shown."""

_DENSE, _EXPERT = ("tp", "cp", "dp", "pp"), {"ep": "ep", "etp": "tp"}
"""Axes of the dense grid of ranks, and those of the experts' by the name they have there."""

NOWHERE = -1
"""The place of a rank on an axis that its module does not have."""


@dataclass(frozen=True)
class AxisMap:
    """One axis over all ranks: `place[rank]` is the rank's place on it, and `first` its group that holds rank 0, or the
    first rank that has a place.

    `num_groups` groups of `least` to `size` ranks lie on at most `num_nodes` nodes and in at most `num_racks` racks
    each.
    """

    name: str
    size: int
    place: np.ndarray
    first: tuple[int, ...]
    num_groups: int
    num_nodes: int
    num_racks: int
    least: int

    def report(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "size": self.size,
            "groups": self.num_groups,
            "most_nodes_of_a_group": self.num_nodes,
            "most_racks_of_a_group": self.num_racks,
            "first_group": list(self.first),
            "place_of_rank": self.place.tolist(),
        }


@dataclass(frozen=True)
class RankMap:
    """Ranks by nodes of `devices_per_node`, and nodes by racks of `nodes_per_rack` behind the same leaf switches (all
    nodes are one rack where a cluster does not say). Axes of one place are left out."""

    title: str
    num_ranks: int
    devices_per_node: int
    nodes_per_rack: int
    axes: tuple[AxisMap, ...]

    @property
    def num_nodes(self) -> int:
        """Nodes, the last of which may be part-filled."""
        return -(-self.num_ranks // self.devices_per_node)

    @property
    def num_racks(self) -> int:
        """Racks, the last of which may be part-filled."""
        return -(-self.num_nodes // self.nodes_per_rack)

    def only(self, name: str) -> RankMap:
        """The map with one axis. Raises `LayoutError` for one that it has not."""
        chosen = tuple(axis for axis in self.axes if axis.name == name)
        if not chosen:
            known = ", ".join(axis.name for axis in self.axes) or "none"
            raise LayoutError(f"no rank has a neighbour over {name} here. Axes of more than one place: {known}.")
        return RankMap(self.title, self.num_ranks, self.devices_per_node, self.nodes_per_rack, chosen)

    def report(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "title": self.title,
            "num_ranks": self.num_ranks,
            "devices_per_node": self.devices_per_node,
            "nodes_per_rack": self.nodes_per_rack,
            "axes": {axis.name: axis.report() for axis in self.axes},
        }


def rank_map(layouts: Sequence[Layout], *, devices_per_node: int, nodes_per_leaf: int, title: str) -> RankMap:
    """The map of one layout, or of the layouts of several modules whose ranks follow each other. `nodes_per_leaf` is
    that of a cluster, 0 where it does not say."""
    num_ranks = sum(layout.world_size for layout in layouts)
    num_nodes = -(-num_ranks // devices_per_node)
    in_rack = nodes_per_rack(num_nodes, nodes_per_leaf)
    unit = devices_per_node, devices_per_node * in_rack
    groups = {name: [group for layout in layouts for group in _groups(layout, name)] for name in ALL_AXES[:-1]}
    if len(layouts) > 1:
        ends = np.cumsum([0, *(layout.world_size for layout in layouts)]).tolist()
        groups[MODULE] = [[*range(first, last)] for first, last in pairwise(ends)]
    axes = [_axis(name, found, num_ranks, unit) for name, found in groups.items() if found]
    return RankMap(title, num_ranks, devices_per_node, in_rack, tuple(axes))


def nodes_per_rack(num_nodes: int, nodes_per_leaf: int) -> int:
    """Nodes of a rack: those behind the same leaf switches, or all where a cluster does not say how many these are."""
    return min(nodes_per_leaf, num_nodes) or num_nodes


def _groups(layout: Layout, name: str) -> list[list[int]]:
    """The groups of an axis of more than one place; none of experts' tensor parallelism where it is that of all."""
    if name in _DENSE:
        return layout.groups(name) if layout.sizes[name] > 1 else []
    if layout.expert_sizes[_EXPERT[name]] == 1 or (name == "etp" and layout.expert_tp == layout.tp):
        return []
    return layout.expert_groups(_EXPERT[name])


def _axis(name: str, groups: list[list[int]], num_ranks: int, unit: tuple[int, int]) -> AxisMap:
    """An axis from its groups. Along most axes a rank's place is that in its group; modules are places themselves."""
    place = np.full(num_ranks, NOWHERE)
    for number, group in enumerate(groups):
        place[group] = number if name == MODULE else np.arange(len(group))
    nodes, racks = (max(len({rank // size for rank in group}) for group in groups) for size in unit)
    size = len(groups) if name == MODULE else max(map(len, groups))
    return AxisMap(name, size, place, tuple(groups[0]), len(groups), nodes, racks, min(map(len, groups)))


def spread_text(axis: AxisMap, num_racks: int) -> str:
    """How an axis lies, in words: `64 groups of 8, each on 1 node`.

    >>> spread_text(AxisMap("tp", 8, np.zeros(8), tuple(range(8)), 1, 2, 1, 8), num_racks=1)
    '1 group of 8, on 2 nodes'
    """
    what = "module" if axis.name == MODULE else "group"
    groups = f"{axis.num_groups:,} {what}{'s' if axis.num_groups > 1 else ''}"
    each = "each " if axis.num_groups > 1 else ""
    nodes = f"{axis.num_nodes:,} node{'s' if axis.num_nodes > 1 else ''}"
    racks = f" in {axis.num_racks:,} rack{'s' if axis.num_racks > 1 else ''}" if num_racks > 1 else ""
    least = f"{axis.least:,} to " if axis.least < axis.size else ""
    size = "" if axis.name == MODULE else f" of {least}{axis.size:,}"
    most = "at most " if axis.num_groups > 1 and (axis.name == MODULE or least) and axis.num_nodes > 1 else ""
    return f"{groups}{size}, {each}on {most}{nodes}{racks}"
