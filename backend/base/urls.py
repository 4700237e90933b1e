"""`UrlPath`: a place that fsspec reaches (`s3://`, `gs://`, `file://`, `memory://`, `http://`, and what its registry
knows besides), with the few methods of a `Path` that are used here. What a transfer that was interrupted leaves is
tried again, some times, with growing pauses. Needs no torch; fsspec is imported at first use."""

from __future__ import annotations

import os
import posixpath
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ...core.base.errors import FileError, MissingExtraError, PlanError, ShardproofError
from ...core.base.urls import is_url

T = TypeVar("T")

TRIES = 5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
"""Pauses double from try to try: some 3 s in all before a place is given up."""
READ_ONLY = frozenset({"http", "https"})
BUCKETS = frozenset({"s3", "s3a", "gs", "gcs"})
"""Stores that have no folders, and whose buckets somebody has to make: not a run whose user has mistyped one."""

_FINAL = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    ImportError,
    ShardproofError,
)
"""What another try would not change."""

_VERSION_FIELDS = ("ETag", "etag", "md5", "crc32c", "generation", "LastModified", "last_modified", "mtime", "created")
"""Where stores say which version of an object it is; each has some of them."""


@dataclass(frozen=True)
class UrlPath:
    """A place by its URL, without a slash at the end."""

    url: str

    @property
    def name(self) -> str:
        """The last part."""
        return posixpath.basename(self.url)

    @property
    def parent(self) -> UrlPath:
        """Where it lies."""
        return UrlPath(posixpath.dirname(self.url))

    @property
    def protocol(self) -> str:
        """`s3` of `s3://bucket/run`."""
        return self.url.partition("://")[0].lower()

    @property
    def suffix(self) -> str:
        """The end of the name from its last dot on, as `Path` has it."""
        return posixpath.splitext(self.name)[1]

    def with_suffix(self, suffix: str) -> UrlPath:
        """The place with another end of its name."""
        return UrlPath(self.url[: len(self.url) - len(self.suffix)] + suffix)

    def with_name(self, name: str) -> UrlPath:
        """Another place next to it."""
        return self.parent / name

    def __truediv__(self, name: str) -> UrlPath:
        return UrlPath(f"{self.url.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return self.url

    def exists(self) -> bool:
        """Whether there is an object, or objects below."""
        return bool(self._try("look for", lambda system, path: system.exists(path)))

    def is_file(self) -> bool:
        """Whether there is an object of this very name."""
        return bool(self._try("look for", lambda system, path: _anew(system).isfile(path)))

    def is_dir(self) -> bool:
        """Whether there are objects below. An object store has no folders that are empty."""
        return bool(self._try("look for", lambda system, path: system.isdir(path)))

    def iterdir(self) -> Iterator[UrlPath]:
        """What lies directly below, as it is now and not as it was seen before."""

        def names(system: Any, path: str) -> list[str]:
            system.invalidate_cache()
            try:
                return list(system.ls(path, detail=False))
            except FileNotFoundError:
                return []

        return (self / posixpath.basename(each.rstrip("/")) for each in self._try("list", names))

    def size(self) -> int:
        """Bytes of an object. Raises `OSError` where there is none."""
        return int(self._try("look at", lambda system, path: system.size(path)))

    def read(self, first: int, num_bytes: int) -> bytes:
        """So many bytes from `first` on, or fewer where the object ends. Raises `OSError`."""
        if num_bytes == 0:
            return b""
        return bytes(self._try("read", lambda system, path: system.cat_file(path, start=first, end=first + num_bytes)))

    def read_all(self, first: int, num_bytes: int) -> bytes:
        """So many bytes from `first` on. Raises `OSError` where the object ends before, and `FileError` for a server
        that gives more than it is asked for."""

        def get(system: Any, path: str) -> bytes:
            content = bytes(system.cat_file(path, start=first, end=first + num_bytes))
            if len(content) > num_bytes:
                raise FileError(
                    f"{self.url}: its server gives {len(content)} bytes where {num_bytes} are asked for, so it has no "
                    "ranges. Copy the data to a disk, or to a server that has them."
                )
            if len(content) < num_bytes:
                raise OSError(f"it gave {len(content)} bytes of {num_bytes}")
            return content

        return self._try("read", get) if num_bytes else b""

    def version(self) -> str:
        """What tells this version of an object from others, as far as its store says. Raises `OSError` where there is
        none."""
        info = self._try("look at", lambda system, path: _anew(system).info(path))
        return " ".join(f"{name}={info[name]}" for name in ("size", *_VERSION_FIELDS) if info.get(name) is not None)

    def files(self) -> list[UrlPath]:
        """All objects below, in the order of their names. Raises `OSError`."""

        def find(system: Any, path: str) -> list[UrlPath]:
            found = sorted(each[len(path.rstrip("/")) :].strip("/") for each in _anew(system).find(path))
            return [self / name for name in found]

        return self._try("list", find)

    def upload(self, file: Path) -> None:
        """Makes the object from a file: object stores show it when it is whole. Raises `OSError`."""
        size = file.stat().st_size

        def put(system: Any, path: str) -> None:
            if self.protocol not in BUCKETS:
                system.makedirs(posixpath.dirname(path), exist_ok=True)
            system.put_file(str(file), path)
            system.invalidate_cache()
            if system.size(path) != size:
                raise OSError(f"it has {system.size(path)} bytes, of {size}")

        self._try("write", put)

    def remove(self) -> None:
        """Removes an object, or all below; nothing where there is none. Raises `OSError`."""

        def rm(system: Any, path: str) -> None:
            system.invalidate_cache()
            if system.exists(path):
                system.rm(path, recursive=True)

        self._try("remove", rm)

    def _try(self, what: str, work: Callable[[Any, str], T]) -> T:
        system, path = _system_of(self.url)
        return retried(lambda: work(system, path), f"{what} {self.url}")


Place = Path | UrlPath
"""Where something lies."""
AnyPlace = TypeVar("AnyPlace", Path, UrlPath, Place)
"""A place of one kind, of which others of the kind are made."""


def place_of(text: str) -> Place:
    """The place that a text names."""
    return UrlPath(text.rstrip("/")) if is_url(text) else Path(text)


def check_writable(place: Place, key: str) -> None:
    """Raises `PlanError`, with the `key` of the plan that has it, for a URL that only gives or whose bucket is not
    there, and for a folder that is a file, or that this user can neither write to nor make."""
    if isinstance(place, UrlPath):
        if place.protocol in READ_ONLY:
            raise PlanError(
                f"{key}={place.url!r} cannot be written to: {place.protocol} is read-only here. Use s3://, gs://, "
                "file:// or a folder."
            )
        name = place.url.partition("://")[2].partition("/")[0]
        if place.protocol in BUCKETS and not UrlPath(f"{place.protocol}://{name}").exists():
            raise PlanError(f"{key}={place.url!r}: there is no bucket {name!r}. Make it first, or mend the name.")
        return
    there = next(each for each in (place, *place.absolute().parents) if each.exists())
    if not there.is_dir():
        raise PlanError(
            f"{key}={str(place)!r}{'' if there == place else f': {there}'} is a file. Give a folder, which may be new."
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise PlanError(
            f"{key}={str(place)!r} cannot be written to: {there} is read-only, or of another user. Give another folder."
        )


def retried(work: Callable[[], T], what: str) -> T:
    """What `work` gives, at the latest after `TRIES` tries. Raises `OSError` that says `what` could not be done; at
    once where nothing will change, as when something is not there or not allowed."""
    pause_s = FIRST_PAUSE_S
    for number in range(1, TRIES + 1):
        try:
            return work()
        except _FINAL:
            raise
        except Exception as error:  # clients of stores have exceptions of their own
            if number == TRIES:
                words = f"cannot {what}, {TRIES} times: {type(error).__name__}: {error}"
                raise OSError(words) from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    raise AssertionError("the last try returns or raises")


def _anew(system: Any) -> Any:
    """A file system that looks again at what it has seen before."""
    system.invalidate_cache()
    return system


def _system_of(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it."""
    try:
        import fsspec  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError(f"{url} needs fsspec. Run `pip install 'shardproof[s3]'`.") from error
    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise MissingExtraError(f"{url}: {error} (for s3://: `pip install 'shardproof[s3]'`)") from error
    except ValueError as error:
        raise PlanError(f"{url}: {error}. Use a protocol that fsspec knows, such as s3://, or a folder.") from error
    return system, str(path)
