"""A scene as text: coloured blocks for a terminal, or plain ASCII that survives logs, mails and screen readers.

Plain boxes read `F3--` (forward of microbatch 3) and `B3==`; a dot is idle. Where actions are thinner than a
character, plain letters appear as often as their kind takes time (error diffusion along the row), and colours split
a character by its two largest shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..core.base.terminal import fitted
from ..core.base.units import format_bytes
from ..core.schedule.action import COMPUTE, Kind
from ..core.schedule.timeline import COMPUTE_LANE
from .scene import palette
from .scene.axis import Axis
from .scene.memory import MemoryCurve
from .scene.panels import Box, Panel, Row, Scene, Track

TEXT_WIDTH = 100
"""Characters of a line where nothing else is asked for and no terminal says its width."""

MARGIN = 18
"""Characters that names and numbers next to the plot take at least."""

LETTERS = {Kind.F: "F-", Kind.B: "B=", Kind.I: "I:", Kind.W: "W~", Kind.STEP: "S#"}
"""Plain form of a kind: its letter and what fills the rest of the box."""
WIRE = {Kind.SEND_F: ">", Kind.SEND_B: "<", Kind.REDUCE_GRAD: "R", Kind.UNSHARD: "U", Kind.RESHARD: "H"}
"""Plain form of what is drawn on the communication line under a rank; receives are the other end of the
sends and are left out."""
EIGHTHS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
IDLE_ANSI, WHITE_ANSI, BLACK_ANSI = 254, 231, 16


@dataclass(frozen=True, slots=True)
class Cell:
    """One character with its 256-colour foreground and background; None leaves the terminal's own."""

    char: str
    foreground: int | None = None
    background: int | None = None


