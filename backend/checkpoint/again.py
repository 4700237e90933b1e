"""`Frames`: a rank's file of a checkpoint, written like the one before.

DCP's writer packs every tensor into a zip with a program around its values: a millisecond of Python each, during which
the thread that trains waits for the interpreter. From save to save nothing differs but values, their CRC-32 and an id
that torch makes of it. So what lies between values is kept, and the next file is written in one call, byte by byte what
DCP would write. Where a file is not as it is known here, DCP writes the next one too.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from ..dcp.files import digest_of, digest_of_file
from .tensors import Share, bytes_of

VALUES, ID = "data/0", ".data/serialization_id"
"""Records of a tensor's zip: its values, and what torch makes of the CRC-32 of all records before."""

DESCRIBED = 0x8
"""Of a record's flags: its CRC-32 and lengths stand behind it, too."""


class UnknownError(Exception):
    """A file is not as this version of torch's is known to be."""


class Part(io.RawIOBase):
    """So many bytes of a file from `first` on, as a file of their own: values may be many gigabytes, which nobody reads
    here."""

    def __init__(self, descriptor: int, first: int, length: int):
        super().__init__()
        self.length = length
        self._descriptor, self._first, self._at = descriptor, first, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.length - self._at))
        found = os.preadv(self._descriptor, [memoryview(buffer)[:count]], self._first + self._at) if count else 0
        self._at += found
        return found

    def take(self, first: int, count: int) -> bytes:
        """So many of the part's bytes. Raises `UnknownError` where it ends before."""
        found = os.pread(self._descriptor, count, self._first + first)
        if len(found) != count or first + count > self.length:
            raise UnknownError(f"it ends before byte {first + count}")
        return found


@dataclass(frozen=True, eq=False)
class Zip:
    """What lies around the values of one tensor, and where in it their CRC-32, the id and the CRC-32 of that stand.
    `crcs` are those of all records before the id, in their order, None for the values."""

    before: bytes
    behind: bytes
    crc_at: tuple[int, ...]
    id_at: int
    id_crc_at: tuple[int, ...]
    names: bytes
    crcs: tuple[int | None, ...]

    @classmethod
    def of(cls, content: Part) -> Zip:
        """Of a tensor's zip. Raises `UnknownError`, and `OSError` where it cannot be read."""
        try:
            with ZipFile(content) as archive:
                infos, directory = archive.infolist(), archive.start_dir
        except (BadZipFile, OSError, ValueError) as error:
            raise UnknownError(str(error)) from error
        named = {info.filename.partition("/")[2]: info for info in infos}
        if list(named)[-1] != ID or VALUES not in named:
            raise UnknownError(f"its records are {list(named)}")
        places = {}
        for name, info in named.items():
            first = info.header_offset + 30 + sum(_numbers(content, info.header_offset + 26, 2, 2))
            last = first + info.file_size
            described = (last + 4,) if info.flag_bits & DESCRIBED else ()  # no values have no descriptor behind them
            if content.take(directory, 4) != b"PK\1\2" or (described and content.take(last, 4) != b"PK\7\x08"):
                raise UnknownError(f"{name} is not where it should be")
            places[name] = first, last, (*described, directory + 16)
            directory += 46 + sum(_numbers(content, directory + 28, 2, 3))
        first, last, crc_at = places[VALUES]
        id_first, id_last, id_crc_at = places[ID]
        filled = {name: info for name, info in named.items() if name != ID and info.file_size}
        crcs = tuple(None if name == VALUES else info.CRC for name, info in filled.items())
        behind = content.take(last, content.length - last)
        moved = tuple(place - last for place in crc_at), tuple(place - last for place in id_crc_at)
        names = content.take(id_first, 20)
        found = cls(content.take(0, first), behind, moved[0], id_first - last, moved[1], names, crcs)
        if id_last - id_first != 40 or found.behind_of(named[VALUES].CRC) != behind:
            raise UnknownError("its id is made otherwise")
        return found

    def behind_of(self, crc: int) -> bytes:
        """What lies behind values with that CRC-32."""
        content = bytearray(self.behind)
        combined = 0
        for each in self.crcs:  # `hash_combine` of torch's `caffe2/serialize/inline_container.cc`
            added = (crc if each is None else each) + 0x9E3779B9 + (combined << 6) + (combined >> 2)
            combined ^= added & 0xFFFFFFFFFFFFFFFF
        made = self.names + b"%020d" % combined
        content[self.id_at : self.id_at + 40] = made
        for places, value in ((self.crc_at, crc), (self.id_crc_at, zlib.crc32(made))):
            for place in places:
                content[place : place + 4] = value.to_bytes(4, "little")
        return bytes(content)


class Frames:
    """What is kept of a rank's file: of every block of values the zip around it, in the order of the file."""

    def __init__(self) -> None:
        self._described: list[Any] = []
        self._zips: list[Zip] = []
        self._written: dict[str, Any] = {}

    def learn(self, path: Path, share: Share, written: Mapping[str, Any]) -> None:
        """Keeps what there is to keep of the file that `write_share` has written into a folder."""
        self._described = []
        try:
            (name,) = written["files"]
            zips, end = [], 0
            with (path / name).open("rb") as file:
                for _, _, (first, length) in written["blocks"]:
                    if first != end:
                        raise UnknownError("there is something between tensors")
                    end = first + length
                    zips.append(Zip.of(Part(file.fileno(), first, length)))
                if end != os.fstat(file.fileno()).st_size:
                    raise UnknownError("there is something behind tensors")
        except (UnknownError, ValueError):
            return
        if [block[0] for block in written["blocks"]] == [piece.name for piece in share.pieces]:
            self._described = [piece.described for piece in share.pieces]
            self._zips, self._written = zips, dict(written)

    def write(self, path: Path, share: Share) -> dict[str, Any] | None:
        """Writes the file into a folder `path`, and gives what `write_share` would; None where nothing is known of such
        pieces. It is on the disk when this returns. Raises `OSError` that names the file."""
        if not self._described or self._described != [piece.described for piece in share.pieces]:
            return None
        (name,) = self._written["files"]
        blocks = []
        try:
            with (path / name).open("wb") as file:
                for piece, packing, (tensor, fields, place) in zip(
                    share.pieces, self._zips, self._written["blocks"], strict=True
                ):
                    values = bytes_of(piece.tensor)
                    file.write(packing.before)
                    file.write(values)
                    file.write(packing.behind_of(zlib.crc32(values)))
                    blocks.append([tensor, fields | {"digest": digest_of(values)}, place])
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path / name)) from error
        return {"blocks": blocks, "files": {name: digest_of_file(path / name)}}


def _numbers(content: Part, first: int, size: int, count: int) -> list[int]:
    """So many numbers of `size` bytes each."""
    return [int.from_bytes(content.take(first + i * size, size), "little") for i in range(count)]
