"""Where ranks lie, in characters: what each axis spans, and the places of every node's ranks."""

from __future__ import annotations

from itertools import groupby

from ..core.base.terminal import table
from ..core.layout.rank_map import NOWHERE, AxisMap, RankMap, spread_text

MOST_NODES = 32
"""Nodes that have a line."""


def map_text(found: RankMap, width: int = 100) -> str:
    """Axes, then nodes, in lines of at most `width` characters."""
    lines = [f"Where ranks lie: {found.title}", ""]
    lines += table([(axis.name, spread_text(axis, found.num_racks)) for axis in found.axes], width)
    lines += [] if found.axes else ["  no axis has more than one place"]
    rows = [("node", "rack", "ranks", *(axis.name for axis in found.axes))]
    rows += [_node(found, node) for node in range(min(found.num_nodes, MOST_NODES))]
    if found.num_racks == 1:
        rows = [(row[0], *row[2:]) for row in rows]
    lines += ["", *table(rows, width)]
    if found.num_nodes > MOST_NODES:
        lines.append(f"  and {found.num_nodes - MOST_NODES:,} nodes more; -o map.svg shows all")
    return "\n".join(lines) + "\n"


def _node(found: RankMap, node: int) -> tuple[str, ...]:
    ranks = range(node * found.devices_per_node, min((node + 1) * found.devices_per_node, found.num_ranks))
    places = (_places(axis, ranks) for axis in found.axes)
    return str(node), str(node // found.nodes_per_rack), f"{ranks[0]}-{ranks[-1]}", *places


def _places(axis: AxisMap, ranks: range) -> str:
    """The places of ranks in their order, repeated ones once: `0-3 0-3`, `5`."""
    values = [key for key, _ in groupby(axis.place[ranks.start : ranks.stop].tolist())]
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][1] + 1 and NOWHERE not in (value, runs[-1][1]):
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return " ".join("-" if lo == NOWHERE else str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in runs)
