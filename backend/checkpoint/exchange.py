"""Files of one rank's folder to other ranks' folders, a piece at a time: between two steps ranks exchange a piece over
their communicator, and while they train threads write what came and read what goes next."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..dcp.files import digest_of_file, opened
from ..dcp.index import SavedFile
from ..transport.base import Group

PIECE_BYTES = 64 * 2**20
"""What a rank sends to another between two steps: some milliseconds of a fast network, and so much host memory."""

Work = Callable[[], None]


@dataclass(frozen=True)
class Stream:
    """What the rank `source` sends to `target`: files by name, one after another."""

    source: int
    target: int
    files: Mapping[str, SavedFile]

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(file.num_bytes for file in self.files.values())

    def piece(self, number: int) -> Iterator[tuple[str, int, int]]:
        """`(name, first byte, bytes)` of each file that the piece of this number has a part of."""
        lo, hi, begin = number * PIECE_BYTES, (number + 1) * PIECE_BYTES, 0
        for name, file in self.files.items():
            first, last = max(lo, begin), min(hi, begin + file.num_bytes)
            if first < last:
                yield name, first - begin, last - first
            begin += file.num_bytes

    def piece_bytes(self, number: int) -> int:
        """How many bytes a piece has."""
        return sum(count for _, _, count in self.piece(number))


def exchanged(
    streams: Sequence[Stream], world: Group, device: torch.device, read_from: Path, write_to: Path
) -> Iterator[Work]:
    """Work of this rank's disk, after each of which all ranks of `world` ask for the next together: what they send each
    other is sent in between. All of them know all `streams`. When it is over the files are in `write_to`, on the disk
    and with the digests that they should have; the last work raises `OSError` where they are not."""
    rank = world.rank
    sent = {stream.target: stream for stream in streams if stream.source == rank}
    came = {stream.source: stream for stream in streams if stream.target == rank}
    assert len(sent) + len(came) == sum(rank in (each.source, each.target) for each in streams), "one of a pair"
    going: dict[int, bytes] = {}
    for number in range(max((-(-each.num_bytes // PIECE_BYTES) for each in streams), default=0)):
        yield lambda number=number: going.update(_read(sent, number, read_from))  # type: ignore[misc]
        parts = [_as_tensor(going.pop(target, b""), device) for target in range(world.size)]
        sizes = [came[each].piece_bytes(number) if each in came else 0 for each in range(world.size)]
        arrived = world.all_to_all(parts, [(size,) for size in sizes])
        found = {source: arrived[source].cpu().numpy().tobytes() for source in came}
        yield lambda number=number, found=found: _write(came, number, found, write_to)  # type: ignore[misc]
    yield lambda: _check(came, write_to)


def _as_tensor(content: bytes, device: torch.device) -> torch.Tensor:
    if not content:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)


def _read(sent: Mapping[int, Stream], number: int, folder: Path) -> dict[int, bytes]:
    return {target: b"".join(_part(folder, part) for part in stream.piece(number)) for target, stream in sent.items()}


def _part(folder: Path, part: tuple[str, int, int]) -> bytes:
    name, first, count = part
    with opened(folder / name) as reader:
        return bytes(reader.read(first, count))


def _write(came: Mapping[int, Stream], number: int, found: Mapping[int, bytes], folder: Path) -> None:
    for source, stream in came.items():
        at = 0
        for name, first, count in stream.piece(number):
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                os.pwrite(descriptor, found[source][at : at + count], first)
            finally:
                os.close(descriptor)
            at += count


def _check(came: Mapping[int, Stream], folder: Path) -> None:
    for stream in came.values():
        for name, file in stream.files.items():
            path = folder / name
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)  # it may be empty
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if digest_of_file(path) != (file.num_bytes, file.digest):
                raise OSError(f"{path}: what rank {stream.source} sent has not arrived as it was sent")
