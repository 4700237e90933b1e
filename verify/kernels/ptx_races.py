"""Races inside a block: a thread reads or writes what another has written, and no barrier of the block lies between.

A barrier of a warp is enough between threads of it. Threads that are carried out in step would not show a race: on a device another warp may come later, or another thread of
the warp. A write of what another thread has read is none here: where a block has fewer elements than threads, the
threads that are left read what others read, and throw it away. Atomics and instructions at multicast addresses are
left out, and so is what other blocks and ranks do.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray
WARP = 32


class BlockRace(RuntimeError):
    """Two threads of a block race. The message has both, and where."""


class Races:
    """What the `num_threads` threads of a block have written since its last barrier.

    A byte of a region has the number of its last writer, which says too how many barriers of its warp there were before
    since the last one of the block; numbers grow with each of those, so older ones are not larger than `_base`.
    """

    def __init__(self, num_threads: int):
        self._num_threads = num_threads
        self._base = 0
        self._of_warp = np.zeros(num_threads, np.int64)
        self._writers: dict[int, Array] = {}

    def barrier(self) -> None:
        """All threads have come to a barrier of the block."""
        self._base += (int(self._of_warp.max()) + 1) * self._num_threads
        self._of_warp[:] = 0

    def warp_barrier(self, threads: Array) -> None:
        """All threads of some warps, [warps, 32], have come to a barrier of their warp."""
        self._of_warp[threads] += 1

    def note(
        self, region: int, size: int, name: str, threads: Array, offsets: Array, num_bytes: int, writes: bool
    ) -> None:
        """Each of `threads` uses `num_bytes` from its one of `offsets` (uint64) on, of a region that is known by a
        number and has `size` bytes. Raises `BlockRace`."""
        writers = self._writers.get(region)
        if writers is None:
            if not writes:
                return
            writers = self._writers[region] = np.zeros(size, np.int64)
        places = offsets.astype(np.int64)[:, None] + np.arange(num_bytes)
        own = np.broadcast_to(threads[:, None], places.shape)
        found = writers[places] - self._base - 1
        writer, barriers = found % self._num_threads, found // self._num_threads
        others = (found >= 0) & (writer != own)
        others &= (writer // WARP != own // WARP) | (barriers == self._of_warp[own])
        if others.any():
            first = np.unravel_index(int(np.argmax(others)), others.shape)
            thread, other = int(own[first]), int(writer[first])
            raise BlockRace(
                f"thread {thread} {'writes' if writes else 'reads'} byte {int(places[first])} of {name}, which thread "
                f"{other} writes, and no barrier of the block lies between."
            )
        if writes:
            writers[places] = self._base + 1 + self._of_warp[own] * self._num_threads + own
