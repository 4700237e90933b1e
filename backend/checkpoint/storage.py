"""Where a run's checkpoints lie: `FolderStorage`, a folder that all ranks see, and `UrlStorage`, objects at a URL.

In a folder a checkpoint is written under another name (`step-00000020.partial`) and renamed when all of it is on the
disk. A store of objects has no renaming: ranks write to their own disks first, and upload; the index goes last, and
where it is not, there is no checkpoint. So whatever ends a run, and whenever, what is found is whole.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..base.urls import Place, UrlPath
from ..dcp.index import INDEX_FILE
from ..dcp.older import METADATA_FILE
from .exchange import Work
from .resume import path_of, saved_in
from .whole import STATE_FILE

PARTIAL, REMOVED = ".partial", ".removed"
"""Ends of the names of checkpoints that are not whole: not yet, or no longer."""
DAMAGED = ".damaged"
"""The end of the name of a checkpoint that was damaged, once a run has saved another after as many steps."""


class Storage(Protocol):
    """Of one rank. `prepare` is the first rank's."""

    def prepare(self) -> None:
        """Removes what runs that were ended while they saved or removed have left behind."""

    def place(self, steps: int) -> Place:
        """Where the checkpoint after so many steps lies when it is whole."""

    def staging(self, steps: int) -> Path:
        """The folder that this rank writes its files into."""

    def upload_files(self, steps: int, names: Iterable[str]) -> None:
        """This rank's files are complete in its staging folder: brings them to where all ranks' files lie."""

    def rest(self, steps: int, written: Sequence[Mapping[str, Any]], finish: Callable[[], None]) -> Iterator[Work]:
        """Work of this rank after which there is this checkpoint, and older ones than are to be kept are no more. All
        ranks ask for the next one together, when all have done theirs. `written` is what `write_share` gave on every
        rank; `finish` puts the index down, in the first rank's staging folder."""


class OnePlace:
    """What storages have in common whose checkpoints lie in one place for all ranks."""

    leads = False
    """Whether this is the first rank, which makes checkpoints of files."""

    def commit(self, steps: int) -> None:
        """All files and the index are there: gives the checkpoint its name, and removes older ones."""
        raise NotImplementedError

    def rest(self, steps: int, written: Sequence[Mapping[str, Any]], finish: Callable[[], None]) -> Iterator[Work]:
        """As `Storage.rest`."""

        def work() -> None:
            finish()
            self.commit(steps)

        yield work if self.leads else lambda: None


class FolderStorage(OnePlace):
    """`Storage` in a folder, in which the staging folder lies. `keep` is how many stay, None all."""

    def __init__(self, folder: Path, keep: int | None):
        self._folder, self._keep = folder, keep

    def prepare(self) -> None:
        """Makes the folder too."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for left in self._folder.glob("step-*"):
            if left.suffix in (PARTIAL, REMOVED):
                shutil.rmtree(left)

    def place(self, steps: int) -> Path:
        """`step-00000020` in the folder."""
        path = path_of(self._folder, steps)
        assert isinstance(path, Path), "a folder has paths"
        return path

    def staging(self, steps: int) -> Path:
        """`step-00000020.partial`, the same for all ranks."""
        path = self.place(steps)
        return path.with_name(path.name + PARTIAL)

    def upload_files(self, steps: int, names: Iterable[str]) -> None:
        """They are where they belong already."""

    def commit(self, steps: int) -> None:
        """As `OnePlace.commit`."""
        self.give_name(steps)
        self._remove_old(self.place(steps))

    def give_name(self, steps: int) -> None:
        """Gives the checkpoint its name; one of that name, which was damaged, gets another."""
        path, staging = self.place(steps), self.staging(steps)
        for file in (STATE_FILE, INDEX_FILE):
            _sync(staging / file)
        _sync(staging)
        if path.exists():
            path.rename(_free_name(path.with_name(path.name + DAMAGED)))
        staging.rename(path)
        _sync(self._folder)

    def _remove_old(self, newest: Path) -> None:
        """Newer checkpoints than the `newest` of this run were damaged, and stay."""
        known = [saved.path for saved in saved_in(self._folder) if saved.path.name <= newest.name]
        for old in known[: -self._keep if self._keep else 0]:
            assert isinstance(old, Path), "a folder has paths"
            removed = old.with_name(old.name + REMOVED)
            old.rename(removed)  # first another name: half of it would be no checkpoint
            shutil.rmtree(removed)


class UrlStorage(OnePlace):
    """`Storage` at a URL; the staging folder is a temporary one of this rank's, which has room for its part."""

    def __init__(self, url: UrlPath, keep: int | None):
        self._url, self._keep = url, keep
        self._scratch: Path | None = None

    def prepare(self) -> None:
        """What has no index was not finished."""
        for left in self._url.iterdir():
            if re.fullmatch(r"step-\d+", left.name) and not (left / INDEX_FILE).exists():
                left.remove()

    def place(self, steps: int) -> UrlPath:
        """`step-00000020` below the URL."""
        path = path_of(self._url, steps)
        assert isinstance(path, UrlPath), "a URL has URLs below"
        return path

    def staging(self, steps: int) -> Path:
        """The same one for every checkpoint: the one before has left it."""
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="checkpoint-"))
        return self._scratch / f"{steps}"

    def upload_files(self, steps: int, names: Iterable[str]) -> None:
        """Uploads the files, and lets go of them here. Raises `OSError` with the object that could not be written."""
        for name in names:
            self._move(steps, name)
        self._leave(steps)

    def commit(self, steps: int) -> None:
        """The index last: a digest of every other object is in it."""
        for name in (STATE_FILE, METADATA_FILE, INDEX_FILE):
            self._move(steps, name)
        self._leave(steps)
        newest = self.place(steps).name
        known = [saved.path for saved in saved_in(self._url) if saved.path.name <= newest]
        for old in known[: -self._keep if self._keep else 0]:
            assert isinstance(old, UrlPath), "a URL has URLs below"
            (old / INDEX_FILE).remove()  # first: half of it would be no checkpoint
            old.remove()

    def _leave(self, steps: int) -> None:
        """Removes the staging folder when nothing is left in it."""
        with contextlib.suppress(OSError):
            self.staging(steps).rmdir()
            self.staging(steps).parent.rmdir()
            self._scratch = None

    def _move(self, steps: int, name: str) -> None:
        file = self.staging(steps) / name
        (self.place(steps) / name).upload(file)
        file.unlink()


def _free_name(path: Path) -> Path:
    """The path, or with a number behind it the first that is free."""
    names = itertools.chain([path], (path.with_name(f"{path.name}-{number}") for number in itertools.count(2)))
    return next(name for name in names if not name.exists())


def _sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
