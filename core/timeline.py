"""`Timeline`: what ran when, on which rank and lane. A prediction and a measurement have the same form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .action import Action, ActionArray

COMPUTE_LANE = "compute"
"""The lane of F, B, I, W, OVERLAP_F_B and STEP. Other lanes: `F>1` sends activations to pipeline rank 1, `F<0` receives them from
rank 0, `B>0` and `B<1` are the same for gradients, `dp` holds REDUCE_GRAD, UNSHARD and RESHARD."""


def message_lane(direction: Literal["F", "B"], sending: bool, peer: int) -> str:
    """The communication lane for one peer and direction; `peer` is a pipeline rank.

    >>> message_lane("F", True, 1), message_lane("B", False, 1)
    ('F>1', 'B<1')
    """
    return f"{direction}{'>' if sending else '<'}{peer}"


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

    def __init__(self, global_rank: np.ndarray, lane: np.ndarray, lanes: tuple[str, ...], actions: ActionArray, start_s: np.ndarray, end_s: np.ndarray):
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

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return Span(
            int(self.global_rank[index]), self.lanes[self.lane[index]], self.actions[index], float(self.start_s[index]), float(self.end_s[index])
        )

    def __iter__(self) -> Iterator[Span]:
        rows = zip(self.global_rank.tolist(), self.lane.tolist(), self.actions, self.start_s.tolist(), self.end_s.tolist(), strict=True)
        for global_rank, lane, action, start_s, end_s in rows:
            yield Span(global_rank, self.lanes[lane], action, start_s, end_s)


@dataclass(frozen=True)
class Timeline:
    """Spans of one step and memory over time; `source` tells a prediction from a measurement."""

    spans: Spans
    source: Literal["predicted", "measured"]
    memory: tuple[MemorySample, ...] = ()
    title: str = ""

    @classmethod
    def from_spans(cls, spans: Sequence[Span], source: Literal["predicted", "measured"], memory: Sequence[MemorySample] = (), title: str = "") -> Timeline:
        """A timeline from span objects, ordered by (rank, lane, start)."""
        ordered = sorted(spans, key=lambda span: (span.global_rank, span.lane, span.start_s, span.end_s))
        return cls(Spans.from_spans(ordered), source, tuple(memory), title)

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

    def bubble_fraction(self, global_rank: int) -> float:
        """Idle compute time of a rank over the makespan."""
        return 1.0 - self.busy_s(global_rank) / self.makespan_s if self.makespan_s else 0.0
