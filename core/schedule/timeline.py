"""`Timeline`: what ran when, on which rank and lane. A prediction and a measurement have the same form."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, SupportsIndex, get_args, overload

import numpy as np

from ..base.errors import FileError, ScheduleError, TimelineError
from ..base.files import read_packed, write_bytes
from ..base.names import is_plain
from ..base.parsing import parse_json
from ..base.services import service
from .action import Action, ActionArray, Kind

FORMAT = "shardproof-timeline"
VERSION = 1

COMPUTE_LANE = "compute"
"""The lane of F, B, I, W, OVERLAP_F_B and STEP. Other lanes: `F>1` sends activations to pipeline rank 1, `F<0` receives
them from rank 0, `B>0` and `B<1` are the same for gradients, `dp` holds REDUCE_GRAD, UNSHARD and RESHARD. Where the
parts of a pair run in turns, a measured step has their collectives too: `F:ep` those of the forward over axis ep,
`B:tp` those of the backward over tp."""

Source = Literal["predicted", "measured"]
"""Where a timeline comes from."""


def message_lane(direction: Literal["F", "B"], sending: bool, peer: int) -> str:
    """The communication lane for one peer and direction; `peer` is a pipeline rank.

    >>> message_lane("F", True, 1), message_lane("B", False, 1)
    ('F>1', 'B<1')
    """
    return f"{direction}{'>' if sending else '<'}{peer}"


def collective_lane(part: Action, axis: str) -> str:
    """The lane of the collectives over an axis that one part of a pair waits for.

    >>> collective_lane(Action.from_str("2F3"), "ep")
    'F:ep'
    """
    return f"{'F' if part.kind is Kind.F else 'B'}:{axis}"


def holds_parts(lane: str) -> bool:
    """True for the lane of a `collective_lane`: what it shows are parts of actions of the compute lane.

    >>> holds_parts("F:ep"), holds_parts("F>1")
    (True, False)
    """
    return ":" in lane


@dataclass(frozen=True, slots=True)
class Span:
    """One action on one lane of one rank, in seconds from the start of the step."""

    global_rank: int
    lane: str
    action: Action
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class MemorySample:
    """Bytes held by one rank from `time_s` on, until its next sample."""

    global_rank: int
    time_s: float
    num_bytes: int


class Spans(Sequence[Span]):
    """Spans stored as columns; a `Span` is made when one is looked at."""

    def __init__(
        self,
        global_rank: np.ndarray,
        lane: np.ndarray,
        lanes: tuple[str, ...],
        actions: ActionArray,
        start_s: np.ndarray,
        end_s: np.ndarray,
    ):
        """`lane` indexes `lanes`; all arrays have one length."""
        self.global_rank = np.asarray(global_rank, dtype=np.int32)
        self.lane = np.asarray(lane, dtype=np.int32)
        self.lanes = tuple(lanes)
        self.actions = actions
        self.start_s = np.asarray(start_s, dtype=np.float64)
        self.end_s = np.asarray(end_s, dtype=np.float64)

    @classmethod
    def from_spans(cls, spans: Sequence[Span]) -> Spans:
        """Columns from objects."""
        lanes = tuple(dict.fromkeys(span.lane for span in spans))
        number = {lane: i for i, lane in enumerate(lanes)}
        return cls(
            np.array([span.global_rank for span in spans], dtype=np.int32),
            np.array([number[span.lane] for span in spans], dtype=np.int32),
            lanes,
            ActionArray.from_actions([span.action for span in spans]),
            np.array([span.start_s for span in spans]),
            np.array([span.end_s for span in spans]),
        )

    def __len__(self) -> int:
        return len(self.start_s)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> list[Span]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Span | list[Span]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        lane = self.lanes[self.lane[index]]
        return Span(
            int(self.global_rank[index]),
            lane,
            self.actions[index],
            float(self.start_s[index]),
            float(self.end_s[index]),
        )

    def __iter__(self) -> Iterator[Span]:
        rows = zip(
            self.global_rank.tolist(),
            self.lane.tolist(),
            self.actions,
            self.start_s.tolist(),
            self.end_s.tolist(),
            strict=True,
        )
        for global_rank, lane, action, start_s, end_s in rows:
            yield Span(global_rank, self.lanes[lane], action, start_s, end_s)


@dataclass(frozen=True)
class Timeline:
    """Spans of one step and memory over time; `source` distinguishes a prediction from a measurement."""

    spans: Spans
    source: Source
    memory: tuple[MemorySample, ...] = ()
    title: str = ""

    @classmethod
    def from_spans(
        cls,
        spans: Sequence[Span],
        source: Source,
        memory: Sequence[MemorySample] = (),
        title: str = "",
    ) -> Timeline:
        """A timeline from span objects, ordered by (rank, lane, start)."""
        ordered = sorted(spans, key=lambda span: (span.global_rank, span.lane, span.start_s, span.end_s))
        return cls(Spans.from_spans(ordered), source, tuple(memory), title)

    def _repr_svg_(self) -> str | None:
        """The Gantt chart, which notebooks show; None where there is nothing to draw."""
        return service("svg")(self) if self.makespan_s > 0 else None

    @property
    def makespan_s(self) -> float:
        """Seconds from zero to the end of the last span."""
        return float(self.spans.end_s.max()) if len(self.spans) else 0.0

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The ranks that have spans, ascending."""
        return tuple(int(rank) for rank in np.unique(self.spans.global_rank))

    def select(self, global_rank: int, lane: str = COMPUTE_LANE) -> list[Span]:
        """Spans of one rank and lane, by start time."""
        if lane not in self.spans.lanes:
            return []
        mask = (self.spans.global_rank == global_rank) & (self.spans.lane == self.spans.lanes.index(lane))
        chosen = np.flatnonzero(mask)
        return [self.spans[int(i)] for i in chosen[np.argsort(self.spans.start_s[chosen], kind="stable")]]

    def busy_s(self, global_rank: int) -> float:
        """Seconds in which the compute lane of a rank is occupied (spans of one lane never overlap)."""
        if COMPUTE_LANE not in self.spans.lanes:
            return 0.0
        mask = (self.spans.global_rank == global_rank) & (self.spans.lane == self.spans.lanes.index(COMPUTE_LANE))
        return float((self.spans.end_s[mask] - self.spans.start_s[mask]).sum())

    def idle_inside_s(self, global_rank: int) -> float:
        """Idle compute time of a rank between the start of its first and the end of its last forward or backward.

        The bubble of the zero-bubble papers, where every rank may start and step on its own; the largest over the ranks
        is that of the schedule. `bubble_fraction` also counts a rank's wait before its first and after its last action.
        Optimizer steps are left out.
        """
        if COMPUTE_LANE not in self.spans.lanes:
            return 0.0
        mask = (self.spans.global_rank == global_rank) & (self.spans.lane == self.spans.lanes.index(COMPUTE_LANE))
        mask &= self.spans.actions.kind != Kind.STEP
        if not mask.any():
            return 0.0
        start_s, end_s = self.spans.start_s[mask], self.spans.end_s[mask]
        return float(end_s.max() - start_s.min() - (end_s - start_s).sum())

    def bubble_fraction(self, global_rank: int) -> float:
        """Idle compute time of a rank over the makespan."""
        return 1.0 - self.busy_s(global_rank) / self.makespan_s if self.makespan_s else 0.0

    def to_json(self) -> str:
        """The recorded timeline format: one JSON object of columns, seconds and bytes unrounded, the same bytes
        for the same timeline."""
        spans, samples = self.spans, self.memory
        document = {
            "format": FORMAT,
            "version": VERSION,
            "source": self.source,
            "title": self.title,
            "lanes": list(spans.lanes),
            "spans": {
                "global_rank": spans.global_rank.tolist(),
                "lane": spans.lane.tolist(),
                "action": [str(action) for action in spans.actions],
                "start_s": spans.start_s.tolist(),
                "end_s": spans.end_s.tolist(),
            },
            "memory": {
                "global_rank": [int(sample.global_rank) for sample in samples],
                "time_s": [float(sample.time_s) for sample in samples],
                "num_bytes": [int(sample.num_bytes) for sample in samples],
            },
        }
        return json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, source: str = "timeline") -> Timeline:
        """The inverse of `to_json`. Raises `TimelineError` with every problem found; `source` begins it."""
        try:
            document = parse_json(text, source)
        except FileError as error:
            raise TimelineError(
                f"{error} A recorded timeline is what `shardproof train -o x.timeline.json` writes."
            ) from error
        problems = _problems(document)
        if problems:
            raise TimelineError(f"{source}: not a recorded timeline: " + "; ".join(problems) + ".")
        spans, memory = document["spans"], document["memory"]
        try:
            actions = ActionArray.from_actions([Action.from_str(cell) for cell in spans["action"]])
        except ScheduleError as error:
            raise TimelineError(f"{source}: not a recorded timeline: {error}") from error
        columns = (
            np.array(spans["global_rank"], np.int32),
            np.array(spans["lane"], np.int32),
            tuple(document["lanes"]),
            actions,
        )
        times = (np.array(spans["start_s"], np.float64), np.array(spans["end_s"], np.float64))
        samples = zip(memory["global_rank"], memory["time_s"], memory["num_bytes"], strict=True)
        return cls(
            Spans(*columns, *times), document["source"], tuple(MemorySample(*row) for row in samples), document["title"]
        )

    def save(self, path: str | Path) -> None:
        """Writes `to_json` to a file, compressed when its name ends in `.gz`; a half-written file is never
        seen under that name."""
        data = self.to_json().encode()
        if Path(path).suffix == ".gz":
            data = gzip.compress(data, mtime=0)  # without a time the same timeline gives the same bytes
        write_bytes(path, data)

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """The timeline in a file that `save` wrote. Raises `TimelineError`, which begins with the
        file's name, for any other."""
        try:
            text = read_packed(path)
        except FileError as error:
            raise TimelineError(str(error)) from error
        return cls.from_json(text, str(path))


