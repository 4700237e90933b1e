"""The bytes of a checkpoint's files: read as they lie there, digested, and never taken for a program."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ...core.base.digest import add, digest_bytes, to_hex

CHUNK_BYTES = 16 << 20
"""Read at once; a multiple of the digest's words."""


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a regular file. Raises `OSError` for anything else: a checkpoint has no links, and a
    pipe would never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "this is no regular file", str(path))
        yield descriptor
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


def read_small(path: Path, max_bytes: int) -> bytes:
    """All of a file. Raises `OSError` for one that is larger than `max_bytes`."""
    with opened(path) as descriptor:
        if (size := os.fstat(descriptor).st_size) > max_bytes:
            raise OSError(errno.EFBIG, f"it has {size} bytes, more than the {max_bytes} that are read", str(path))
        return bytes(read_bytes(descriptor, 0, size))


def digest_of_file(path: Path) -> tuple[int, str]:
    """How many bytes a file has, and their digest."""
    with opened(path) as descriptor:
        size = os.fstat(descriptor).st_size
        chunks = ((first, min(CHUNK_BYTES, size - first)) for first in range(0, size, CHUNK_BYTES))
        return size, to_hex(add(digest_bytes(read_bytes(descriptor, first, count), first) for first, count in chunks))


def digest_of(content: bytes | bytearray | memoryview) -> str:
    """The digest of bytes in memory."""
    return to_hex(digest_bytes(content))
