"""`HostStorage`: checkpoints on the hosts' own disks, without storage that they share (`checkpoint.copies`).

A host's folder has the files of its ranks, those of the `copies` hosts before it, and the index, which names the files
of all. So each file is on `copies + 1` hosts, and as many as `copies` hosts may be lost. Each host gives its folder its
name when all hosts have all of their files, and removes older ones when all have given it: whatever ends a run, and
whenever, some checkpoint is whole over what the hosts have.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...core.base.errors import PlanError, named
from ...core.base.files import write_bytes
from ..dcp.files import digest_of, digest_of_file, read_small
from ..dcp.index import INDEX_FILE, MAX_INDEX_BYTES, Contents, DamagedError, SavedFile
from ..dcp.older import METADATA_FILE
from ..transport.base import Group
from ..transport.gather_values import gather_values, run_on_all
from ..watch.watch import RankWatch
from .exchange import Stream, Work, exchanged
from .resume import Saved, saved_in
from .storage import FolderStorage
from .tensors import Piece, files_of
from .whole import STATE_FILE

SMALL_FILES = (STATE_FILE, METADATA_FILE, INDEX_FILE)
"""What rank 0 writes, and every host has."""
_PROBE = ".seen-by-one-host"


class HostStorage(FolderStorage):
    """`Storage` in a folder of each host's own. All ranks of `world` make and use it together. Raises `PlanError` on
    every rank where hosts see one folder, or are too few for so many `copies`."""

    def __init__(self, folder: Path, keep: int | None, copies: int, world: Group, device: torch.device):
        super().__init__(folder, keep)
        self._copies, self._world, self._device = copies, world, device
        folder.mkdir(parents=True, exist_ok=True)
        self._hosts, self._names = _hosts_of(world, device, folder)
        self._host = next(number for number, ranks in enumerate(self._hosts) if world.rank in ranks)
        self._leads = self._hosts[self._host][0] == world.rank
        if len(self._hosts) <= copies:
            raise PlanError(
                f"checkpoint.copies={copies} needs {copies + 1} hosts with folders of their own, and this run has "
                f"{len(self._hosts)}. Use fewer, or leave checkpoint.copies out and have checkpoint.folder on storage "
                "that all hosts see."
            )
        self._check_own(folder)
        if self._leads:
            super().prepare()
        gather_values(world, None, device)  # nobody writes before leftovers are removed

    def prepare(self) -> None:
        """Every host's first rank has done it."""

    def rest(self, steps: int, written: Sequence[Mapping[str, Any]], finish: Callable[[], None]) -> Iterator[Work]:
        """As `Storage.rest`: copies to the next hosts, the index to all, names, and then older ones are removed."""
        staging, leads = self.staging(steps), self._world.rank == 0
        yield from exchanged(self._copied(written), self._world, self._device, staging, staging)
        yield finish if leads else _nothing
        own = {name: (staging / name).read_bytes() for name in SMALL_FILES} if leads else {}
        small = self._spread(own, 0)
        yield (lambda: self._give_name(steps, small)) if self._leads else _nothing
        yield (lambda: self._remove_old(self.place(steps))) if self._leads else _nothing

    def bring(self, pieces: Sequence[Piece], most_steps: int, watch: RankWatch | None) -> tuple[Saved, list[str]]:
        """The newest checkpoint that is whole over what the hosts have, of `most_steps` at most: what this host's ranks
        read of it is then in this host's folder, compared with its digests. And sentences about newer ones that are
        not. Raises `PlanError` on every rank where none is whole, with what is missing."""
        lost: list[str] = []
        saves = gather_values(self._world, self._saves() if self._leads else [], self._device)
        found = {(steps, digest) for each in saves for steps, digest in each if steps <= most_steps}
        for steps, digest in sorted(found, reverse=True):
            root = next(rank for rank, each in enumerate(saves) if [steps, digest] in each)
            path = self.place(steps)
            own = {name: (path / name).read_bytes() for name in SMALL_FILES} if self._world.rank == root else {}
            small = self._spread(own, root)
            contents = Contents.from_bytes(small[INDEX_FILE])
            have = {rank for rank, each in enumerate(saves) if [steps, digest] in each}
            has = self._hosts[self._host][0] in have
            held = self._everywhere(lambda c=contents, p=path, h=has: self._held(p, c) if h else [], watch)  # type: ignore[misc]
            files = [name for name in contents.files if name not in SMALL_FILES]
            if missing := [name for name in files if not any(name in each for each in held)]:
                lost.append(f"{path.name} has lost {named(missing)}: no host has it as it was saved.")
                continue
            self._complete(steps, contents, pieces, held, small if not has else None, watch)
            return Saved(path, steps), lost
        raise PlanError(
            [
                *lost,
                f"no checkpoint is whole on the hosts that are here ({named(self._names)}): with checkpoint.copies="
                f"{self._copies} the folders of {self._copies} of them may be lost. Bring a folder of a host that is "
                "missing to checkpoint.folder of any host, or start anew in another folder.",
            ]
        )

    def _everywhere(self, work: Callable[[], Any], watch: RankWatch | None) -> list[Any]:
        return gather_values(
            self._world, run_on_all(self._world, self._device, work, watch=watch, name="check"), self._device
        )

    def _saves(self) -> list[list[Any]]:
        """Steps, and the digest of the index, of the checkpoints in this host's folder whose small files are as they
        were saved."""
        found: list[list[Any]] = []
        for saved in saved_in(self._folder):
            assert isinstance(saved.path, Path), "a folder has paths"
            try:
                index = read_small(saved.path / INDEX_FILE, MAX_INDEX_BYTES)
                contents = Contents.from_bytes(index)
                small = (name for name in (STATE_FILE, METADATA_FILE) if name in contents.files)
                if contents.steps == saved.steps and all(_is_whole(saved.path, contents, name) for name in small):
                    found.append([saved.steps, digest_of(index)])
            except (OSError, DamagedError):
                continue
        return found

    def _held(self, path: Path, contents: Contents) -> list[str]:
        """Files that this host has as they were saved, of the share that this rank of the host reads."""
        ranks = self._hosts[self._host]
        names = sorted(contents.files)[ranks.index(self._world.rank) :: len(ranks)]
        return [name for name in names if _is_whole(path, contents, name)]

    def _complete(
        self,
        steps: int,
        contents: Contents,
        pieces: Sequence[Piece],
        held: Sequence[Sequence[str]],
        small: Mapping[str, bytes] | None,
        watch: RankWatch | None,
    ) -> None:
        """Brings what a host's ranks read and the host has not from one that has it. `small` are the small files where
        this host has none of the checkpoint."""
        wanted = gather_values(self._world, sorted(files_of(contents, pieces)), self._device)
        path, staging = self.place(steps), self.staging(steps)
        if self._leads:
            staging.mkdir()
        gather_values(self._world, None, self._device)
        streams = list(self._missing(contents, wanted, held))
        for work in exchanged(streams, self._world, self._device, path, staging):
            run_on_all(self._world, self._device, work, watch=watch, name="load")

        def take() -> None:
            if small is not None:
                self._give_name(steps, small)
                return
            for file in staging.iterdir():
                file.replace(path / file.name)
            staging.rmdir()

        run_on_all(self._world, self._device, take if self._leads else _nothing, watch=watch, name="load")

    def _missing(
        self, contents: Contents, wanted: Sequence[Sequence[str]], held: Sequence[Sequence[str]]
    ) -> Iterator[Stream]:
        """Who sends which file to whom."""
        pairs: dict[tuple[int, int], dict[str, SavedFile]] = {}
        for ranks in self._hosts:
            there = {name for rank in ranks for name in held[rank]}
            asked = {name: rank for rank in reversed(ranks) for name in wanted[rank] if name not in there}
            for name, target in sorted(asked.items()):
                source = next(rank for rank, names in enumerate(held) if name in names)
                pairs.setdefault((source, target), {})[name] = contents.files[name]
        return (Stream(source, target, files) for (source, target), files in pairs.items())

    def _copied(self, written: Sequence[Mapping[str, Any]]) -> list[Stream]:
        """Each rank's files to a rank of each of the next hosts."""
        streams = []
        for host, ranks in enumerate(self._hosts):
            for place, source in enumerate(ranks):
                files = {name: SavedFile(*found) for name, found in written[source]["files"].items()}
                for step in range(1, self._copies + 1):
                    there = self._hosts[(host + step) % len(self._hosts)]
                    streams.append(Stream(source, there[place % len(there)], files))
        return streams

    def _spread(self, own: Mapping[str, bytes], root: int) -> dict[str, bytes]:
        """The files of the rank `root`, on every rank."""
        sizes = gather_values(self._world, {name: len(content) for name, content in own.items()}, self._device)
        counts = [sum(size.values()) or 1 for size in sizes]
        body = torch.frombuffer(bytearray(b"".join(own.values()) or b"\0"), dtype=torch.uint8).to(self._device)
        content = self._world.all_gather(body, [(count,) for count in counts])[root].cpu().numpy().tobytes()
        found, at = {}, 0
        for name, size in sizes[root].items():
            found[name] = content[at : at + size]
            at += size
        return found

    def _give_name(self, steps: int, small: Mapping[str, bytes]) -> None:
        staging = self.staging(steps)
        for name, content in small.items():
            write_bytes(staging / name, content)
        self.give_name(steps)

    def _check_own(self, folder: Path) -> None:
        """Raises `PlanError` on every rank where another host sees this host's folder."""
        mark = secrets.token_hex(8) if self._leads else ""
        probe = folder / f"{_PROBE}-{mark}"
        if self._leads:
            probe.touch()
        marks = gather_values(self._world, mark, self._device)
        others = [each for rank, each in enumerate(marks) if each and rank not in self._hosts[self._host]]
        seen = any((folder / f"{_PROBE}-{each}").exists() for each in others)
        shared = any(gather_values(self._world, seen, self._device))
        probe.unlink(missing_ok=True)
        if shared:
            raise PlanError(
                f"checkpoint.folder={str(folder)!r} is one folder that several hosts see, and checkpoint.copies is for "
                "folders of each host's own. Leave checkpoint.copies out, or use a folder on the hosts' own disks."
            )


def _hosts_of(world: Group, device: torch.device, folder: Path) -> tuple[list[list[int]], list[str]]:
    """The ranks of each host, and its name: ranks are of one host that see one folder there."""
    found = folder.stat()
    own = [socket.gethostname(), found.st_dev, found.st_ino]
    hosts: dict[tuple[Any, ...], list[int]] = {}
    for rank, each in enumerate(gather_values(world, own, device)):
        hosts.setdefault(tuple(each), []).append(rank)
    return list(hosts.values()), [str(host[0]) for host in hosts]


def _is_whole(path: Path, contents: Contents, name: str) -> bool:
    try:
        return digest_of_file(path / name) == (contents.files[name].num_bytes, contents.files[name].digest)
    except OSError:
        return False


def _nothing() -> None:
    return None
