"""Where every lane of every rank is, written so that others can read it while the rank works,
hangs, or after it was killed.

A `Board` is a file that the starter of ranks and all of them map into memory: a rank's own words outlive it, and
reading them asks nothing of a rank that may not answer any more. Writing one costs a microsecond. `halt` makes the
explanation of what is read here.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import stat
import struct
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from ...core.schedule.timeline import COMPUTE_LANE

State = Literal["runs", "waits", "done"]

BACKWARD_LANE = "backward"
"""The lane of the backward part of a pair that runs in turns with its forward part, which is on the
compute lane (`overlap`)."""

MAX_LANES = 32
"""Lanes of a rank that a board has room for: compute, dp, and four for every neighbour of the pipeline, of which
there are two or three."""
RECORD_BYTES = 192
ROW_HEAD = struct.Struct("<II")
"""What goes before a row on a board: whose it is, and how many bytes it takes."""
MEMORY_NAME = "shardproof-board"
"""What the system calls the memory of a board that has no file."""


class LaneAt(NamedTuple):
    """Where one lane is: it `runs` an action, `waits` before it, or is `done` with the row.

    `number` of `total` counts the actions of the lane in one walk over the row, from 1; `phase` names the walk
    (`step 3`). A compute lane that waits needs what `needs` makes on global rank `peer` (its own rank for one of
    its lanes, as `lane dp`).
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
    """The lanes of `world_size` ranks in a file: first a record per lane, which are mapped into memory, then
    rows, which are appended.

    `create` makes one with a name, in a folder that nobody else may write; `nameless` one in memory that is gone with
    the last process that has it, and that other processes of this user open by its `address`. Whoever makes a board
    comes before those that open it.
    """

    def __init__(self, descriptor: int, world_size: int):
        """Takes over an open file. Raises `OSError` where it is another user's, no regular
        file, or of too few bytes."""
        self.world_size, self._descriptor = world_size, descriptor
        weakref.finalize(self, os.close, descriptor)
        self._lanes_bytes = world_size * MAX_LANES * RECORD_BYTES
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode) or found.st_size < self._lanes_bytes:
            raise OSError(errno.EPERM, f"no board of {world_size} ranks of this user")
        self._map = mmap.mmap(descriptor, self._lanes_bytes)

    @classmethod
    def create(cls, path: str | Path, world_size: int) -> Board:
        """A new file. Raises `OSError` where something of that name exists, a link too."""
        return cls._sized(
            os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), world_size
        )

    @classmethod
    def open(cls, path: str | Path, world_size: int) -> Board:
        """What `create` has made. Raises `OSError` where that is not there, or a link."""
        return cls(os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW), world_size)

    @classmethod
    def nameless(cls, world_size: int) -> Board:
        """A new board in memory. Raises `OSError` where the system has no such files; only Linux has."""
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        descriptor = os.memfd_create(MEMORY_NAME)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_RDWR | os.O_APPEND)
        return cls._sized(descriptor, world_size)

    @classmethod
    def at(cls, address: str, world_size: int) -> Board:
        """What `nameless` has made in a process of this machine. Raises `OSError` where there is no such board, or
        this process may not open it. An address from elsewhere cannot lead to a file: nothing but memory that is
        named as a board is opened."""
        if not re.fullmatch(r"\d{1,10} \d{1,10}", address):
            raise OSError(errno.EINVAL, f"no address of a board: {address[:40]!r}")
        link = "/proc/{}/fd/{}".format(*address.split())
        if str(Path(link).readlink()) != f"/memfd:{MEMORY_NAME} (deleted)":
            raise OSError(errno.EPERM, "no board", link)
        return cls(os.open(link, os.O_RDWR | os.O_APPEND), world_size)

    @classmethod
    def _sized(cls, descriptor: int, world_size: int) -> Board:
        os.ftruncate(descriptor, world_size * MAX_LANES * RECORD_BYTES)
        return cls(descriptor, world_size)

    @property
    def address(self) -> str:
        """Where other processes of this machine find a nameless board, as long as this process has it: its
        id and file descriptor."""
        return f"{os.getpid()} {self._descriptor}"

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
        """Keeps a rank's row of the schedule behind the lanes."""
        text = " ".join(map(str, row)).encode()
        # one call: rows of several ranks do not mix
        os.write(self._descriptor, ROW_HEAD.pack(global_rank, len(text)) + text)

    def row(self, global_rank: int) -> tuple[str, ...]:
        """The row that a rank has written last; empty for a rank that has written none."""
        found, at = b"", self._lanes_bytes
        while len(head := os.pread(self._descriptor, ROW_HEAD.size, at)) == ROW_HEAD.size:
            rank, length = ROW_HEAD.unpack(head)
            if rank == global_rank:
                found = os.pread(self._descriptor, length, at + ROW_HEAD.size)
            at += ROW_HEAD.size + length
        return tuple(found.decode().split())

    def content(self) -> bytes:
        """All lanes: the same bytes twice mean that no lane of any rank has moved."""
        return self._map[:]


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
