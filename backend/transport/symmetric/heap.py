"""`SharedMemoryHeap`: memory of one process that others of this host map, and that is gone with the last of them.

The memory has no name in any folder (`memfd_create`), so nothing is left of it however its processes end. It is taken
from the system before it is used (`fallocate`): where there is too little the caller hears of it, and no later write
ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

try:
    from . import _shared_memory as compiled
except ImportError:  # no C compiler where the package was installed
    compiled = None  # type: ignore[assignment]

MEMORY_NAME = "shardproof-heap"
"""What the system calls the memory."""


@dataclass(frozen=True)
class Region:
    """A part of a process's heap, as others find it. `host` is equal for processes that can map each other's memory;
    `address` is where the process itself has it."""

    host: str
    process: int
    descriptor: int
    offset: int
    num_bytes: int
    address: int

    def to_json(self) -> dict[str, Any]:
        """For the store in which ranks look each other up."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(**value)


class Mapped:
    """Memory of a region in this process, from `address` on, as long as the object lives."""

    def __init__(self, descriptor: int, offset: int, num_bytes: int):
        self._map = mmap.mmap(descriptor, num_bytes, offset=offset)
        self.num_bytes = num_bytes
        self.view = (ctypes.c_char * num_bytes).from_buffer(self._map)
        self.address = ctypes.addressof(self.view)


class SharedMemoryHeap:
    """What one process shares with others. Raises `OSError` where the system has no such memory; only Linux has."""

    def __init__(self) -> None:
        self.host = this_host()
        self._descriptor = os.memfd_create(MEMORY_NAME)
        self._end = weakref.finalize(self, os.close, self._descriptor)
        self._size = 0
        self._lock = threading.Lock()  # lanes allocate for their channels

    def allocate(self, num_bytes: int) -> tuple[Region, Mapped]:
        """New memory, all zeros. Raises `OSError` where there is too little, and takes none then."""
        page = mmap.ALLOCATIONGRANULARITY
        whole = -(-num_bytes // page) * page
        with self._lock:
            offset = self._size
            try:
                os.posix_fallocate(self._descriptor, offset, whole)
            except OSError:
                os.ftruncate(self._descriptor, offset)
                raise
            self._size += whole
        mapped = Mapped(self._descriptor, offset, whole)
        return Region(self.host, os.getpid(), self._descriptor, offset, whole, mapped.address), mapped

    def close(self) -> None:
        """Lets go of the memory; what is mapped stays until it is let go of too."""
        self._end()


class Neighbour:
    """Another process of this host: its memory, and whether it lives. Raises `OSError` where it has ended."""

    def __init__(self, process: int):
        self.process = process
        self.alive = os.pidfd_open(process)
        self._end = weakref.finalize(self, os.close, self.alive)

    def map(self, region: Region) -> Mapped:
        """What the other process has allocated. Raises `OSError` where this one may not see it."""
        descriptor = os.open(f"/proc/{self.process}/fd/{region.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return Mapped(descriptor, region.offset, region.num_bytes)
        finally:
            os.close(descriptor)

    def can_read(self, region: Region) -> bool:
        """True where the system lets this process read all memory of the other (`process_vm_readv`)."""
        return bool(compiled.can_read(self.process, region.address))

    def close(self) -> None:
        """Looks at the process no more."""
        self._end()


def why_not_here(num_members: int) -> str:
    """Why a group of so many ranks of this host does not share memory; empty where it can."""
    if compiled is None:
        return "its package was installed without a C compiler"
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "the system is not Linux"
    if num_members > compiled.MOST_MEMBERS:
        return f"{num_members} members are more than {compiled.MOST_MEMBERS}"
    return ""


@cache
def this_host() -> str:
    """What processes must have in common to map each other's memory: the running system, where its processes have their
    numbers, and the user. Raises `OSError` elsewhere than on Linux."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    numbers = Path("/proc/self/ns/pid").readlink()
    return f"{boot} {numbers} {os.geteuid()}"
