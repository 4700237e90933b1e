"""Memory by component and rank on paper and in characters: what each rank holds at its peak, and which action runs
then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..core.base.terminal import table
from ..core.base.units import format_bytes
from .picture import EDGE, Line, Mark, Picture, Rect, Text, text_width
from .scene import palette
from .scene.axis import bytes_axis

LEFT, RIGHT, TOP = 84.0, 190.0, 92.0
LINES = ((16, 30.0), (32, 22.0), (64, 15.0))
"""Most ranks, and pixels of the line that each has then; more have `THIN`."""
THIN = 11.0

LIMIT_SEEN = 5.0
"""Times the largest peak up to which what is usable is on the axis: bars of less would hardly be seen."""


@dataclass(frozen=True)
class RankBar:
    """What one rank holds at its peak, in bytes by component, and what runs then ("" for what lasts all the step)."""

    global_rank: int
    components: Mapping[str, int]
    action: str

    @property
    def peak_bytes(self) -> int:
        """All components."""
        return sum(self.components.values())


@dataclass(frozen=True)
class MemoryBars:
    """The bars of all simulated ranks, and what is usable of a device."""

    title: str
    capacity_bytes: int
    bars: tuple[RankBar, ...]

    @property
    def components(self) -> tuple[str, ...]:
        """Components that some rank holds, in the order in which they are stacked."""
        return tuple(name for name in self.bars[0].components if any(bar.components[name] for bar in self.bars))

    def report(self) -> dict[str, Any]:
        """The JSON form."""
        ranks = [
            {
                "global_rank": bar.global_rank,
                "peak_memory_bytes": bar.peak_bytes,
                "peak_action": bar.action,
                "components": dict(bar.components),
            }
            for bar in self.bars
        ]
        return {"title": self.title, "capacity_bytes": self.capacity_bytes, "per_rank": ranks}


def bars_of(simulation: Any) -> MemoryBars:
    """The bars of a `simulator.step.step.Simulation`."""
    bars = tuple(
        RankBar(rank, each.components(), each.peak_action)
        for rank, each in zip(simulation.global_ranks, simulation.memory, strict=True)
    )
    return MemoryBars(simulation.timeline.title, simulation.report["capacity_bytes"], bars)


def lay_out_bars(found: MemoryBars, width: float = 1200.0) -> Picture:
    """The picture of the bars, with the line of what is usable."""
    line = next((pixels for most, pixels in LINES if len(found.bars) <= most), THIN)
    most = max(bar.peak_bytes for bar in found.bars)
    sees_limit = found.capacity_bytes < LIMIT_SEEN * most
    axis = bytes_axis(max(most, found.capacity_bytes if sees_limit else 0) * 1.02, 8)
    scale, base = (width - LEFT - RIGHT) / axis.end, TOP + line * len(found.bars)
    title = f"Memory of each rank at its peak: {found.title}"
    marks: list[Mark] = [Text(EDGE, 30.0, title, 16.0, bold=True), *_legend(found)]
    for tick in axis.ticks:
        x = LEFT + tick.value * scale
        marks.append(Line(((x, TOP - 4.0), (x, base + 4.0)), palette.GRID, 1.0))
        marks.append(Text(x, base + 17.0, tick.label, 10.0, palette.MUTED, "middle"))
    marks.append(Text(width - RIGHT + 12.0, base + 17.0, f"bytes held ({axis.unit})", 10.0, palette.MUTED))
    for row, bar in enumerate(found.bars):
        marks += _bar(found, bar, TOP + row * line, line, scale)
        middle, size = TOP + (row + 0.5) * line, min(11.0, line * 0.62)
        marks.append(Text(EDGE, middle + size * 0.36, f"rank {bar.global_rank}", size, palette.INK))
        said = format_bytes(bar.peak_bytes) + (f" during {bar.action}" if bar.action else "")
        marks.append(Text(width - RIGHT + 12.0, middle + size * 0.36, said, size, palette.INK))
    marks += _limit(found.capacity_bytes, LEFT + found.capacity_bytes * scale if sees_limit else None, width, base)
    return Picture(width, round(base + 32.0), tuple(marks), title)


def _limit(capacity_bytes: int, x: float | None, width: float, base: float) -> Iterator[Mark]:
    """The line of what is usable, or, where it is far away, its number alone."""
    said = f"usable: {format_bytes(capacity_bytes)}" + ("" if x is not None else ", beyond this axis")
    yield Text(width - RIGHT if x is None else x, TOP - 12.0, said, 10.0, palette.LIMIT, "end")
    if x is not None:
        yield Line(((x, TOP - 8.0), (x, base)), palette.LIMIT, 1.6, dashed=True)


def _legend(found: MemoryBars) -> Iterator[Mark]:
    x = EDGE
    for name in found.components:
        yield Rect(x, 45.0, 12.0, 11.0, palette.COMPONENTS[name], crisp=True)
        yield Text(x + 17.0, 54.0, name, 10.5, palette.INK)
        x += 17.0 + text_width(name, 10.5) + 16.0


def _bar(found: MemoryBars, bar: RankBar, top: float, line: float, scale: float) -> Iterator[Mark]:
    """The components next to each other, each with its bytes where they fit."""
    gap = min(6.0, line * 0.2)
    x, labels = LEFT, list[Mark]()
    for name in found.components:
        num_bytes, fill = bar.components[name], palette.COMPONENTS[name]
        wide, said = num_bytes * scale, format_bytes(num_bytes)
        title = f"rank {bar.global_rank}: {name} {said}"
        if num_bytes:
            yield Rect(x, top + gap / 2, wide, line - gap, fill, title)
        if line >= 15.0 and text_width(said, 9.5) <= wide - 4.0:
            place = (x + wide / 2, top + line / 2 + 9.5 * 0.36)
            labels.append(Text(*place, said, 9.5, palette.text_on(fill), "middle"))
        x += wide
    yield from labels


def bars_text(found: MemoryBars, width: int = 100) -> str:
    """The bars as a table in lines of at most `width` characters."""
    rows = [("rank", "peak", "at", *found.components)]
    for bar in found.bars:
        parts = (format_bytes(bar.components[name]) for name in found.components)
        rows.append((str(bar.global_rank), format_bytes(bar.peak_bytes), bar.action or "all the step", *parts))
    said = f"usable of a device: {format_bytes(found.capacity_bytes)}"
    return "\n".join([f"Memory of each rank at its peak: {found.title}", said, "", *table(rows, width)]) + "\n"
