"""`Blocks`: an object at a URL, read by ranges, of which this host keeps what it has read.

All objects of a cache share one sparse file of slots. A block goes to the slot that its number says, whatever was there
before, so that the file never grows beyond its bound and nothing has to be counted or removed. A slot has a digest over
which object, which version, which block and which bytes it holds: what is another block, half written or damaged is
read from the URL again. Processes of a host that want a block at the same time ask for it once: the others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .urls import UrlPath

BLOCK_BYTES = 2**16
"""A sample of 4,096 tokens has 8 to 16 KB, and samples come from all over a file: larger blocks would be read for
little."""
MOST_BLOCKS = 64
"""Of one request: 4 MiB."""
REQUESTS = 16
"""At the same time, of one process."""

_DIGEST_BYTES = 16
_SLOT_BYTES = _DIGEST_BYTES + BLOCK_BYTES


@dataclass(frozen=True)
class Blocks:
    """The bytes of one version of an object, whose name is `key`. `folder` has the file of slots, of `num_bytes` at
    most."""

    url: UrlPath
    size: int
    key: str
    folder: Path
    num_bytes: int

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes `first <= i < last` of each range, all of which lie in the object. What is not on this host is
        asked for at the same time. Raises `OSError`."""
        wanted = {block for first, last in ranges for block in range(first // BLOCK_BYTES, -(-last // BLOCK_BYTES))}
        found = {block: content for block in sorted(wanted) if (content := self._stored(block)) is not None}
        runs = list(self._runs(sorted(wanted - found.keys())))
        fetch = self._pool.map if len(runs) > 1 else map
        for fetched in fetch(self._fetched, runs):
            found.update(fetched)
        return [_range_of(found, first, last) for first, last in ranges]

    def _fetched(self, run: range) -> Mapping[int, bytes]:
        """Neighbouring blocks, which another process may have read in the meantime."""
        with self._alone(run):
            stored = {block: self._stored(block) for block in run}
            if all(content is not None for content in stored.values()):
                return {block: content for block, content in stored.items() if content is not None}
            first, last = run.start * BLOCK_BYTES, min(run.stop * BLOCK_BYTES, self.size)
            content = self.url.read_all(first, last - first)
            found = {block: content[at : at + BLOCK_BYTES] for at, block in zip(_steps(content), run, strict=True)}
            for block, each in found.items():
                self._store(block, each)
        return found

    def _runs(self, blocks: Sequence[int]) -> Iterator[range]:
        """Neighbours, in the object and in the file of slots, as one."""
        begin = end = -1
        for block in blocks:
            if block != end or block - begin == MOST_BLOCKS or self._slot(block) == 0:
                if end > begin:
                    yield range(begin, end)
                begin = block
            end = block + 1
        if end > begin:
            yield range(begin, end)

    def _slot(self, block: int) -> int:
        return (int(self.key[:12], 16) + block) % self._num_slots

    @property
    def _num_slots(self) -> int:
        return max(1, self.num_bytes // _SLOT_BYTES)

    def _stored(self, block: int) -> bytes | None:
        """A block as it is in its slot; None where something else is, or nothing."""
        length = min(BLOCK_BYTES, self.size - block * BLOCK_BYTES)
        try:
            slot = os.pread(self._file, _DIGEST_BYTES + length, self._slot(block) * _SLOT_BYTES)
        except OSError:
            return None
        content = slot[_DIGEST_BYTES:]
        return content if slot[:_DIGEST_BYTES] == self._digest(block, content) else None

    def _store(self, block: int, content: bytes) -> None:
        """A disk that is full or does not work costs requests, and no run."""
        with contextlib.suppress(OSError):
            os.pwrite(self._file, self._digest(block, content) + content, self._slot(block) * _SLOT_BYTES)

    def _digest(self, block: int, content: bytes) -> bytes:
        return hashlib.blake2b(f"{self.key} {block} ".encode() + content, digest_size=_DIGEST_BYTES).digest()

    @contextlib.contextmanager
    def _alone(self, run: range) -> Iterator[None]:
        """The slots of neighbouring blocks for this process. Where locks do not work, or the system sees processes wait
        for each other, as it does for two threads of each, blocks are read twice."""
        first, length = self._slot(run.start) * _SLOT_BYTES, len(run) * _SLOT_BYTES
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX, length, first)
        except OSError:
            yield
            return
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, length, first)

    @functools.cached_property
    def _file(self) -> int:
        """The file of slots, open as long as this process lives: closing it would give up all locks in it."""
        descriptor = os.open(self.folder / "slots", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if os.fstat(descriptor).st_size > (bound := self._num_slots * _SLOT_BYTES):
            os.ftruncate(descriptor, bound)
        return descriptor

    @functools.cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(REQUESTS, thread_name_prefix="read-url")


def _steps(content: bytes) -> range:
    return range(0, len(content), BLOCK_BYTES)


def _range_of(found: Mapping[int, bytes], first: int, last: int) -> bytes:
    """The bytes of a range, out of its blocks."""
    blocks = range(first // BLOCK_BYTES, -(-last // BLOCK_BYTES))
    whole = b"".join(found[block] for block in blocks)
    skipped = first - blocks.start * BLOCK_BYTES
    return whole[skipped : skipped + last - first]
