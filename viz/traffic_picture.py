"""Traffic on paper: a square of senders by receivers, darker for more bytes, and what each axis sends in all."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ..core.base.units import format_bytes
from ..core.layout.rank_traffic import RankTraffic
from .picture import EDGE, Line, Mark, Picture, Rect, Text, text_width
from .scene import palette

LEFT, TOP, TABLE = 92.0, 104.0, 330.0
"""Pixels left of the square, above it, and of the table at its right."""

LARGEST_CELL = 40.0
DECADES = 4.0
"""Factors of ten that the colours span, from the most bytes down."""

COLUMNS = ((0.0, "start"), (128.0, "end"), (228.0, "end"), (330.0, "end"))
"""Of the table: axis, bytes, those to other nodes, those of the rank that sends most."""


def lay_out_traffic(traffic: RankTraffic, width: float = 1200.0) -> Picture:
    """The picture of what units send each other."""
    count = traffic.num_units
    cell = min(LARGEST_CELL, (width - LEFT - TABLE - 3 * EDGE) / count)
    side = cell * count
    title = f"Bytes that ranks send each other in a step: {traffic.title}"
    marks: list[Mark] = [
        Text(EDGE, 30.0, title, 16.0, bold=True),
        Text(EDGE, 50.0, _what(traffic), 11.0, palette.MUTED),
    ]
    marks.append(Rect(LEFT, TOP, side, side, palette.IDLE, crisp=True))
    marks += _cells(traffic, cell)
    marks += _borders(traffic, cell)
    marks += _names(traffic, cell)
    marks += _scale(traffic, LEFT + side + 2 * EDGE)
    marks += _table(traffic, LEFT + side + 2 * EDGE, TOP + 84.0)
    height = max(TOP + side + 24.0, TOP + 84.0 + 20.0 * (len(traffic.axes) + 2))
    return Picture(width, round(height), tuple(marks), title)


def _what(traffic: RankTraffic) -> str:
    rows = f"{traffic.num_ranks:,} ranks" if traffic.ranks_per_unit == 1 else f"{traffic.num_ranks:,} ranks by node"
    if traffic.ranks_per_unit > traffic.devices_per_node:
        rows = f"{traffic.num_ranks:,} ranks, {traffic.unit_name} a row"
    between = "nodes" if traffic.ranks_per_unit == 1 else "racks"
    block = traffic.devices_per_node if traffic.ranks_per_unit == 1 else traffic.ranks_per_rack
    lines = f"; lines are {between}" if traffic.num_ranks > block else ""
    inside = "" if traffic.ranks_per_unit == 1 else "; the diagonal is what stays inside a row"
    return f"{rows}{lines}{inside}. Collectives as rings, all-to-alls evenly."


def color_of(num_bytes: float, most: float) -> str:
    """Pale for little, dark for much: the share of the most, on a scale of `DECADES` factors of ten."""
    return palette.ramp(min(max(math.log10(most / num_bytes) / DECADES, 0.0), 1.0))


def _cells(traffic: RankTraffic, cell: float) -> Iterator[Mark]:
    matrix = traffic.matrix
    most, hair = float(matrix.max(initial=0.0)), 0.6 if cell >= 8.0 else 0.0
    places = np.argwhere(matrix).tolist()
    rects = []
    for sender, receiver in places:
        x, y = LEFT + receiver * cell, TOP + sender * cell
        color = color_of(float(matrix[sender, receiver]), most)
        title = _hover(traffic, sender, receiver) if len(places) <= 4096 else ""
        rects.append(Rect(x, y, cell - hair, cell - hair, color, title, crisp=not hair))
    yield from sorted(rects, key=lambda rect: rect.fill)


def _hover(traffic: RankTraffic, sender: int, receiver: int) -> str:
    sent = [(float(matrix[sender, receiver]), axis) for axis, matrix in traffic.matrices.items()]
    parts = [f"{axis} {format_bytes(num_bytes)}" for num_bytes, axis in sorted(sent, reverse=True) if num_bytes]
    return f"{_name(traffic, sender)} to {_name(traffic, receiver)}: {', '.join(parts)}"


def _name(traffic: RankTraffic, unit: int) -> str:
    first = traffic.first_of(unit)
    if traffic.ranks_per_unit == 1:
        return f"rank {first}"
    nodes = traffic.ranks_per_unit // traffic.devices_per_node
    return f"node {first}" if nodes == 1 else f"nodes {first}-{first + nodes - 1}"


def _borders(traffic: RankTraffic, cell: float) -> Iterator[Mark]:
    """Lines between nodes, or between racks where rows are nodes."""
    block = traffic.devices_per_node if traffic.ranks_per_unit == 1 else traffic.ranks_per_rack
    if traffic.ranks_per_unit > 1 and traffic.num_racks == 1:
        return
    step, side = cell * block / traffic.ranks_per_unit, cell * traffic.num_units
    for number in range(1, math.ceil(traffic.num_ranks / block)):
        at = number * step
        yield Line(((LEFT + at, TOP), (LEFT + at, TOP + side)), palette.RULE, 0.8)
        yield Line(((LEFT, TOP + at), (LEFT + side, TOP + at)), palette.RULE, 0.8)


def _names(traffic: RankTraffic, cell: float) -> Iterator[Mark]:
    """Numbers of senders at the left and of receivers above, as many as there is room for."""
    widest = text_width(f"{traffic.first_of(traffic.num_units - 1):,}", 9.5)
    every = 1
    while every * cell < widest + 8.0:
        every *= 2  # nodes and racks are mostly powers of two
    what = "rank" if traffic.ranks_per_unit == 1 else "node"
    for unit in range(0, traffic.num_units, every):
        middle, label = (unit + 0.5) * cell, f"{traffic.first_of(unit):,}"
        yield Text(LEFT - 6.0, TOP + middle + 3.4, label, 9.5, palette.MUTED, "end")
        yield Text(LEFT + middle, TOP - 6.0, label, 9.5, palette.MUTED, "middle")
    yield Text(EDGE, TOP - 6.0, f"from {what}", 10.5, palette.INK)
    yield Text(LEFT, TOP - 22.0, f"to {what}", 10.5, palette.INK)


def _scale(traffic: RankTraffic, left: float) -> Iterator[Mark]:
    """What the colours mean, from the most down."""
    most = float(traffic.matrix.max(initial=0.0))
    if not most:
        yield Text(left, TOP + 12.0, "nothing is sent", 11.0, palette.INK)
        return
    yield Text(left, TOP + 10.0, "bytes a step from one to the other", 11.0, palette.INK)
    for step in range(64):
        yield Rect(left + step * 5.0, TOP + 20.0, 5.0, 12.0, palette.ramp(1.0 - step / 63), crisp=True)
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        less = "at most " if share == 0 else ""
        label = less + format_bytes(most / 10 ** (DECADES * (1 - share)))
        yield Text(left + 320.0 * share, TOP + 46.0, label, 9.5, palette.MUTED, anchor)  # type: ignore[arg-type]


def _table(traffic: RankTraffic, left: float, top: float) -> Iterator[Mark]:
    """What each axis sends a step, how much of it leaves its node, and the most that one rank sends."""
    header = ("axis", "all ranks", "to other nodes", "most of a rank")
    for (x, anchor), text in zip(COLUMNS, header, strict=True):
        yield Text(left + x, top, text, 9.5, palette.MUTED, anchor)  # type: ignore[arg-type]
    yield Line(((left, top + 6.0), (left + 330.0, top + 6.0)), palette.RULE, 1.0)
    for row, axis in enumerate(traffic.axes, start=1):
        away = f"{axis.between_nodes_bytes / axis.num_bytes:.0%}" if axis.num_bytes else "0%"
        cells = (axis.name, format_bytes(axis.num_bytes), away, format_bytes(axis.most_of_rank_bytes))
        for (x, anchor), text in zip(COLUMNS, cells, strict=True):
            yield Text(left + x, top + 4.0 + 18.0 * row, text, 11.0, palette.INK, anchor)  # type: ignore[arg-type]
