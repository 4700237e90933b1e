"""`Contents`: what a checkpoint's folder holds, to the byte, and the index file that says so. Needs no torch.

Next to the files of `torch.distributed.checkpoint` (DCP) and `state.json` lies `shardproof.json`,
which DCP does not look at:

    {"digest": "<of all bytes that follow this line's comma>",
     "format": 1, "save": "<drawn for each save>", "steps": 20,
     "files": {"<name>": {"bytes": 1577, "digest": "..."}, ...},          every other file of the folder
     "tensors": {"<name>": {"shape": [4, 3], "dtype": "float32", "blocks": [
        {"offsets": [0, 0], "sizes": [2, 3], "file": "__0_0.distcp", "first": 640, "bytes": 24,
        "digest": "..."}, ...]}, ...}}

A block lies in rows, little-endian, from byte `first` of its file on: reading tensors needs neither the zip around them
nor `.metadata`. Digests are those of `core.base.digest` over words of eight bytes. One folder's files and blocks belong
together because the index names each by its digest: one of an older checkpoint or of another run has another. That
guards against errors. Who edits a checkpoint and computes all digests anew has made another checkpoint, which nothing
here can distinguish from one that was saved.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.base.errors import PlanError
from .files import digest_of

INDEX_FILE = "shardproof.json"
FORMAT = 1
MAX_INDEX_BYTES = 1 << 30
"""Of an index that is read: a block takes some 250 bytes of it."""

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1}
"""Bytes of an element of every number format that is saved."""

_HEAD = b'{"digest": "%s",\n'
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_MAX_DIMS, _MAX_SIZE = 16, 1 << 60


class DamagedError(PlanError):
    """A checkpoint is not as it was saved. The problems name files and tensors."""


@dataclass(frozen=True)
class Block:
    """The block of a tensor that begins at element `offsets` and has `sizes`, as `num_bytes` bytes from `first` on in a
    file. Checkpoints of earlier versions have no digests."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    first: int
    num_bytes: int
    digest: str | None = None

    @property
    def num_elements(self) -> int:
        """Of the block."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor, `dtype` as torch calls it, and the blocks that make it up."""

    shape: tuple[int, ...]
    dtype: str
    blocks: tuple[Block, ...]

    @property
    def text(self) -> str:
        """`[4, 3] float32`."""
        return f"{list(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class SavedFile:
    """A file's length and digest."""

    num_bytes: int
    digest: str


@dataclass(frozen=True)
class Contents:
    """All of a checkpoint: `files` and `tensors` by name. Without `files` it is one of an earlier version,
    which has no digests."""

    steps: int
    save: str
    files: Mapping[str, SavedFile]
    tensors: Mapping[str, SavedTensor]

    def to_bytes(self) -> bytes:
        """The index file."""
        content = {
            "format": FORMAT,
            "save": self.save,
            "steps": self.steps,
            "files": {name: {"bytes": file.num_bytes, "digest": file.digest} for name, file in self.files.items()},
            "tensors": {
                name: {
                    "shape": tensor.shape,
                    "dtype": tensor.dtype,
                    "blocks": [block_fields(block) for block in tensor.blocks],
                }
                for name, tensor in self.tensors.items()
            },
        }
        rest = json.dumps(content).removeprefix("{").encode() + b"\n"
        return _HEAD % digest_of(rest).encode() + rest

    @classmethod
    def from_bytes(cls, content: bytes | bytearray) -> Contents:
        """The inverse of `to_bytes`. Raises `DamagedError` with words that follow a file's name: a byte is another, or
        what is there makes no sense."""
        head_bytes = len(_HEAD) - 2 + 32
        head, rest = bytes(content[:head_bytes]), bytes(content[head_bytes:])
        if head != _HEAD % digest_of(rest).encode():
            raise DamagedError("has another digest than it says")
        try:
            parsed = json.loads(b"{" + rest)
            return _contents(parsed)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"is no index ({error})") from error


def block_fields(block: Block) -> dict[str, Any]:
    """A block as JSON has it."""
    fields: dict[str, Any] = {"offsets": block.offsets, "sizes": block.sizes, "file": block.file, "first": block.first}
    return fields | {"bytes": block.num_bytes, "digest": block.digest}


