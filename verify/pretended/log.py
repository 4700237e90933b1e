"""`Entry`: one line of what a process gave to the streams of its pretended devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """What a thread did. `kind` is `op` or `collective` (on `stream`, called `name`, of the memory that it reads and
    writes), `record` or `wait` of an event, `allocate`, `free` or `record_stream` of memory, a wait of the host from a
    `place` in our code, or the begin of a `step`. Memory and events have numbers that are used once. `label` says what
    the thread worked on."""

    kind: str
    thread: int
    stream: int
    name: str
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    label: str = ""
    place: str = ""


def read_log(path: Path) -> Iterator[Entry]:
    """The entries of a process, in order. Of one that was ended the last line may be a part of one, and is left out."""
    with path.open() as file:
        for line in file:
            if not line.endswith("\n"):
                return
            kind, thread, stream, name, reads, writes, label, place = line.rstrip("\n").split("\t")
            if kind == "allocate":
                writes = ""  # its bytes
            yield Entry(kind, int(thread), int(stream), name, _numbers(reads), _numbers(writes), label, place)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number not in ("", "0"))
