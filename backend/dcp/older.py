"""The contents of a checkpoint that has no index of ours: from DCP's `.metadata` and the zips around tensors,
without executing either.

Both are pickles, read as records (`records`). The names in them are those of torch 2.11 to 2.13
(`torch/distributed/checkpoint`: `metadata.py`, `filesystem.py`; `torch/_utils.py: _rebuild_tensor_v2`).
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

from ..base.urls import Place
from .files import Reader, length_of, opened, read_small
from .index import ITEM_BYTES, Block, Contents, DamagedError, SavedTensor, faults_of
from .records import Record, as_dict, pairs_of, read_records

METADATA_FILE = ".metadata"
MAX_METADATA_BYTES = 1 << 28
"""Of metadata that are read: a block takes some 300 bytes of them."""
_MAX_TENSOR_PICKLE_BYTES = 1 << 16

_PACKAGE = "torch.distributed.checkpoint.metadata"
_METADATA = (f"{_PACKAGE}.Metadata", "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata")
"""What the whole may be called: Megatron-LM has had a class of its own for it."""
_FORMATS = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
}
_FORMATS |= {"LongStorage": "int64", "IntStorage": "int32", "ByteStorage": "uint8"}

_NONSENSE = (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, struct.error)
"""What reading fields that are not there, or are something else, comes to."""

BlockKey = tuple[str, tuple[int, ...]]


def contents_without_index(path: Place, steps: int) -> Contents:
    """What a folder of DCP holds, without digests. Raises `DamagedError` for one that is not whole as far as that can
    be seen: pieces that are missing, that overlap, or that are not what the metadata say."""
    try:
        saved, places = _described(path)
        if (count := sum(len(each["chunks"]) for each in saved.values())) != len(places):
            raise ValueError(f"tensors have {count} blocks, and files {len(places)}")
        tensors = {name: _tensor(path, name, each, places) for name, each in saved.items()}
    except DamagedError:
        raise
    except _NONSENSE as error:
        raise DamagedError(f"{path / METADATA_FILE} cannot be read: {error}") from error
    files = {block.file for tensor in tensors.values() for block in tensor.blocks}
    if problems := list(faults_of(tensors, {name: length_of(path / name) for name in files})):
        raise DamagedError([f"{path / METADATA_FILE}: {problem}" for problem in problems])
    return Contents(steps, "", {}, tensors)


class ForeignTensors:
    """The tensors of a folder of DCP that another program has written, `shapes` by name; what else it has saved, such
    as pickled objects, is left out. Blocks are looked for as they are asked for.

    Raises `DamagedError` where the metadata cannot be read.
    """

    def __init__(self, path: Place):
        self._path = path
        try:
            self._saved, self._places = _described(path)
            self.shapes = {name: _size(fields["size"]) for name, fields in self._saved.items()}
        except _NONSENSE as error:
            raise DamagedError(f"{path / METADATA_FILE} cannot be read: {error}") from error

    def tensor(self, name: str) -> SavedTensor:
        """Where the blocks of a tensor lie. Raises `DamagedError` where they are not there, do not make up the tensor
        exactly once, or are of a number format that is not read."""
        try:
            found = _tensor(self._path, name, self._saved[name], self._places)
            lengths = {block.file: length_of(self._path / block.file) for block in found.blocks}
        except _NONSENSE as error:
            raise DamagedError(f"{self._path / METADATA_FILE}: {error}") from error
        if problems := list(faults_of({name: found}, lengths)):
            raise DamagedError([f"{self._path / METADATA_FILE}: {problem}" for problem in problems])
        return found


def _described(path: Place) -> tuple[dict[str, dict[str, Any]], dict[BlockKey, tuple[str, int, int]]]:
    """The metadata's fields of every tensor, and where blocks lie. Raises one of `_NONSENSE`."""
    metadata = read_records(read_small(path / METADATA_FILE, MAX_METADATA_BYTES))
    if not isinstance(metadata, Record) or metadata.name not in _METADATA:
        _record(metadata, _METADATA[0])
    fields = as_dict(metadata.state)
    tensors = {
        name: value
        for name, value in as_dict(fields["state_dict_metadata"]).items()
        if _record(value).name != f"{_PACKAGE}.BytesStorageMetadata"
    }
    places = dict(
        _place(key, value)
        for key, value in pairs_of(fields["storage_data"])
        if as_dict(_record(key, f"{_PACKAGE}.MetadataIndex").state)["fqn"] in tensors
    )
    return {name: _tensor_fields(name, value) for name, value in tensors.items()}, places


