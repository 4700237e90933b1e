"""Traffic in characters: what each axis sends, and a square of senders by receivers."""

from __future__ import annotations

import math

from ..core.base.terminal import table
from ..core.base.units import format_bytes
from ..core.layout.rank_traffic import RankTraffic

SHADES = ".:-=+*#%@"
"""From little to much; two of them are a factor of ten."""


def traffic_text(traffic: RankTraffic, width: int = 100) -> str:
    """The table of axes, then the square where it is no wider than `width` characters."""
    rows: list[tuple[str, ...]] = [("axis", "bytes a step", "to other nodes", "to other racks", "most of a rank")]
    for axis in traffic.axes:
        shares = (axis.between_nodes_bytes, axis.between_racks_bytes)
        away = (f"{share / axis.num_bytes:.0%}" if axis.num_bytes else "0%" for share in shares)
        rows.append((axis.name, format_bytes(axis.num_bytes), *away, format_bytes(axis.most_of_rank_bytes)))
    if traffic.num_racks == 1:
        rows = [(*row[:3], row[4]) for row in rows]
    lines = [f"Bytes that ranks send each other in a step: {traffic.title}", "", *table(rows, width)]
    margin = len(f"{traffic.first_of(traffic.num_units - 1)}") + 3
    if traffic.num_units + margin <= width:
        lines += ["", *_square(traffic, margin)]
    else:
        what = "rank" if traffic.ranks_per_unit == 1 else "node"
        lines += ["", f"  {what} by {what} it is wider than this: -o traffic.svg has it"]
    return "\n".join(lines) + "\n"


def _square(traffic: RankTraffic, margin: int) -> list[str]:
    matrix = traffic.matrix
    most = float(matrix.max(initial=0.0))
    what = "rank" if traffic.ranks_per_unit == 1 else "node"
    lines = [f"{'':>{margin}}from {what} (down) to {what} (across), rows of {traffic.unit_name}s"]
    if traffic.ranks_per_unit <= traffic.devices_per_node:
        lines = [f"{'':>{margin}}from {what} (down) to {what} (across)"]
    for unit, row in enumerate(matrix.tolist()):
        cells = "".join(_shade(value, most) for value in row)
        lines.append(f"{traffic.first_of(unit):>{margin - 2}} |{cells}|")
    least = most / 10 ** (len(SHADES) / 2)
    return [*lines, f"{'':>{margin}}{SHADES[0]} {format_bytes(least)} or less ... {SHADES[-1]} {format_bytes(most)}"]


def _shade(num_bytes: float, most: float) -> str:
    if not num_bytes:
        return " "
    below = int(math.log10(most / num_bytes) * 2 + 0.5)
    return SHADES[max(0, len(SHADES) - 1 - below)]
