"""Where every lane of every rank is, written so that others can read it while the rank works, hangs, or after it was killed.

A `Board` is a file that the starter of ranks and all of them map into memory: a rank's own words outlive it, and reading them asks nothing
of a rank that may not answer any more. Writing one costs a microsecond. `halt` makes the explanation of what is read here.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from ...core.timeline import COMPUTE_LANE

State = Literal["runs", "waits", "done"]

BACKWARD_LANE = "backward"
"""The lane of the backward part of a pair that runs in turns with its forward part, which is on the compute lane (`overlap`)."""

MAX_LANES = 32
"""Lanes of a rank that a board has room for: compute, dp, and four for every neighbour of the pipeline, of which there are two or three."""
RECORD_BYTES = 192


class LaneAt(NamedTuple):
    """Where one lane is: it `runs` an action, `waits` before it, or is `done` with the row.

    `number` of `total` counts the actions of the lane in one walk over the row, from 1; `phase` names the walk (`step 3`). A compute lane
    that waits needs what `needs` makes on global rank `peer` (its own rank for one of its lanes, as `lane dp`).
    """

    lane: str
    phase: str
    state: State
    action: str
    number: int
    total: int
    needs: str = ""
    peer: int = -1

    def to_record(self) -> bytes:
        """The bytes on a board, cut where they are too long."""
        return "\t".join(map(str, self)).encode()[:RECORD_BYTES]

    @classmethod
    def from_record(cls, record: bytes) -> LaneAt | None:
        """The inverse of `to_record`; None for an empty record, and for one that was read while it was being written.

        >>> LaneAt.from_record(LaneAt("F<0", "step 1", "runs", "1RECV_F2", 3, 8).to_record()).action
        '1RECV_F2'
        """
        words = record.rstrip(b"\0").decode(errors="replace").split("\t")
        try:
            lane, phase, state, action, number, total, needs, peer = words
            return cls(lane, phase, state, action, int(number), int(total), needs, int(peer))  # type: ignore[arg-type]
        except ValueError:
            return None


class Board:
    """The lanes of `world_size` ranks in a file of a fixed size. Whoever makes it comes before those that open it."""

    def __init__(self, path: str | Path, world_size: int, *, create: bool = False):
        self.path, self.world_size = Path(path), world_size
        size = world_size * MAX_LANES * RECORD_BYTES
        descriptor = os.open(self.path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        try:
            if create:
                os.ftruncate(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    def write(self, global_rank: int, slot: int, place: LaneAt) -> None:
        """Shows where a lane is; its slot is its number among the rank's lanes."""
        first = (global_rank * MAX_LANES + slot) * RECORD_BYTES
        self._map[first : first + RECORD_BYTES] = place.to_record().ljust(RECORD_BYTES, b"\0")

    def lanes(self, global_rank: int) -> tuple[LaneAt, ...]:
        """Where the lanes of a rank are. Empty for a rank that has not begun to walk over a row."""
        first = global_rank * MAX_LANES * RECORD_BYTES
        records = (first + slot * RECORD_BYTES for slot in range(MAX_LANES))
        return tuple(filter(None, (LaneAt.from_record(self._map[at : at + RECORD_BYTES]) for at in records)))

    def write_row(self, global_rank: int, row: Iterable[object]) -> None:
        """Keeps a rank's row of the schedule beside the board."""
        self._row_file(global_rank).write_text(" ".join(map(str, row)))

    def row(self, global_rank: int) -> tuple[str, ...]:
        """The rank's row; empty for a rank that has written none."""
        file = self._row_file(global_rank)
        return tuple(file.read_text().split()) if file.exists() else ()

    def content(self) -> bytes:
        """All of it: the same bytes twice mean that no lane of any rank has moved."""
        return self._map[:]

    def remove(self) -> None:
        """Takes the files away; those who have the board open go on seeing each other."""
        for file in (self.path, *map(self._row_file, range(self.world_size))):
            file.unlink(missing_ok=True)

    def _row_file(self, global_rank: int) -> Path:
        return self.path.with_name(f"{self.path.name}-row{global_rank}")


class Place:
    """One lane's line on a board."""

    def __init__(self, watch: RankWatch, slot: int, lane: str, total: int):
        self._watch, self._slot, self._lane, self._total = watch, slot, lane, total
        self._number = 0

    def comes_to(self, number: int) -> None:
        """The lane's next action is that of this number, counted from 1."""
        self._number = number

    def waits(self, action: object, *, needs: str = "", peer: int = -1) -> None:
        """The lane waits before `action`."""
        self._show("waits", action, needs, peer)

    def runs(self, action: object) -> None:
        """The lane has begun `action`."""
        self._show("runs", action)

    def done(self) -> None:
        """The lane has no action left."""
        self._show("done", "")

    def _show(self, state: State, action: object, needs: str = "", peer: int = -1) -> None:
        place = LaneAt(self._lane, self._watch.phase, state, str(action), self._number, self._total, needs, peer)
        self._watch.show(self._slot, place)


class RankWatch:
    """One rank's part of a board; without a board it shows nothing. `phase` names what the row is walked for."""

    def __init__(self, global_rank: int = 0, board: Board | None = None):
        self.phase = ""
        self._global_rank, self.board = global_rank, board
        self._slots: dict[str, int] = {}

    def walks(self, row: Iterable[object]) -> None:
        """The row that the compute lane walks over, for those who look up what a rank has still to do."""
        if self.board is not None:
            self.board.write_row(self._global_rank, row)

    def place(self, lane: str = COMPUTE_LANE, total: int = 0) -> Place:
        """The line of a lane of `total` actions; the same one for the same name."""
        return Place(self, self._slots.setdefault(lane, len(self._slots)), lane, total)

    def show(self, slot: int, place: LaneAt) -> None:
        """Writes a lane's line, as far as there is room."""
        if self.board is not None and slot < MAX_LANES:
            self.board.write(self._global_rank, slot, place)