def block_of(fields: Mapping[str, Any]) -> Block:
    """The inverse of `block_fields`. Raises `ValueError`, `KeyError` or `TypeError` for what is none."""
    file, found = fields["file"], fields["digest"]
    if not isinstance(file, str) or not (found is None or (isinstance(found, str) and _DIGEST.fullmatch(found))):
        raise ValueError(f"a block in {file!r} has the digest {found!r}")
    first, num_bytes = _sizes([fields["first"], fields["bytes"]])
    return Block(_sizes(fields["offsets"]), _sizes(fields["sizes"]), file, first, num_bytes, found)


def _contents(parsed: Any) -> Contents:
    if not isinstance(parsed, dict) or parsed["format"] != FORMAT:
        raise ValueError(f"its format is not {FORMAT}; a later version of shardproof may read it")
    (steps,) = _sizes([parsed["steps"]])
    files = {}
    for name, fields in parsed["files"].items():
        if not _PLAIN_NAME.fullmatch(name) or name in (".", "..") or not _DIGEST.fullmatch(fields["digest"]):
            raise ValueError(f"{name!r} is no file of a checkpoint")
        (num_bytes,) = _sizes([fields["bytes"]])
        files[name] = SavedFile(num_bytes, fields["digest"])
    tensors = {
        name: SavedTensor(
            _sizes(fields["shape"]), str(fields["dtype"]), tuple(block_of(block) for block in fields["blocks"])
        )
        for name, fields in parsed["tensors"].items()
    }
    contents = Contents(steps, str(parsed["save"]), files, tensors)
    lengths = {name: file.num_bytes for name, file in files.items()}
    if problems := list(faults_of(tensors, lengths)):
        raise ValueError("; ".join(problems[:8]))
    return contents


def _sizes(values: Any) -> tuple[int, ...]:
    """A tuple of counts."""
    if not isinstance(values, list) or len(values) > _MAX_DIMS:
        raise ValueError(f"{str(values)[:40]} is no list of sizes")
    if not all(type(value) is int and 0 <= value <= _MAX_SIZE for value in values):
        raise ValueError(f"{str(values)[:40]} are no sizes")
    return tuple(values)


def faults_of(tensors: Mapping[str, SavedTensor], lengths: Mapping[str, int]) -> Iterator[str]:
    """What is wrong with the blocks of tensors in files of these lengths; nothing where they make up
    every tensor exactly once."""
    for name, tensor in tensors.items():
        item_bytes = ITEM_BYTES.get(tensor.dtype)
        if item_bytes is None:
            yield f"tensor {name} is of {tensor.dtype[:40]}, which is not read"
            continue
        for block in tensor.blocks:
            if block.num_bytes != block.num_elements * item_bytes:
                yield f"tensor {name} has a block of {block.num_elements} elements in {block.num_bytes} bytes"
            elif block.first + block.num_bytes > lengths.get(block.file, -1):
                yield f"tensor {name} has a block outside {block.file}"
        if (fault := _cover_fault(tensor.shape, tensor.blocks)) is not None:
            yield f"tensor {name} {fault}"


def _cover_fault(shape: tuple[int, ...], blocks: Sequence[Block]) -> str | None:
    """Why blocks do not make up a tensor exactly once, if they do not."""
    for block in blocks:
        if len(block.offsets) != len(shape) or len(block.sizes) != len(shape):
            return f"has a block of {len(block.sizes)} dimensions instead of {len(shape)}"
        if any(first + size > whole for first, size, whole in zip(block.offsets, block.sizes, shape, strict=True)):
            return f"has a block at {list(block.offsets)} that reaches beyond it"
    filled = sorted((block for block in blocks if block.num_elements), key=lambda block: block.offsets)
    if (count := sum(block.num_elements for block in filled)) != math.prod(shape):
        return f"has {math.prod(shape)} elements, and its blocks have {count}"
    reached: list[Block] = []  # blocks that go on where the next one begins, in the first dimension
    for block in filled:
        if shape:
            reached = [other for other in reached if other.offsets[0] + other.sizes[0] > block.offsets[0]]
        if any(_overlap(block, other) for other in reached):
            return f"has two blocks that overlap at {list(block.offsets)}"
        reached.append(block)
    return None


def _overlap(a: Block, b: Block) -> bool:
    places = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(p < q + other and q < p + size for p, size, q, other in places)
