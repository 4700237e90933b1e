"""The messages of `launch` and its ranks. No torch here: the starter of ranks does not need it."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TransportName = Literal["shm", "gloo", "nccl", "kernels", "memory"]
"""shm: processes, through memory that the ranks of a host share and over gloo between hosts. gloo: processes over gloo
alone. nccl: one GPU per rank. kernels: the same, with our kernels in groups whose GPUs reach each other's memory.
memory: threads of one process."""

ON_GPUS: tuple[TransportName, ...] = ("nccl", "kernels")
"""Transports of which each rank has a GPU."""

RANK_ENDED = struct.Struct("<ii")
"""What the server of ranks reports on a pool's lifeline: the rank's number there, and its exit code (minus the
signal that killed it)."""

NAMES_LENGTH = struct.Struct("<i")
"""What goes before the names of modules that the server is to load, which are separated by spaces:
how many bytes they are."""

RANK_VARIABLE = "SHARDPROOF_RANK"
"""Set in every rank process, so that a script which starts ranks while it is imported by one is noticed."""


@dataclass(frozen=True)
class Job:
    """One job for one rank process. `call` is the pickled `(job, payload)`.

    `modules` are the files of the modules that `call` names, for those that cannot be imported by name here; `main` is
    what `multiprocessing` needs to load the starter's script, when `call` refers to it. Ranks find each other through
    `store_file`, and show where they are on the board in `board_file` (`pipeline.watch`). `folder` is where the starter
    is now: relative paths in `call` are its own, and the ranks were perhaps started elsewhere. `device` is where ranks
    that are threads compute. `stops` says that the job sees to `Transport.stop`: signals then ask for that.
    """

    transport: TransportName
    global_rank: int
    world_size: int
    store_file: str
    modules: Mapping[str, str]
    main: Mapping[str, str] | None
    call: bytes
    board_file: str
    folder: str
    device: str = "cpu"
    stops: bool = False


@dataclass(frozen=True)
class Failure:
    """How a job failed on a rank. `by_peer` is true when the rank only noticed that another one was gone, `is_defect`
    when nobody foresaw the exception, and no code but ours had a part in it."""

    global_rank: int
    summary: str
    trace: str
    error: bytes
    by_peer: bool
    is_defect: bool


@dataclass(frozen=True)
class Call:
    """A call of a group or channel that a thread is in. `ranks` are the members, or both ends,
    `own` the caller among them.

    `number` counts the calls of a group, which all members make in one order; None for a channel.
    """

    op: str
    name: str
    ranks: tuple[int, ...]
    own: tuple[int, ...]
    number: int | None


@dataclass(frozen=True)
class ThreadAt:
    """Where one thread of a rank is: in `call`, else at the line `at`. `lane` is the lane that it runs, or which of its
    rank's lanes it belongs to; `in_mail` is true where it waits for another lane of its rank."""

    lane: str
    call: Call | None
    in_mail: bool
    at: str


@dataclass(frozen=True)
class Whereabouts:
    """What one rank is doing now: the transport calls its threads wait in, the innermost line of its own
    thread, and every thread."""

    waits: tuple[str, ...]
    at: str
    threads: tuple[ThreadAt, ...] = ()
