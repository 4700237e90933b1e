"""The nouns of a picture without pixels: boxes on tracks, tracks in rows, rows in panels. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...core.schedule.action import Kind
from .axis import Axis, TimeUnit
from .memory import MemoryPlot

Role = Literal["compute", "send", "receive", "collective"]


@dataclass(frozen=True, slots=True)
class Box:
    """One action, or (with `action` empty) a share of a bucket. `low` to `high` is the part of the
    track's height, from below."""

    start_s: float
    end_s: float
    kind: Kind
    chunk: int = 0
    label: str = ""
    action: str = ""
    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True, slots=True)
class Track:
    """One lane of a row. `name` is the timeline's lane, `end_s` the timeline's makespan, and `source` says which of two
    timelines that are drawn lane by lane it is of. Compute lanes have the idle share of their rank."""

    name: str
    role: Role
    boxes: tuple[Box, ...]
    end_s: float
    idle_fraction: float = 0.0
    source: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One rank (or several that share a row), and its tracks with the compute lane first."""

    name: str
    global_ranks: tuple[int, ...]
    tracks: tuple[Track, ...]

    @property
    def idle_fraction(self) -> float:
        """The idle share of its compute lane, of several ranks on average."""
        return self.tracks[0].idle_fraction


@dataclass(frozen=True, slots=True)
class Panel:
    """One timeline as actions or as shares. `axis` is in seconds, and longer than the makespan where a longer
    timeline is next to it."""

    heading: str
    makespan_s: float
    bubble_fraction: float
    bubble_rank: int
    axis: Axis
    rows: tuple[Row, ...]
    memory: MemoryPlot | None
    as_shares: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """What a colour means; `kind` None is idle time, `num_chunks` above 1 asks for one swatch per chunk."""

    kind: Kind | None
    name: str
    num_chunks: int = 1


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything a renderer needs. `num_chunks` is the largest number of stages on one rank."""

    title: str
    panels: tuple[Panel, ...]
    legend: tuple[LegendEntry, ...]
    num_chunks: int
    time_unit: TimeUnit