def place_of_data(reader: Reader, first: int, num_bytes: int) -> tuple[int, int, Any]:
    """Where the values of a saved tensor lie, whose zip has so many bytes from `first` on in a file: their first byte,
    their number, and the record of what torch would make of them. Raises `ValueError` or `zipfile.BadZipFile` where
    that is no tensor's zip."""
    window = _Window(reader, first, num_bytes)
    with zipfile.ZipFile(window) as archive:
        named = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        data, program = named["data/0"], named["data.pkl"]
        if program.file_size > _MAX_TENSOR_PICKLE_BYTES or data.compress_type != zipfile.ZIP_STORED:
            raise ValueError("the zip is not one that torch writes for a tensor")
        described = read_records(archive.read(program))
    header = reader.read(first + data.header_offset, 30)
    begin = data.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    if header[:4] != b"PK\x03\x04" or begin + data.file_size > num_bytes:
        raise ValueError("the zip's values reach beyond it")
    return first + begin, data.file_size, described


def _tensor_fields(name: str, saved: Any) -> dict[str, Any]:
    fields = as_dict(_record(saved, f"{_PACKAGE}.TensorStorageMetadata").state)
    if not isinstance(fields["chunks"], list):
        raise ValueError(f"tensor {name} has no list of blocks")
    return fields


def _tensor(
    path: Place, name: str, fields: dict[str, Any], places: dict[BlockKey, tuple[str, int, int]]
) -> SavedTensor:
    dtype = _record(_record(fields["properties"], f"{_PACKAGE}.TensorProperties").state[0]).name.removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {name} is of {dtype[:40]}, which is not read")
    blocks = []
    for chunk in fields["chunks"]:
        own = as_dict(_record(chunk, f"{_PACKAGE}.ChunkStorageMetadata").state)
        offsets, sizes = _size(own["offsets"]), _size(own["sizes"])
        if (name, offsets) not in places:
            raise ValueError(f"tensor {name} has a block at {list(offsets)} that no file has")
        blocks.append(_block(path, name, dtype, offsets, sizes, places[name, offsets]))
    return SavedTensor(_size(fields["size"]), dtype, tuple(blocks))


def _block(
    path: Place,
    name: str,
    dtype: str,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    place: tuple[str, int, int],
) -> Block:
    file, zip_first, zip_bytes = place
    try:
        with opened(path / file) as reader:
            first, num_bytes, described = place_of_data(reader, zip_first, zip_bytes)
        storage, offset, shape, strides = _record(described, "torch._utils._rebuild_tensor_v2").args[:4]
        kind = _record(_record(storage, "persistent").args[0][1]).name.removeprefix("torch.")
        in_rows = tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
        is_so = all(own == row or size == 1 for own, row, size in zip(strides, in_rows, sizes, strict=True))
        if offset != 0 or shape != sizes or not is_so or _FORMATS.get(kind) != dtype:
            raise ValueError(f"its zip has {kind} {shape} with strides {strides}, and the metadata {dtype} {sizes}")
    except (*_NONSENSE, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DamagedError(f"{path / file}: tensor {name} cannot be read: {error}") from error
    return Block(offsets, sizes, file, first, num_bytes)


def _place(key: Any, value: Any) -> tuple[BlockKey, tuple[str, int, int]]:
    """The block that an entry of the storage's table is about, and where its zip is."""
    index = as_dict(_record(key, f"{_PACKAGE}.MetadataIndex").state)
    info = as_dict(_record(value, "torch.distributed.checkpoint.filesystem._StorageInfo").state)
    file, first, num_bytes = info["relative_path"], info["offset"], info["length"]
    if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
        raise ValueError(f"{str(file)[:80]!r} is no file of this folder")
    if info.get("transform_descriptors"):
        raise ValueError(f"{file} is compressed or changed otherwise, which is not read")
    if not all(type(number) is int and 0 <= number < 1 << 60 for number in (first, num_bytes)):
        raise ValueError(f"{file} has no place for {index['fqn']!r}")
    return (index["fqn"], _size(index["offset"])), (file, first, num_bytes)


def _size(value: Any) -> tuple[int, ...]:
    """A `torch.Size`."""
    (sizes,) = _record(value, "torch.Size").args
    if (
        not isinstance(sizes, tuple)
        or len(sizes) > 16
        or not all(type(size) is int and 0 <= size < 1 << 60 for size in sizes)
    ):
        raise ValueError("a size has no counts")
    return sizes


def _record(value: Any, name: str | None = None) -> Any:
    """The value, which must be a record of that name."""
    if not isinstance(value, Record) or (name is not None and value.name != name):
        found = value.name[:80] if isinstance(value, Record) else f"a {type(value).__name__}"
        raise ValueError(f"{found} stands where {name or 'a name of torch'} should be")
    return value


class _Window(io.RawIOBase):
    """Some bytes of an open file as a file of their own."""

    def __init__(self, reader: Reader, first: int, num_bytes: int):
        self._reader, self._first, self._num_bytes, self._at = reader, first, num_bytes, 0
        if first + num_bytes > reader.size:
            raise ValueError(f"the file ends before byte {first + num_bytes}")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._num_bytes}[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._num_bytes - self._at)
        count = left if size is None or size < 0 else min(size, left)
        content = bytes(self._reader.read(self._first + self._at, count))
        self._at += count
        return content
