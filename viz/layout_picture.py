"""Where ranks lie, on paper: for every axis all devices by node and rack, coloured by their place on the axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..core.layout.rank_map import MODULE, NOWHERE, AxisMap, RankMap, spread_text
from .picture import EDGE, Line, Mark, Picture, Rect, Text, text_width
from .scene import palette

SIZES = (40.0, 32.0, 26.0, 20.0, 16.0, 12.0, 9.0, 7.0, 5.0, 4.0, 3.0)
"""Sides of a device in pixels; the largest is taken with which all panels fit `HEIGHT`."""

HEIGHT = 900.0
NAMED_NODE, NAMED_PLACE, NAMED_RANK, RINGED, APART = 16.0, 12.0, 26.0, 12.0, 7.0
"""Sides from which on nodes are named, places and ranks written into devices, the first group has rings and not a
colour, and devices are apart."""

FIRST_GROUP = "#17c3c9"
"""Light and blue, as no place is."""

NARROWEST_PANEL = 300.0
"""Room for the heading of a panel."""

MOST_TITLES = 1024
"""Ranks up to which each says what it is when one points at it."""

MOST_SWATCHES = 16
HEADING, LEGEND, RACK_NAME, NODE_NAME = 40.0, 16.0, 15.0, 13.0
DIGIT = 0.66


@dataclass(frozen=True)
class Grid:
    """How devices lie on paper: nodes of `columns` devices a row, racks of `rack_columns` nodes a row, `across` racks
    a row. Lengths are pixels."""

    map: RankMap
    side: float
    width: float

    @property
    def columns(self) -> int:
        """Devices of a node next to each other."""
        return min(self.map.devices_per_node, 8, self.map.num_ranks)

    @property
    def node(self) -> tuple[float, float]:
        """Width and height of a node with its gap and, where there is room, its name."""
        rows = -(-min(self.map.devices_per_node, self.map.num_ranks) // self.columns)
        gap = max(2.0, self.side * 0.3)
        return self.columns * self.side + gap, rows * self.side + gap + self.name

    @property
    def name(self) -> float:
        """Height of a node's name."""
        return NODE_NAME if self.side >= NAMED_NODE else 0.0

    @property
    def rack_columns(self) -> int:
        """Nodes of a rack next to each other: as many as paper has of one rack, else about a square of them."""
        nodes, (wide, high) = self.map.nodes_per_rack, self.node
        most = max(1, int((self.width - 2 * EDGE) // wide))
        if self.map.num_racks == 1:
            return min(most, nodes)
        return min(most, nodes, max(1, round((nodes * high / wide) ** 0.5)))

    @property
    def rack(self) -> tuple[float, float]:
        """Width and height of a rack with its gap and name."""
        wide, high = self.node
        rows = -(-min(self.map.nodes_per_rack, self.map.num_nodes) // self.rack_columns)
        name = RACK_NAME if self.map.num_racks > 1 else 0.0
        return self.rack_columns * wide + 12.0, rows * high + name + 8.0

    @property
    def across(self) -> int:
        """Racks next to each other."""
        return max(1, min(self.map.num_racks, int((self.width - 2 * EDGE) // self.rack[0])))

    @property
    def height(self) -> float:
        """Of all racks with the heading."""
        return HEADING + -(-self.map.num_racks // self.across) * self.rack[1] + 10.0

    @property
    def panel(self) -> float:
        """Width of a panel with its gap."""
        return max(NARROWEST_PANEL, self.across * self.rack[0] + EDGE)

    @property
    def panels(self) -> int:
        """Panels next to each other."""
        return max(1, int((self.width - EDGE) // self.panel))

    @property
    def total(self) -> float:
        """Height of all panels."""
        return -(-len(self.map.axes) // self.panels) * self.height

    def rack_at(self, rack: int) -> tuple[float, float]:
        """Left and top of a rack."""
        row, column = divmod(rack, self.across)
        return column * self.rack[0], HEADING + row * self.rack[1]

    def node_at(self, node: int) -> tuple[float, float]:
        """Left and top of a node, where its name is."""
        rack, place = divmod(node, self.map.nodes_per_rack)
        x, y = self.rack_at(rack)
        row, column = divmod(place, self.rack_columns)
        name = RACK_NAME if self.map.num_racks > 1 else 0.0
        return x + column * self.node[0], y + name + row * self.node[1]

    def device_at(self, rank: int) -> tuple[float, float]:
        """Left and top of a rank's device."""
        node, device = divmod(rank, self.map.devices_per_node)
        x, y = self.node_at(node)
        row, column = divmod(device, self.columns)
        return x + column * self.side, y + self.name + row * self.side


def lay_out_map(found: RankMap, width: float = 1200.0) -> Picture:
    """The picture of a map, a panel for every axis."""
    grids = [Grid(found, side, width) for side in SIZES]
    grid = next((each for each in grids if each.total <= HEIGHT), grids[-1])
    title = f"Where ranks lie: {found.title}"
    marks: list[Mark] = [Text(EDGE, 30.0, title, 16.0, bold=True)]
    marks.append(Text(EDGE, 50.0, _what(found, grid), 11.0, palette.MUTED))
    for number, axis in enumerate(found.axes):
        row, column = divmod(number, grid.panels)
        origin = (EDGE + column * grid.panel, 66.0 + row * grid.height)
        marks += _heading(found, axis, origin)
        marks += _panel(found, axis, grid, origin)
    return Picture(width, round(70.0 + grid.total), tuple(marks), title)


def _what(found: RankMap, grid: Grid) -> str:
    """The machine, and how to read the picture."""
    nodes = f"{found.num_nodes:,} node{'s' if found.num_nodes > 1 else ''} of {found.devices_per_node} devices"
    racks = f" in {found.num_racks} racks of {found.nodes_per_rack} nodes" if found.num_racks > 1 else ""
    first = "ringed" if grid.side >= RINGED else "light blue"
    if not found.axes:
        return f"{nodes}{racks}. No axis has more than one place."
    return f"{nodes}{racks}. A colour is a place on the axis; {first} is the group of the first rank."


def _heading(found: RankMap, axis: AxisMap, origin: tuple[float, float]) -> Iterator[Mark]:
    """The axis, what its groups are, and the colours of its places."""
    left, top = origin
    yield Text(left, top + 12.0, axis.name, 13.0, bold=True)
    x = left + text_width(axis.name, 13.0) + 10.0
    yield Text(x, top + 12.0, spread_text(axis, found.num_racks), 11.0, palette.INK)
    places = range(axis.size)
    shown = [*places] if axis.size <= MOST_SWATCHES else [round(i * (axis.size - 1) / 63) for i in range(64)]
    side = 18.0 if axis.size <= MOST_SWATCHES else 3.0
    x = left
    for place in shown:
        color = _color(axis, place)
        yield Rect(x, top + 19.0, side, 12.0, color, crisp=True)
        if axis.size <= MOST_SWATCHES:
            yield Text(x + side / 2, top + 28.4, str(place), 9.0, palette.text_on(color), "middle")
        x += side
    said = "number of the module" if axis.name == MODULE else f"{axis.name} rank"
    said += f", 0 to {axis.size - 1}" if axis.size > MOST_SWATCHES else ""
    yield Text(x + 6.0, top + 28.6, said, 9.5, palette.MUTED)


def _color(axis: AxisMap, place: int) -> str:
    if place == NOWHERE:
        return palette.GRID
    return palette.ramp(place / (axis.size - 1))


def _panel(found: RankMap, axis: AxisMap, grid: Grid, origin: tuple[float, float]) -> Iterator[Mark]:
    """Racks, nodes and devices of one axis."""
    (left, top), side = origin, grid.side
    yield from _names(found, grid, origin)
    hair = 0.8 if side >= APART else 0.0
    marked = frozenset(axis.first) if side < RINGED else frozenset[int]()
    cells = []
    for rank, place in enumerate(axis.place.tolist()):
        x, y = grid.device_at(rank)
        color = FIRST_GROUP if rank in marked else _color(axis, place)
        title = _hover(found, rank) if found.num_ranks <= MOST_TITLES else ""
        cells.append(Rect(left + x, top + y, side - hair, side - hair, color, title, crisp=not hair))
    yield from cells if found.num_ranks <= MOST_TITLES else sorted(cells, key=lambda cell: cell.fill)
    if side >= RINGED:
        for rank in axis.first:
            yield from _ring(grid, rank, origin)
    if side >= NAMED_PLACE:
        for rank, place in enumerate(axis.place.tolist()):
            yield from _labels(axis, grid, rank, place, origin)


def _names(found: RankMap, grid: Grid, origin: tuple[float, float]) -> Iterator[Mark]:
    """Racks with their frames, and nodes."""
    for rack in range(found.num_racks if found.num_racks > 1 else 0):
        x, y = (start + place for start, place in zip(origin, grid.rack_at(rack), strict=True))
        yield Text(x, y + 10.0, f"rack {rack}", 9.0, palette.MUTED)
        right, below = x + grid.rack[0] - 9.0, y + grid.rack[1] - 6.0
        yield _frame(x - 3.0, y + RACK_NAME - 2.0, right, below, palette.RULE, 0.8)
    for node in range(found.num_nodes if grid.name else 0):
        x, y = (start + place for start, place in zip(origin, grid.node_at(node), strict=True))
        yield Text(x, y + 9.5, _node_name(found, grid, node), 9.0, palette.MUTED)


def _node_name(found: RankMap, grid: Grid, node: int) -> str:
    first = node * found.devices_per_node
    last = min(first + found.devices_per_node, found.num_ranks) - 1
    whole = f"node {node}: ranks {first}-{last}" if last > first else f"node {node}: rank {first}"
    return whole if text_width(whole, 9.0) <= grid.node[0] else f"node {node}"


def _labels(axis: AxisMap, grid: Grid, rank: int, place: int, origin: tuple[float, float]) -> Iterator[Mark]:
    """The place in the middle of a device, and above it the rank where there is room for both."""
    side = grid.side
    size = min(12.0, side * 0.5, (side - 2.0) / (DIGIT * len(str(axis.size - 1))))
    if place == NOWHERE or size < 5.5:
        return
    x, y = (start + at for start, at in zip(origin, grid.device_at(rank), strict=True))
    x, ink = x + side / 2, palette.text_on(_color(axis, place))
    with_rank = side >= NAMED_RANK and DIGIT * len(str(rank)) * 7.5 <= side - 6.0
    yield Text(x, y + side * (0.78 if with_rank else 0.5 + 0.36 * size / side), str(place), size, ink, "middle")
    if with_rank:
        yield Text(x, y + 10.5, str(rank), 7.5, ink, "middle")


def _ring(grid: Grid, rank: int, origin: tuple[float, float]) -> Iterator[Mark]:
    """Ink at the edge and paper inside of it: one of the two is seen on every colour."""
    x, y = (start + at for start, at in zip(origin, grid.device_at(rank), strict=True))
    side, width = grid.side - 0.8, min(1.6, grid.side * 0.08)
    for number, color in enumerate((palette.INK, palette.PAPER)):
        inset = (number + 0.5) * width
        yield _frame(x + inset, y + inset, x + side - inset, y + side - inset, color, width)


def _frame(left: float, top: float, right: float, bottom: float, color: str, width: float) -> Line:
    half = width / 2  # closes the corner
    corners = ((left, top), (right, top), (right, bottom), (left, bottom), (left, top - half))
    return Line(corners, color, width)


def _hover(found: RankMap, rank: int) -> str:
    places = ", ".join(f"{axis.name} {axis.place[rank]}" for axis in found.axes if axis.place[rank] != NOWHERE)
    node = rank // found.devices_per_node
    rack = f", rack {node // found.nodes_per_rack}" if found.num_racks > 1 else ""
    return f"rank {rank}: {places}; node {node}{rack}"
