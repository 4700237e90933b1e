"""`Schedule`: per pipeline rank a sequence of actions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..base.errors import ScheduleError
from ..base.files import TABLE_BYTES, read_text
from ..base.services import service
from .action import PER_MICROBATCH, Action, ActionArray, Kind
from .csv import rows_from_csv, rows_to_csv
from .dependencies import dependency_graph
from .placement import Placement

if TYPE_CHECKING:
    import networkx


MOST_SHOWN = 100_000
"""Actions up to which a notebook draws a schedule by itself: a second or two."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """What every pipeline rank does in one step, in order. Immutable; built by `core.schedule` or read from CSV.

    `actions` holds all ranks' actions one rank after the other; rank r owns `actions[offsets[r]:offsets[r +
    1]]`. A schedule is *lowered* when it has its communication, gradient reductions and optimizer step;
    builders make compute-only ones.
    """

    name: str
    placement: Placement
    actions: ActionArray
    offsets: np.ndarray

    def __post_init__(self) -> None:
        if len(self.offsets) != self.placement.num_ranks + 1:
            raise ScheduleError(
                f"{self.name}: {len(self.offsets) - 1} rows for the {self.placement.num_ranks} ranks of the placement."
            )
        assert self.offsets[0] == 0 and self.offsets[-1] == len(self.actions), "offsets do not cover the actions"
        wrong = np.flatnonzero(_outside(self.actions, self.placement))
        if len(wrong):
            raise ScheduleError(
                f"{self.name}: {self.actions[wrong[0]]} does not fit {self.num_stages} stages x "
                f"{self.num_microbatches} microbatches, "
                "or lacks a microbatch, or has one that its kind does not take."
            )

    @classmethod
    def from_rows(cls, name: str, placement: Placement, rows: Sequence[Iterable[Action]]) -> Schedule:
        """A schedule from one list of actions per pipeline rank."""
        lists = [list(row) for row in rows]
        offsets = np.cumsum([0, *(len(row) for row in lists)])
        return cls(name, placement, ActionArray.from_actions([action for row in lists for action in row]), offsets)

    def _repr_svg_(self) -> str | None:
        """The Gantt chart with unit costs, which notebooks show; None for a schedule that cannot run, has nothing to
        draw, or more than `MOST_SHOWN` actions."""
        if not 0 < len(self.actions) <= MOST_SHOWN:
            return None
        try:
            timeline = service("run_schedule")(self)
        except ScheduleError:  # a cell that ends with a wrong schedule shows its text
            return None
        return service("svg")(timeline, time_unit="unit") if timeline.makespan_s > 0 else None

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return self.placement.num_stages

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step (of one data-parallel rank)."""
        return self.placement.num_microbatches

    @property
    def pp_rank(self) -> np.ndarray:
        """The pipeline rank of every action, as an int32 array next to the columns of `actions`."""
        return np.repeat(np.arange(self.num_ranks, dtype=np.int32), np.diff(self.offsets))

    @property
    def is_lowered(self) -> bool:
        """True when the optimizer step, which `lower` adds last, is there."""
        return bool((self.actions.kind == Kind.STEP).any())

    def row(self, pp_rank: int) -> ActionArray:
        """The actions of one pipeline rank, in order."""
        return self.actions.take(slice(int(self.offsets[pp_rank]), int(self.offsets[pp_rank + 1])))

    def rows(self) -> Iterator[ActionArray]:
        """The actions of every pipeline rank, in rank order."""
        return (self.row(pp_rank) for pp_rank in range(self.num_ranks))

    def __len__(self) -> int:
        return len(self.actions)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        same_shape = self.placement == other.placement and np.array_equal(self.offsets, other.offsets)
        return same_shape and self.actions == other.actions

    __hash__ = None  # type: ignore[assignment]

    def graph(self) -> networkx.DiGraph:
        """What every action waits for, as a graph of places `(pp_rank, place in its list)` (`dependency_graph`). It
        takes tens of microseconds an action: a tool for questions, not for simulation.

        >>> from shardproof import build, lower
        >>> graph = lower(build("1F1B", pp=2, num_microbatches=1)).graph()
        >>> [graph.nodes[place]["action"] for place in sorted(graph.predecessors((1, 2)))]
        ['1F0']
        """
        return dependency_graph([list(row) for row in self.rows()], self.placement)

    def to_csv(self, dialect: Literal["shardproof", "torch"] = "shardproof") -> str:
        """One line per rank, cells as in torch.distributed.pipelining. With `dialect="torch"` STEP is dropped and
        replicas are refused."""
        return rows_to_csv(self.placement, self.rows(), dialect)

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> Schedule:
        """The inverse of `to_csv`, for both dialects. All malformed cells are reported together
        in one `ScheduleError`."""
        return cls(name, *rows_from_csv(text, name))


def read_csv(path: str | Path) -> Schedule:
    """The schedule in a file, named after it. Raises `ScheduleError` as `from_csv` does, and `FileError` for a
    file that is no text."""
    return Schedule.from_csv(read_text(path, most_bytes=TABLE_BYTES), str(path))


def _outside(actions: ActionArray, placement: Placement) -> np.ndarray:
    """Mask of actions whose numbers are out of range, or given where the kind takes none (or the other way round)."""
    takes_microbatch = np.array([kind in PER_MICROBATCH for kind in Kind])[actions.kind]
    pair = actions.kind == Kind.OVERLAP_F_B
    outside = (
        (actions.stage < 0) | (actions.stage >= placement.num_stages) | (actions.pair_stage >= placement.num_stages)
    )
    outside |= (actions.microbatch >= placement.num_microbatches) | (
        actions.pair_microbatch >= placement.num_microbatches
    )
    outside |= (actions.microbatch >= 0) != takes_microbatch
    return outside | ((actions.pair_stage >= 0) != pair) | ((actions.pair_microbatch >= 0) != pair)
