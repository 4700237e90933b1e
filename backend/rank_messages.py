"""What `launch` and its ranks tell each other. No torch here: the starter of ranks does not need it."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TransportName = Literal["gloo", "nccl", "memory"]

RANK_ENDED = struct.Struct("<ii")
"""What the server of ranks reports on a pool's lifeline: the rank's number there, and its exit code (minus the signal that killed it)."""

RANK_VARIABLE = "SHARDPROOF_RANK"
"""Set in every rank process, so that a script which starts ranks while it is imported by one is noticed."""


@dataclass(frozen=True)
class Job:
    """One job for one rank process. `call` is the pickled `(job, payload)`.

    `modules` are the files of the modules that `call` names, for those that cannot be imported by name here; `main` is what
    `multiprocessing` needs to load the starter's script, when `call` refers to it. Ranks find each other through `store_file`.
    """

    transport: TransportName
    global_rank: int
    world_size: int
    store_file: str
    modules: Mapping[str, str]
    main: Mapping[str, str] | None
    call: bytes


@dataclass(frozen=True)
class Failure:
    """How a job failed on a rank. `by_peer` is true when the rank only noticed that another one was gone."""

    global_rank: int
    summary: str
    trace: str
    error: bytes
    by_peer: bool


@dataclass(frozen=True)
class Whereabouts:
    """What one rank is doing now: the transport calls its threads wait in, and the innermost line of its own thread."""

    waits: tuple[str, ...]
    at: str
