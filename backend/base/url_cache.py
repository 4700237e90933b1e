"""`UrlCache`: what this host has read of objects at URLs, on its own disk, for all processes of a user.

An object that is needed whole (an index, a text) is fetched once: into a file of another name, which gets its own when
all of it is on the disk. Of objects that are too large for that pieces are kept (`url_blocks`). Names say which
version of an object it is, so that one that was replaced is read anew.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...core.base.errors import FileError, ShardproofError
from .url_blocks import Blocks
from .urls import Place, UrlPath

PART_BYTES = 8 * 2**20
"""What is asked for at once of an object that is fetched whole: what an interruption costs at most."""


@dataclass(frozen=True)
class UrlCache:
    """In `folder`, by default one of this user's in the system's folder for temporary files. Pieces take `num_bytes` at
    most, and whole objects as much again, or one object if it alone has more."""

    folder: str | None = None
    num_bytes: int = 16 * 2**30

    def local(self, place: Place) -> Path:
        """A file with the content of a place: itself, or what was fetched. Raises `FileError` where there is no such
        object, or it cannot be had."""
        if isinstance(place, Path):
            return place
        with asked_for(place):
            key, folder = _version_key(place), self._folder("whole")
            path = folder / f"{key}{place.suffix}"
            with _alone(folder / f"{key}.lock"):
                if not path.exists() or path.stat().st_size != place.size():
                    self._fetch(place, path)
                    self._remove_old(path)
                os.utime(path)
        return path

    def blocks(self, url: UrlPath) -> Blocks:
        """The bytes of an object, read piece by piece. Raises `FileError` where there is no such object."""
        with asked_for(url):
            return Blocks(url, url.size(), _version_key(url), self._folder("blocks"), self.num_bytes)

    def _folder(self, name: str) -> Path:
        """One of the folders in the cache's, made where it is not there. Raises `FileError` where others may write to
        it: what they put there would be trained on."""
        own = Path(tempfile.gettempdir()) / f"shardproof-data-{os.getuid()}"
        root = own if self.folder is None else Path(self.folder)
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = root.lstat() if self.folder is None else root.stat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
                raise FileError(
                    f"{root} is no folder that only this user can write to, and what is there would be trained on. Use "
                    "train.data_cache with another one."
                )
            (root / name).mkdir(exist_ok=True)
        except OSError as error:
            raise FileError(
                f"{root} cannot hold what is read of URLs: {error.strerror}. Use train.data_cache with a folder on "
                "this host's disk."
            ) from error
        return root / name

    def _fetch(self, url: UrlPath, path: Path) -> None:
        """Writes an object to a file, which gets its name when all is on the disk. Raises `OSError`."""
        size, version = url.size(), url.version()
        partial = path.with_suffix(".partial")  # one process at a time: it has the lock
        try:
            with partial.open("wb") as file:
                for first in range(0, size, PART_BYTES):
                    file.write(url.read_all(first, min(PART_BYTES, size - first)))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            partial.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise FileError(
                    f"{path.parent} has no room for the {size} bytes of {url}. Use train.data_cache with a folder that "
                    "has."
                ) from error
            raise
        if url.version() != version:
            raise OSError(f"{url} was replaced while it was read")
        partial.rename(path)

    def _remove_old(self, newest: Path) -> None:
        """Files that were not asked for for the longest time, until the rest is small enough. Who has one open keeps
        it."""
        found = []
        for path in newest.parent.iterdir():
            with contextlib.suppress(OSError):
                found.append((path.stat().st_mtime, path.stat().st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.num_bytes:
                return
            if path != newest and path.suffix != ".lock":
                path.unlink(missing_ok=True)
                total -= size


USUAL_CACHE = UrlCache()
"""Of who says nothing else."""


@contextlib.contextmanager
def asked_for(url: UrlPath) -> Iterator[None]:
    """Makes errors of a store `FileError` that says what to do."""
    try:
        yield
    except ShardproofError:
        raise
    except FileNotFoundError as error:
        raise FileError(f"there is no object {url}. Look for its name, and for the bucket's.") from error
    except PermissionError as error:
        raise FileError(f"{url} is not to be read: {error}. Give the run credentials that may.") from error
    except OSError as error:
        raise FileError(f"{error}. Look at the network, the endpoint and the credentials, or copy the data.") from error


def _version_key(url: UrlPath) -> str:
    return hashlib.sha256(f"{url} {url.version()}".encode()).hexdigest()[:32]


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process of this host at a time; it gives way however it ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
