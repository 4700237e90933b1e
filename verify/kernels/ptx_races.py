"""Races inside a block: a thread reads or writes what another has written, or writes what another has read, and no
barrier of the block lies between.

A barrier of a warp is enough between threads of it. Threads that are carried out in step would not show a race: on a
device another warp may come later, or another thread of the warp. Atomics and instructions at multicast addresses are
left out, and so is what other blocks and ranks do.

Reads are noted in shared memory, and in that of launches that say so, from the first write to a region on. They are
not where a block may have fewer elements than threads: threads that are left read what others read and write, and
throw it away.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

Array = np.ndarray
WARP = 32


class BlockRace(RuntimeError):
    """Two threads of a block race. The message has both, and where."""


class Place(Protocol):
    """A region of memory: its size in bytes, and whether reads of it are noted."""

    name: str
    size: int
    notes_reads: bool


class Uses:
    """The last uses of each byte of a region, as numbers that say who and when, 0 for none: who wrote it, who read it
    last, and another thread that read it, of another warp where there is one."""

    def __init__(self, size: int):
        self.writes, self.reads, self.others = (np.zeros(size, np.int64) for _ in range(3))


class Races:
    """What the `num_threads` threads of a block have read and written since its last barrier.

    The number of a use is `_base`, 1, its thread and `num_threads` for each barrier of its warp since the last one of
    the block, all added up. `_base` grows with a barrier of the block so that older uses have smaller numbers.
    """

    def __init__(self, num_threads: int):
        self._num_threads = num_threads
        self._base = 0
        self._of_warp = np.zeros(num_threads, np.int64)
        self._uses: dict[int, Uses] = {}

    def barrier(self) -> None:
        """All threads have come to a barrier of the block."""
        self._base += (int(self._of_warp.max()) + 1) * self._num_threads
        self._of_warp[:] = 0

    def warp_barrier(self, threads: Array) -> None:
        """All threads of some warps, [warps, 32], have come to a barrier of their warp."""
        self._of_warp[threads] += 1

    def note(self, region: Place, threads: Array, offsets: Array, num_bytes: int, writes: bool) -> None:
        """Each of `threads` uses `num_bytes` from its one of `offsets` (uint64) on in a region. Raises `BlockRace`."""
        uses = self._uses.get(id(region))
        if uses is None:
            if not writes:
                return
            uses = self._uses[id(region)] = Uses(region.size)
        places = offsets.astype(np.int64)[:, None] + np.arange(num_bytes)
        own = np.broadcast_to(threads[:, None], places.shape)
        numbers = self._base + 1 + own + self._num_threads * self._of_warp[own]
        for kind, of_kind in (("writes", (uses.writes,)), ("reads", (uses.reads, uses.others)))[: 2 if writes else 1]:
            for last in of_kind:
                self._refuse(last[places], own, places, region.name, "writes" if writes else "reads", kind)
        if writes:
            uses.writes[places] = numbers
        elif region.notes_reads:
            self._read(uses, places, numbers)

    def _refuse(self, last: Array, own: Array, places: Array, name: str, does: str, did: str) -> None:
        """Raises `BlockRace` where another thread's use has that number and no barrier came after it."""
        recent = last > self._base
        if not recent.any():
            return
        thread, barriers = self._thread(last), (last - self._base - 1) // self._num_threads
        races = recent & (thread != own)
        races &= (thread // WARP != own // WARP) | (barriers == self._of_warp[own])
        if races.any():
            first = np.unravel_index(int(np.argmax(races)), races.shape)
            raise BlockRace(
                f"thread {int(own[first])} {does} byte {int(places[first])} of {name}, which thread "
                f"{int(thread[first])} {did}, and no barrier of the block lies between."
            )

    def _thread(self, numbers: Array) -> Array:
        return (numbers - self._base - 1) % self._num_threads

    def _read(self, uses: Uses, places: Array, numbers: Array) -> None:
        before = uses.reads[places]
        uses.reads[places] = numbers
        last = uses.reads[places]  # one of those that read a byte at once
        is_other = last != numbers
        if not ((before > self._base).any() or is_other.any()):
            return
        other, of_last = uses.others[places], self._thread(last)
        is_known = (before <= self._base) | (self._thread(before) == of_last)
        stays = (other > self._base) & (is_known | (self._thread(other) // WARP != of_last // WARP))
        uses.others[places] = np.where(stays, other, np.where(is_known, 0, before))
        is_apart = self._thread(numbers) // WARP != of_last // WARP
        for those in (is_other & ~is_apart & ~stays, is_other & is_apart):
            uses.others[places[those]] = numbers[those]
