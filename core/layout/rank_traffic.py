"""`RankTraffic`: the bytes that ranks, or units of neighbouring ranks, send each other in a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..base.errors import LayoutError


@dataclass(frozen=True)
class AxisTraffic:
    """What one axis sends in a step: all bytes, how many of them go to another node and another rack, and the most that
    one rank sends."""

    name: str
    num_bytes: float
    between_nodes_bytes: float
    between_racks_bytes: float
    most_of_rank_bytes: float

    def report(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "bytes": round(self.num_bytes),
            "between_nodes_bytes": round(self.between_nodes_bytes),
            "between_racks_bytes": round(self.between_racks_bytes),
            "most_of_rank_bytes": round(self.most_of_rank_bytes),
        }


@dataclass(frozen=True)
class RankTraffic:
    """`matrices[axis][sender, receiver]` are bytes a step between units of `ranks_per_unit` ranks, those inside of a
    unit on the diagonal; `axes` has the sums of every axis, the largest first."""

    title: str
    num_ranks: int
    devices_per_node: int
    nodes_per_rack: int
    ranks_per_unit: int
    matrices: Mapping[str, np.ndarray] = field(hash=False)
    axes: tuple[AxisTraffic, ...]

    @property
    def matrix(self) -> np.ndarray:
        """`[sender, receiver]` over all axes."""
        return sum(self.matrices.values(), np.zeros((self.num_units, self.num_units)))

    @property
    def num_units(self) -> int:
        """Rows of the matrix."""
        return -(-self.num_ranks // self.ranks_per_unit)

    @property
    def ranks_per_rack(self) -> int:
        """Ranks of a rack's nodes."""
        return self.devices_per_node * self.nodes_per_rack

    @property
    def num_racks(self) -> int:
        """Racks, the last of which may be part-filled."""
        return -(-self.num_ranks // self.ranks_per_rack)

    @property
    def unit_name(self) -> str:
        """What a row is: `rank`, `node`, or `16 nodes`."""
        if self.ranks_per_unit == 1:
            return "rank"
        nodes = self.ranks_per_unit // self.devices_per_node
        return "node" if nodes == 1 else f"{nodes} nodes"

    def first_of(self, unit: int) -> int:
        """The number of a unit's first rank or node, which its row is called after."""
        return unit if self.ranks_per_unit == 1 else unit * (self.ranks_per_unit // self.devices_per_node)

    def only(self, name: str) -> RankTraffic:
        """What one axis sends. Raises `LayoutError` for one that sends nothing."""
        if name not in self.matrices:
            known = ", ".join(self.matrices) or "none"
            raise LayoutError(f"nothing is sent over {name} in this step. Axes that send: {known}.")
        return RankTraffic(
            f"{self.title}, {name} alone",
            self.num_ranks,
            self.devices_per_node,
            self.nodes_per_rack,
            self.ranks_per_unit,
            {name: self.matrices[name]},
            tuple(axis for axis in self.axes if axis.name == name),
        )

    def report(self) -> dict[str, Any]:
        """The JSON form; of the matrix what is not zero."""
        cells = []
        for sender, receiver in np.argwhere(self.matrix).tolist():
            sent = {name: round(float(matrix[sender, receiver])) for name, matrix in self.matrices.items()}
            cells.append({"from": sender, "to": receiver, **{name: each for name, each in sent.items() if each}})
        return {
            "title": self.title,
            "num_ranks": self.num_ranks,
            "ranks_per_unit": self.ranks_per_unit,
            "axes": {axis.name: axis.report() for axis in self.axes},
            "bytes_between_units": cells,
        }