def to_text(scene: Scene, *, width: int = 100, color: bool = False) -> str:
    """Lines of at most `width` characters, newline at the end. Without `color` only ASCII is used."""
    names = [row.name for panel in scene.panels for row in panel.rows]
    left = max(map(len, [*names, "memory"])) + 1
    sources = max(len(track.source) for panel in scene.panels for row in panel.rows for track in row.tracks)
    columns = _regular_columns(scene, max(width - left - 11 - sources - bool(sources), 10))
    lines = [fitted(scene.title, width)]
    for panel in scene.panels:
        lines += ["", *(fitted(words, width) for words in (panel.heading, *(f"({note})" for note in panel.notes)))]
        lines += _panel(scene, panel, left, columns, color)
    lines += ["", *_legend(scene, width, color)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _regular_columns(scene: Scene, columns: int) -> int:
    """Fewer columns where that makes all boxes of a schedule with commensurate durations a whole
    number of characters."""
    tracks = [
        track
        for panel in scene.panels
        if not panel.as_shares
        for row in panel.rows
        for track in row.tracks
        if _is_compute(track)
    ]
    boxes = [box for track in tracks for box in track.boxes]
    if not boxes:
        return columns
    unit_s = min(box.end_s - box.start_s for box in boxes)
    end_s = max(panel.axis.end for panel in scene.panels)
    is_regular = all(
        abs(time / unit_s - round(time / unit_s)) < 1e-6 for box in boxes for time in (box.start_s, box.end_s)
    )
    per_unit = int(columns * unit_s / end_s + 1e-9)
    return round(per_unit * end_s / unit_s) if is_regular and per_unit >= 1 else columns


def _panel(scene: Scene, panel: Panel, left: int, columns: int, color: bool) -> list[str]:
    scale = columns / panel.axis.end
    used = max(1, round(panel.makespan_s * scale))
    lines = []
    wires = {
        (row, track): _wire(row, track.source, scale, used, color)
        for row in panel.rows
        for track in row.tracks
        if _is_compute(track)
    }
    show_wires = any(cell.char != " " for wire in wires.values() for cell in wire)
    for row in panel.rows:
        compute = [track for track in row.tracks if _is_compute(track)]
        for track in compute:
            end = max(1, round(track.end_s * scale))
            cells = (
                _share_row(track, track.end_s, end, color) if panel.as_shares else _box_row(track, scale, end, color)
            )
            edge, pad = " " if color else "|", " " * (columns - end)
            name = row.name if track is compute[0] else ""
            source = f" {track.source}" if track.source else ""
            lines.append(f"{name:<{left}}{edge}{_paint(cells, color)}{edge}{pad}{track.idle_fraction:>6.1%}{source}")
        if show_wires:
            lines += [f"{'':<{left}} {_paint(wires[row, track], color)}" for track in compute]
    lines += [*_axis(panel.axis, left, columns), *_memory(panel, left, used, color)]
    return lines


def _is_compute(track: Track) -> bool:
    return track.name == COMPUTE_LANE


def _box_row(track: Track, scale: float, used: int, color: bool) -> list[Cell]:
    """Boxes as runs of characters; a pair that runs together is one box of both."""
    idle = Cell(" ", None, IDLE_ANSI) if color else Cell(".")
    cells = [idle] * used
    for index, box in enumerate(track.boxes):
        if box.high < 1.0:
            continue
        below = track.boxes[index + 1] if box.low > 0.0 else None
        first, last = _cells_of(box, scale, used)
        cells[first:last] = _coloured_box(box, below, last - first) if color else _plain_box(box, below, last - first)
    return cells


def _plain_box(box: Box, below: Box | None, length: int) -> list[Cell]:
    letter, filler = _letters(box)[0], _letters(box)[1]
    label = f"{letter}{box.label}" if box.kind in COMPUTE else letter
    if below is not None:
        label, filler = f"{label}{_letters(below)[0]}{below.label}", "+"
    if len(label) > length:
        label = letter
    return [Cell(char) for char in f"{label:{filler}<{length}}"[:length]]


def _coloured_box(box: Box, below: Box | None, length: int) -> list[Cell]:
    background = _ansi(box.kind, box.chunk)
    if below is not None:
        return [Cell("\u2580", background, _ansi(below.kind, below.chunk))] * length
    foreground = (
        WHITE_ANSI if palette.text_on(palette.fill(box.kind, box.chunk % 2, 2)) == palette.PAPER else BLACK_ANSI
    )
    label = f"\u258f{box.label}"
    if len(label) > length:
        label = box.label if len(box.label) == length else "\u258f"[: length - 1]
    return [Cell(char, foreground, background) for char in f"{label:<{length}}"]


def _share_row(track: Track, makespan_s: float, used: int, color: bool) -> list[Cell]:
    """A character per column of shares, read at the column's middle."""
    layers: list[list[Box]] = [[] for _ in range(used)]
    for box in track.boxes:
        first, last = (round(time / makespan_s * used) for time in (box.start_s, box.end_s))
        for column in range(first, last):
            layers[column].append(box)
    return [_split_cell(boxes) for boxes in layers] if color else _diffused(layers)


def _split_cell(boxes: Sequence[Box]) -> Cell:
    """The two largest of the kinds and idle time, the lower one as the foreground of an eighth block."""
    shares = [(box.high - box.low, _ansi(box.kind, box.chunk)) for box in boxes]
    shares.append((1.0 - sum(share for share, _ in shares), IDLE_ANSI))
    largest = sorted(sorted(range(len(shares)), key=lambda i: -shares[i][0])[:2])
    below, above = shares[largest[0]], shares[largest[-1]]
    eighths = round(8 * below[0] / (below[0] + above[0])) if len(largest) == 2 else 8
    return Cell(EIGHTHS[eighths], below[1], above[1])


def _diffused(layers: Sequence[Sequence[Box]]) -> list[Cell]:
    """Letters whose frequency along the row is the share of their kind: each column adds its shares to what
    is owed, and pays one."""
    owed: dict[str, float] = {}
    cells = []
    for boxes in layers:
        for box in boxes:
            letter = _letters(box)[0]
            owed[letter] = owed.get(letter, 0.0) + box.high - box.low
        owed["."] = owed.get(".", 0.0) + 1.0 - sum(box.high - box.low for box in boxes)
        present = {".", *(_letters(box)[0] for box in boxes)}
        char = max(sorted(present), key=lambda letter: owed[letter])
        owed[char] -= 1.0
        cells.append(Cell(char))
    return cells


def _wire(row: Row, source: str, scale: float, used: int, color: bool) -> list[Cell]:
    """Sends and collectives of a rank, in one of two timelines where there are two, on one line."""
    cells = [Cell(" ")] * used
    for track in row.tracks:
        for box in track.boxes if track.source == source and not _is_compute(track) else ():
            if box.kind in WIRE:
                first = min(int(box.start_s * scale), used - 1)
                last = max(first + 1, min(round(box.end_s * scale), used))  # even the shortest message is seen
                mark = Cell("\u2501", palette.ANSI[box.kind]) if color else Cell(WIRE[box.kind])
                cells[first:last] = [mark] * (last - first)
    return cells


def _axis(axis: Axis, left: int, columns: int) -> list[str]:
    """Tick marks with their labels starting under them."""
    marks, labels = [" "] * (columns + 1), ""
    for tick in axis.ticks:
        column = round(tick.value / axis.end * columns) if axis.end else 0
        if len(labels) > column or column + len(tick.label) > columns + 8 - len(axis.unit):
            continue
        marks[min(column, columns)] = "'"
        labels = f"{labels:<{column}}{tick.label} "
    return [f"{'':<{left}} {''.join(marks)}", f"{'':<{left}} {labels}{axis.unit}"]


def _memory(panel: Panel, left: int, used: int, color: bool) -> list[str]:
    """One strip per memory curve, its height in eighths of a character or in tenths as digits."""
    if panel.memory is None:
        return []
    top = panel.memory.axis.end
    levels = "part" if color else "tenths"
    lines = [f"{'memory':<{left}} {levels} of {format_bytes(top)} (rank {panel.memory.peak_rank})"]
    for curve in panel.memory.curves:
        maxima = _maxima(curve, panel.makespan_s, used)
        if color:
            cells = [Cell(EIGHTHS[round(8 * value / top)], palette.ANSI[Kind.REDUCE_GRAD]) for value in maxima]
        else:
            cells = [Cell(str(min(9, int(10 * value / top)))) for value in maxima]
        edge = " " if color else "|"
        name = f"rank {curve.global_rank}"
        lines.append(f"{name:<{left}}{edge}{_paint(cells, color)}{edge} {format_bytes(curve.peak_bytes)}")
    return lines


def _maxima(curve: MemoryCurve, makespan_s: float, used: int) -> list[float]:
    """The largest value in each of `used` columns."""
    maxima = [0.0] * used
    for (start, end), value in zip(pairwise(curve.times_s), curve.num_bytes, strict=True):
        first = min(int(start / makespan_s * used), used - 1)
        last = min(max(first, -int(-end / makespan_s * used // 1) - 1), used - 1)
        for column in range(first, last + 1):
            maxima[column] = max(maxima[column], value)
    return maxima


def _legend(scene: Scene, width: int, color: bool) -> list[str]:
    """What colours or letters mean, wrapped."""
    entries = []
    for entry in scene.legend:
        if entry.kind is None:
            entries.append((_paint([Cell(" ", None, IDLE_ANSI)] * 2, True) if color else ".", entry.name))
        elif entry.kind in LETTERS or entry.kind in WIRE:
            swatch = [
                Cell(" ", None, _ansi(entry.kind, chunk)) for chunk in range(min(entry.num_chunks, 2)) for _ in range(2)
            ]
            letters = LETTERS[entry.kind] if entry.kind in LETTERS else WIRE[entry.kind]
            entries.append((_paint(swatch, True) if color else letters, entry.name))
    if scene.num_chunks > 1 and not color:
        entries.append(("f b", "lower case: odd chunks"))
    lines, length = [""], 0
    for mark, name in entries:
        needed = len(name) + 7
        if length + needed > width and length:
            lines.append("")
            length = 0
        lines[-1] += f"{mark} {name}   "
        length += needed
    return lines


def _letters(box: Box) -> str:
    letters = LETTERS[box.kind]
    return letters.lower() if box.chunk % 2 else letters


def _ansi(kind: Kind, chunk: int) -> int:
    return palette.ANSI_LATER.get(kind, palette.ANSI[kind]) if chunk % 2 else palette.ANSI[kind]


def _cells_of(box: Box, scale: float, used: int) -> tuple[int, int]:
    return min(round(box.start_s * scale), used), min(round(box.end_s * scale), used)


def _paint(cells: Iterable[Cell], color: bool) -> str:
    """Characters, with escape codes only where the colour changes."""
    if not color:
        return "".join(cell.char for cell in cells)
    parts: list[str] = []
    current: tuple[int | None, int | None] = (None, None)
    for cell in cells:
        wanted = (cell.foreground, cell.background)
        if wanted != current:
            codes = (f";{layer};5;{value}" for layer, value in zip((38, 48), wanted, strict=True) if value is not None)
            parts.append(f"\x1b[0{''.join(codes)}m")
            current = wanted
        parts.append(cell.char)
    return "".join(parts) + ("\x1b[0m" if current != (None, None) else "")
