"""Memory of a launch at its real addresses: the regions that a kernel may use, and nothing else of the process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .ptx_races import Races

Array = np.ndarray
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
LINE = 16


class MemoryFault(RuntimeError):
    """A thread uses an address that is no memory of the launch or no multiple of what it reads there, or writes what is
    only to be read."""


@dataclass
class Region:
    """`size` bytes from address `begin` on, called `name` in errors. `notes_reads` says that a thread may not write
    what another has read since the last barrier."""

    name: str
    begin: int
    size: int
    is_writable: bool = True
    notes_reads: bool = False
    words: dict[int, Array] = field(default_factory=dict, init=False, repr=False)
    first: int = field(init=False)
    """The address of the first word in each of `words`, a multiple of `LINE`; so all words are aligned."""

    def __post_init__(self) -> None:
        self.first = self.begin // LINE * LINE
        num_bytes = -(-(self.begin + self.size - self.first) // LINE) * LINE
        self._map(np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(self.first)))

    def _map(self, memory: Array) -> None:
        self.words = {width: memory.view(word) for width, word in WORDS.items()}


class Shared(Region):
    """Shared memory of a block: addresses count from 0. It begins with a pattern: nobody may rely on zeros."""

    def __init__(self, size: int) -> None:
        super().__init__("shared memory", 0, 0, notes_reads=True)
        self.size = size
        self._map(np.full(-(-size // LINE) * LINE, 0xA5, np.uint8))


@dataclass(frozen=True)
class Users:
    """The threads that use addresses, one for each, and where their races are noted."""

    threads: Array
    races: Races


class Memory:
    """The regions of a launch. They may overlap."""

    def __init__(self, regions: Sequence[Region]):
        self.regions = tuple(region for region in regions if region.size)

    def load(self, addresses: Array, width: int, count: int = 1, users: Users | None = None) -> list[Array]:
        """`count` words of `width` bytes from each of `addresses` (uint64) on. Raises `MemoryFault`, and `BlockRace`
        where `users` are given."""
        found = [np.empty(len(addresses), WORDS[width]) for _ in range(count)]

        def copy(region: Region, chosen: Array | slice, index: Array) -> None:
            for number, values in enumerate(found):
                values[chosen] = region.words[width][index + number]

        self._each(addresses, width, count, False, copy, users)
        return found

    def store(self, addresses: Array, width: int, values: Sequence[Array], users: Users | None = None) -> None:
        """Writes those words, one array for each that follows. Raises as `load` does."""

        def copy(region: Region, chosen: Array | slice, index: Array) -> None:
            for number, each in enumerate(values):
                region.words[width][index + number] = each[chosen]

        self._each(addresses, width, len(values), True, copy, users)

    def check(self, addresses: Array, width: int) -> None:
        """Raises `MemoryFault` where a word of `width` bytes may not be written at one of `addresses`."""
        self._each(addresses, width, 1, True, lambda *_: None)

    def _each(
        self,
        addresses: Array,
        width: int,
        count: int,
        writes: bool,
        copy: Callable[[Region, Array | slice, Array], None],
        users: Users | None = None,
    ) -> None:
        """Calls `copy(region, which of the addresses, their indices in words)` for every region that they are in."""
        if not len(addresses):
            return
        num_bytes = width * count
        if (addresses % np.uint64(num_bytes)).any():
            address = int(addresses[addresses % np.uint64(num_bytes) != 0][0])
            raise MemoryFault(f"{address:#x} is no multiple of the {num_bytes} bytes that are used there.")
        lowest, highest = int(addresses.min()), int(addresses.max())
        for region in self.regions:
            if region.begin <= lowest and highest + num_bytes <= region.begin + region.size:
                _allowed(region, lowest, writes)
                _note(region, users, slice(None), addresses, num_bytes, writes)
                copy(region, slice(None), _index(region, addresses, width))
                return
        left = np.arange(len(addresses))
        for region in self.regions:
            of_left = addresses[left]
            inside = (of_left >= np.uint64(region.begin)) & (of_left < np.uint64(region.begin + region.size))
            inside &= of_left + np.uint64(num_bytes) <= np.uint64(region.begin + region.size)
            if inside.any():
                _allowed(region, int(of_left[inside][0]), writes)
                _note(region, users, left[inside], of_left[inside], num_bytes, writes)
                copy(region, left[inside], _index(region, of_left[inside], width))
                left = left[~inside]
        if len(left):
            raise MemoryFault(self._outside(int(addresses[left[0]]), num_bytes))

    def _outside(self, address: int, num_bytes: int) -> str:
        below = [region for region in self.regions if region.begin <= address]
        nearest = max(below, key=lambda region: region.begin, default=None)
        words = f"{num_bytes} bytes at {address:#x} are no memory of the launch"
        if nearest is None:
            return f"{words}."
        beyond = address + num_bytes - nearest.begin - nearest.size
        return f"{words}: {beyond} bytes beyond the end of {nearest.name} of {nearest.size} bytes."


def _allowed(region: Region, address: int, writes: bool) -> None:
    if writes and not region.is_writable:
        raise MemoryFault(f"{address:#x} is in {region.name}, which is only read.")


def _note(
    region: Region, users: Users | None, chosen: Array | slice, addresses: Array, num_bytes: int, writes: bool
) -> None:
    if users is not None:
        offsets = addresses - np.uint64(region.begin)
        users.races.note(region, users.threads[chosen], offsets, num_bytes, writes)


def _index(region: Region, addresses: Array, width: int) -> Array:
    return ((addresses - np.uint64(region.first)) // np.uint64(width)).astype(np.int64)


@dataclass(frozen=True)
class Multicast:
    """The window of addresses from `begin - before` to `begin + size` that stands for the same place in the memory of
    all ranks; `buffers` are where `begin` is on each."""

    begin: int
    before: int
    size: int
    buffers: tuple[int, ...]

    def on_each(self, addresses: Array, num_bytes: int) -> list[Array]:
        """The addresses on each rank. Raises `MemoryFault` where one is outside of the window."""
        low, high = self.begin - self.before, self.begin + self.size - num_bytes
        outside = (addresses < np.uint64(low)) | (addresses > np.uint64(high))
        if outside.any():
            raise MemoryFault(f"{int(addresses[outside][0]):#x} is no multicast address of the launch.")
        return [addresses - np.uint64((self.begin - buffer) % (1 << 64)) for buffer in self.buffers]
