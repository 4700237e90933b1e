"""The bytes of a checkpoint's files: read as they lie there, digested, and never taken for a program."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...core.base.digest import add, digest_bytes, to_hex
from ..base.urls import Place, UrlPath

CHUNK_BYTES = 16 << 20
"""Read at once; a multiple of the digest's words."""


class Reader(Protocol):
    """A file or object that is open: its bytes, wherever it lies."""

    @property
    def size(self) -> int:
        """How many bytes it has."""

    def read(self, first: int, num_bytes: int) -> memoryview:
        """So many bytes from `first` on. Raises `OSError` where it ends before, and asks for no memory then."""


@dataclass(frozen=True)
class _FileReader:
    descriptor: int

    @property
    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def read(self, first: int, num_bytes: int) -> memoryview:
        return read_bytes(self.descriptor, first, num_bytes)


@dataclass(frozen=True)
class _ObjectReader:
    url: UrlPath
    size: int

    def read(self, first: int, num_bytes: int) -> memoryview:
        if first + num_bytes > self.size:
            raise OSError(errno.EIO, f"it ends before byte {first + num_bytes}")
        content = bytearray(self.url.read(first, num_bytes))  # which can be written to, as tensors want it
        if len(content) != num_bytes:
            raise OSError(errno.EIO, f"it ends before byte {first + num_bytes}")
        return memoryview(content)


@contextmanager
def opened(path: Place) -> Iterator[Reader]:
    """A reader of an object, or of a regular file. Raises `OSError` for anything else: a checkpoint has no links, and a
    pipe would never end."""
    if isinstance(path, UrlPath):
        yield _ObjectReader(path, path.size())
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "this is no regular file", str(path))
        yield _FileReader(descriptor)
    finally:
        os.close(descriptor)


def read_bytes(descriptor: int, first: int, num_bytes: int) -> memoryview:
    """So many bytes from `first` on. Raises `OSError` where the file ends before, and asks for no memory then."""
    if first + num_bytes > os.fstat(descriptor).st_size:
        raise OSError(errno.EIO, f"it ends before byte {first + num_bytes}")
    content, done = np.empty(num_bytes, dtype=np.uint8).data, 0  # a bytearray would be filled with zeros first
    while done < num_bytes:
        count = os.preadv(descriptor, [content[done : done + (1 << 30)]], first + done)
        if not count:
            raise OSError(errno.EIO, f"it ends before byte {first + num_bytes}")
        done += count
    return content


def exists(path: Place) -> bool:
    """Whether there is anything of that name."""
    return path.exists() if isinstance(path, UrlPath) else os.path.lexists(path)


def length_of(path: Place) -> int:
    """Bytes of an object, or of a regular file. Raises `OSError` for anything else."""
    with opened(path) as reader:
        return reader.size


def read_small(path: Place, max_bytes: int) -> bytes:
    """All of a file. Raises `OSError` for one that is larger than `max_bytes`."""
    with opened(path) as reader:
        if (size := reader.size) > max_bytes:
            raise OSError(errno.EFBIG, f"it has {size} bytes, more than the {max_bytes} that are read", str(path))
        return bytes(reader.read(0, size))


def digest_of_file(path: Place) -> tuple[int, str]:
    """How many bytes a file has, and their digest."""
    with opened(path) as reader:
        size = reader.size
        chunks = ((first, min(CHUNK_BYTES, size - first)) for first in range(0, size, CHUNK_BYTES))
        return size, to_hex(add(digest_bytes(reader.read(first, count), first) for first, count in chunks))


def digest_of(content: bytes | bytearray | memoryview) -> str:
    """The digest of bytes in memory."""
    return to_hex(digest_bytes(content))
