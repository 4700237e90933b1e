"""One run at a time in a folder of checkpoints: two that save and remove there would undo each other's work."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...core.base.errors import PlanError
from ..transport.base import Group
from ..transport.gather_values import gather_values

LOCK_FILE = ".lock"
"""In the folder while a run uses it; says who that is, as JSON: `host`, `pid`, and `since`,
seconds of the Unix epoch."""


@contextmanager
def locked(folder: Path, world: Group, device: torch.device) -> Iterator[None]:
    """Holds the folder for the ranks of `world`, which call this together; makes it where it is not there. Raises
    `PlanError` on every rank where another run holds it.

    Rank 0 has the lock (`flock`), which the kernel gives back however its process ends, so a run that was killed locks
    nobody out. Runs on other hosts see it as far as their shared file system carries locks: NFS does from Linux 2.6.12
    on; Lustre where it is mounted with `flock`. Where a file system has no locks at all, nothing is locked.
    """
    refused, descriptor = "", -1
    if world.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _take(folder / LOCK_FILE)
        if descriptor == -1:
            refused = _refusal(folder)
    try:
        refused = gather_values(world, refused, device)[0]
        if refused:
            raise PlanError(str(refused))
        yield
    finally:
        if descriptor >= 0:
            (folder / LOCK_FILE).unlink(missing_ok=True)
            os.close(descriptor)


def _take(path: Path) -> int:
    """A descriptor that holds the lock, -1 where another run has it, and -2 where the file system has no locks."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return -1
        except OSError:
            os.close(descriptor)
            return -2
        if _is_still_there(path, descriptor):
            os.ftruncate(descriptor, 0)
            os.write(
                descriptor,
                json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": int(time.time())}).encode(),
            )
            return descriptor
        os.close(descriptor)


def _is_still_there(path: Path, descriptor: int) -> bool:
    """False where the run before has removed the file in between."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _refusal(folder: Path) -> str:
    """Who has the lock, as far as it has said."""
    try:
        with (folder / LOCK_FILE).open("rb") as file:
            holder: Any = json.loads(file.read(4096))
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(int(holder["since"])))
        who = f"the run of process {int(holder['pid'])} on host {str(holder['host'])[:80]!r}, since {since}"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        who = "another run"
    return f"checkpoint.folder={str(folder)!r} is in use by {who}. Wait for it to end, or use another folder."