LONGEST_S = 1e9
"""Of a step in a file, 32 years."""
SHORTEST_S = 1e-12


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= LONGEST_S  # type: ignore[operator]


def _is_number(most: int) -> Callable[[object], bool]:
    return lambda value: type(value) is int and 0 <= value <= most


_RANK = ("whole numbers of at least 0", _is_number(2**31 - 1))
_TIME = (f"numbers from 0 to {LONGEST_S:g}", _is_time)
_COLUMNS: dict[str, dict[str, tuple[str, Callable[[object], bool]]]] = {
    "spans": {
        "global_rank": _RANK,
        "lane": _RANK,
        "action": ("texts", lambda value: isinstance(value, str)),
        "start_s": _TIME,
        "end_s": _TIME,
    },
    "memory": {"global_rank": _RANK, "time_s": _TIME, "num_bytes": ("whole numbers of at least 0", _is_number(2**62))},
}
"""Table -> column -> what its values must be, in words and as a test."""


def _problems(document: Any) -> list[str]:
    """What keeps a JSON value from being a recorded timeline; empty when nothing does."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        return [f'the top level must be an object with "format": "{FORMAT}"']
    if document.get("version") != VERSION:
        return [f"version {document.get('version')!r} is unknown; this program reads version {VERSION}"]
    problems = []
    if document.get("source") not in get_args(Source):
        problems.append(f"source is {document.get('source')!r}, not 'predicted' or 'measured'")
    if not isinstance(document.get("title"), str) or not is_plain(document["title"]):
        problems.append("title must be text of one line")
    lanes = document.get("lanes")
    if not isinstance(lanes, list) or not all(isinstance(lane, str) and is_plain(lane) for lane in lanes):
        lanes = []
        problems.append("lanes must be a list of texts of one line")
    for table, columns in _COLUMNS.items():
        problems += _table_problems(table, document.get(table), columns)
    if not problems:
        spans = document["spans"]
        problems += [
            f"span {i} names lane {lane} of {len(lanes)}"
            for i, lane in enumerate(spans["lane"])
            if not 0 <= lane < len(lanes)
        ]
        ends = enumerate(zip(spans["start_s"], spans["end_s"], strict=True))
        problems += [
            f"span {i} ends at {end_s} s, before it starts at {start_s} s"
            for i, (start_s, end_s) in ends
            if not start_s <= end_s
        ]
        if spans["end_s"] and 0 < max(spans["end_s"]) < SHORTEST_S:
            problems.append(f"the step ends after {max(spans['end_s'])} s, before any clock ticks")
    return problems[:10]


def _table_problems(name: str, table: Any, columns: dict[str, tuple[str, Callable[[object], bool]]]) -> list[str]:
    if not isinstance(table, dict) or set(table) != set(columns):
        return [f"{name} must have the columns {', '.join(columns)}"]
    problems = []
    for column, (words, fits) in columns.items():
        values = table[column]
        if not isinstance(values, list):
            problems.append(f"{name}.{column} must be a list of {words}")
        elif (wrong := next((value for value in values if not fits(value)), None)) is not None or None in values:
            problems.append(f"{name}.{column} must be a list of {words}, and holds {wrong!r}")
    if not problems and len({len(table[column]) for column in columns}) != 1:
        problems.append(f"the columns of {name} have different lengths")
    return problems
