"""Tensors that lie in pieces on many ranks, into a folder and back, whatever layout writes or reads.

What is written is an ordinary checkpoint of `torch.distributed.checkpoint` (DCP), which DCP reads anywhere, and
`dcp_to_torch_save` converts. DCP's own `save` wants a process group, which ranks in threads do not have, and sends
plans as pickles. So who writes what is agreed on here, as JSON, and DCP's writer makes the files. They are read by our
own index (`index`), which says where every value lies and what its digest is; without one by what DCP's metadata say
(`older`). Nothing in a folder is executed.
"""

from __future__ import annotations

import json
import math
import secrets
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import ChunkStorageMetadata, DefaultSavePlanner, FileSystemWriter, Metadata, SavePlan
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from ...core.base.errors import PlanError, named
from ...core.base.files import write_bytes
from ..base.urls import Place
from ..dcp.files import digest_of, digest_of_file, opened
from ..dcp.index import (
    INDEX_FILE,
    ITEM_BYTES,
    Block,
    Contents,
    DamagedError,
    SavedFile,
    SavedTensor,
    block_fields,
    block_of,
)
from ..dcp.older import METADATA_FILE, place_of_data
from ..transport.base import Group
from ..transport.gather_values import gather_values, run_on_all
from ..watch.watch import RankWatch
from .whole import STATE_FILE, contents_of, damages

Key = tuple[str, tuple[int, ...]]
"""What identifies a block: the tensor's name and the block's first element. Equal ones on several
ranks are written once."""


@dataclass(frozen=True, eq=False)
class Piece:
    """The block `slices` of the tensor `name`, which has `shape`, as a rank holds it: `tensor` is read when
    saving, filled when loading.

    Not `written` are pieces that others have as well, but cut in other places.
    """

    name: str
    shape: tuple[int, ...]
    slices: tuple[slice, ...]
    tensor: Tensor
    written: bool = True

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where the block begins in the whole tensor."""
        return tuple(int(part.start) for part in self.slices)

    @property
    def key(self) -> Key:
        """What identifies the block."""
        return self.name, self.offsets

    @property
    def described(self) -> list[Any]:
        """Tensor, shape, format, and the block's place and shape, as they are sent."""
        return [
            self.name,
            list(self.shape),
            _dtype_name(self.tensor.dtype),
            list(self.offsets),
            list(self.tensor.shape),
        ]


def write_tensors(
    path: Path, pieces: Sequence[Piece], world: Group, device: torch.device, watch: RankWatch | None = None
) -> None:
    """Saves a folder `path` with all tensors that the ranks of `world`, which call this together, have pieces of.

    It is on the disk when this returns. Raises `ValueError` when the pieces of a tensor overlap or leave parts out,
    `OSError` when a rank has not written all that it was to write.
    """
    share = share_of(pieces, world, device)
    written = run_on_all(world, device, lambda: write_share(path, share), watch=watch, name="save")
    everyone = gather_values(world, written, device)
    check_written(path, share, everyone)
    run_on_all(
        world,
        device,
        lambda: finish_folder(path, share, everyone) if world.rank == 0 else None,
        watch=watch,
        name="save",
    )


@dataclass(frozen=True, eq=False)
class Share:
    """What `rank` is to write of a checkpoint: `pieces`. `wanted` describes what every rank has, `dealt` says which
    blocks each writes."""

    rank: int
    pieces: tuple[Piece, ...]
    wanted: Sequence[Sequence[Sequence[Any]]]
    dealt: Sequence[Sequence[Key]]


def share_of(pieces: Sequence[Piece], world: Group, device: torch.device, before: Share | None = None) -> Share:
    """The share of this rank, as the ranks of `world` agree on it together; that of the save `before`, with today's
    values, where no rank has other pieces than then. Raises `ValueError` when the pieces of a tensor overlap or leave
    parts out."""
    own = {piece.key: piece for piece in pieces if piece.written}
    described = [piece.described for piece in own.values()]
    known = torch.tensor([before is not None and before.wanted[world.rank] == described], dtype=torch.int64)
    if all(int(each) for each in world.all_gather(known.to(device))):
        assert before is not None, "every rank has said so"
        wanted, dealt = before.wanted, before.dealt
    else:
        wanted = gather_values(world, described, device)
        dealt = dealt_out(wanted)
        _check_whole(wanted, dealt)
    return Share(world.rank, tuple(own[key] for key in dealt[world.rank]), wanted, dealt)


def dealt_out(wanted: Sequence[Sequence[Sequence[Any]]]) -> list[list[Key]]:
    """Which blocks each rank writes, of those that each has: of equal ones one, on the rank that has the
    least to write so far."""
    holders: defaultdict[Key, list[int]] = defaultdict(list)
    num_bytes: dict[Key, int] = {}
    for rank, described in enumerate(wanted):
        for name, _, dtype, offsets, sizes in described:
            holders[name, tuple(offsets)].append(rank)
            num_bytes[name, tuple(offsets)] = math.prod(sizes) * ITEM_BYTES[dtype]
    dealt: list[list[Key]] = [[] for _ in wanted]
    loads = [0] * len(wanted)
    for key, ranks in holders.items():
        rank = min(ranks, key=lambda rank: (loads[rank], rank))
        dealt[rank].append(key)
        loads[rank] += num_bytes[key]
    return dealt


def _check_whole(wanted: Sequence[Sequence[Sequence[Any]]], dealt: Sequence[Sequence[Key]]) -> None:
    """Raises `ValueError` for the first tensor of which ranks write elements twice, or not all."""
    elements: Counter[str] = Counter()
    shapes: dict[str, list[int]] = {}
    writers: defaultdict[str, set[int]] = defaultdict(set)
    for rank, (described, keys) in enumerate(zip(wanted, dealt, strict=True)):
        own = set(keys)
        for name, shape, _, offsets, sizes in described:
            shapes[name] = shape
            if (name, tuple(offsets)) in own:
                elements[name] += math.prod(sizes)
                writers[name].add(rank)
    for name, shape in shapes.items():
        if elements[name] != math.prod(shape):
            ranks = ", ".join(map(str, sorted(writers[name])))
            raise ValueError(
                f"{name} has {math.prod(shape)} elements, and ranks {ranks} are to write {elements[name]} of it."
            )


class _SavePlanner(DefaultSavePlanner):
    """Hands DCP's writer the values of pieces, in rows, as it asks for them."""

    def __init__(self, pieces: Sequence[Piece]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {piece.key: piece for piece in pieces}
        self.digests: dict[Key, str] = {}

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The values of a piece, of which the digest is kept: that of what is to be written, whatever
        becomes of it on the way."""
        key = write_item.index.fqn, tuple(write_item.index.offset or ())
        values = self._pieces[key].tensor.detach().cpu().contiguous()
        self.digests[key] = digest_of(bytes_of(values))
        return values


def bytes_of(tensor: Tensor) -> memoryview:
    """The values of a tensor in rows, in the host's memory."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_share(path: Path, share: Share) -> dict[str, Any]:
    """Writes a rank's files into a folder `path`, in any thread: the blocks in them, each with the zip that DCP looks
    for, and the files' lengths and digests, for JSON. They are on the disk when this returns. Raises `OSError` that
    names the file."""
    try:
        return _write(path, share.pieces, share.rank)
    except (OSError, RuntimeError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):  # torch's zip makes words of its own of a full disk
            cause = cause.__context__
        if cause is None:
            raise
        name = cause.filename or str(path / f"__{share.rank}_0.distcp")
        raise OSError(cause.errno, cause.strerror or str(cause), name) from error


def _write(path: Path, pieces: Sequence[Piece], rank: int) -> dict[str, Any]:
    path.mkdir(parents=True, exist_ok=True)
    writer, planner = FileSystemWriter(path), _SavePlanner(pieces)
    writer.set_up_storage_writer(rank == 0)
    items = [
        WriteItem(
            MetadataIndex(piece.name, piece.offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                _chunk(piece.offsets, piece.tensor.shape), TensorProperties(piece.tensor.dtype), torch.Size(piece.shape)
            ),
        )
        for piece in pieces
    ]
    results = writer.write_data(SavePlan(items, storage_data=_StoragePrefix(f"__{rank}_")), planner).wait()
    sizes = {piece.key: tuple(piece.tensor.shape) for piece in pieces}
    blocks = []
    for result in results:
        info, key = result.storage_data, (result.index.fqn, tuple(result.index.offset or ()))
        with opened(path / info.relative_path) as reader:
            first, num_bytes, _ = place_of_data(reader, info.offset, info.length)
        block = Block(key[1], sizes[key], info.relative_path, first, num_bytes, planner.digests[key])
        blocks.append([key[0], block_fields(block), [info.offset, info.length]])
    names = sorted(file.name for file in path.glob(f"__{rank}_*.distcp"))
    return {"blocks": blocks, "files": {name: digest_of_file(path / name) for name in names}}


def check_written(path: Path, share: Share, everyone: Sequence[Mapping[str, Any]]) -> None:
    """Raises `OSError` when a rank has not written all that it was to write, given what `write_share` gave on every
    rank."""
    for rank, (keys, done) in enumerate(zip(share.dealt, everyone, strict=True)):
        if len(done["blocks"]) < len(keys):
            count = len(done["blocks"])
            raise OSError(
                f"{path}: rank {rank} has written {count} of its {len(keys)} pieces. Look at its disk, and save again."
            )


def finish_folder(path: Path, share: Share, everyone: Sequence[Mapping[str, Any]]) -> None:
    """Puts DCP's metadata and our index down, given what `write_share` gave on every rank."""
    blocks: defaultdict[str, list[Block]] = defaultdict(list)
    results = []
    for done in everyone:
        for name, fields, (first, length) in done["blocks"]:
            block = block_of(fields)
            blocks[name].append(block)
            info = _StorageInfo(block.file, first, length)
            results.append(WriteResult(MetadataIndex(name, block.offsets), length, info))
    known = {name: (tuple(shape), dtype) for described in share.wanted for name, shape, dtype, _, _ in described}
    tensors = {
        name: SavedTensor(*known[name], tuple(sorted(own, key=lambda block: block.offsets)))
        for name, own in blocks.items()
    }
    metadata = Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(getattr(torch, tensor.dtype)),
                torch.Size(tensor.shape),
                [_chunk(block.offsets, block.sizes) for block in tensor.blocks],
            )
            for name, tensor in tensors.items()
        }
    )
    writer = FileSystemWriter(path)
    writer.set_up_storage_writer(True)
    writer.finish(metadata, [results])
    files = {name: SavedFile(*found) for done in everyone for name, found in done["files"].items()}
    for name in (METADATA_FILE, STATE_FILE):
        if (path / name).exists():
            files[name] = SavedFile(*digest_of_file(path / name))
    state = path / STATE_FILE
    steps = json.loads(state.read_bytes())["steps"] if state.exists() else 0
    write_bytes(path / INDEX_FILE, Contents(steps, secrets.token_hex(16), files, tensors).to_bytes())


def read_tensors(
    path: Place,
    pieces: Sequence[Piece],
    world: Group,
    device: torch.device,
    watch: RankWatch | None = None,
    *,
    is_checked: bool = False,
) -> None:
    """Fills the pieces of every rank of `world`, which call this together, from the folder `path`,
    whatever layout saved it.

    Raises on every rank, with no piece changed, `DamagedError` when the folder is not as it was saved, and `PlanError`
    when it has other tensors than the ranks. Unless it `is_checked`, each file is read once before, by one of the
    ranks; blocks are compared with their digests again when they are used: where one is another by then, `DamagedError`
    ends the run.
    """
    contents = _agreed(path, world, device, watch)
    _check(path, contents, pieces, world, device)
    if not is_checked:
        own = run_on_all(
            world, device, lambda: damages(path, contents, world.rank, world.size), watch=watch, name="check"
        )
        _raise_all(gather_values(world, own, device))
    found = run_on_all(world, device, lambda: list(_fill(path, contents, pieces)), watch=watch, name="load")
    _raise_all(gather_values(world, found, device))


def _agreed(path: Place, world: Group, device: torch.device, watch: RankWatch | None) -> Contents:
    """The contents as rank 0 finds them: all go by the same. Raises `DamagedError` on every rank."""

    def read() -> list[Any]:
        if world.rank > 0:
            return []
        try:
            contents = contents_of(path)
        except DamagedError as error:
            return [list(error.problems)]
        files = {name: [file.num_bytes, file.digest] for name, file in contents.files.items()}
        tensors = {
            name: [saved.shape, saved.dtype, list(map(block_fields, saved.blocks))]
            for name, saved in contents.tensors.items()
        }
        return [[], {"steps": contents.steps, "save": contents.save, "files": files, "tensors": tensors}]

    problems, *found = gather_values(world, run_on_all(world, device, read, watch=watch, name="check"), device)[0]
    if problems:
        raise DamagedError(problems)
    (fields,) = found
    tensors = {
        name: SavedTensor(tuple(shape), dtype, tuple(map(block_of, blocks)))
        for name, (shape, dtype, blocks) in fields["tensors"].items()
    }
    return Contents(
        fields["steps"], fields["save"], {name: SavedFile(*file) for name, file in fields["files"].items()}, tensors
    )


def files_of(contents: Contents, pieces: Sequence[Piece]) -> set[str]:
    """The files that have something of the pieces."""
    return {
        block.file
        for piece in pieces
        if piece.name in contents.tensors
        for block in contents.tensors[piece.name].blocks
        if block.num_elements and _shared(piece, block) is not None
    }


def _raise_all(found: Sequence[Sequence[str]]) -> None:
    """Raises the `DamagedError` of what any rank has found."""
    if problems := list(dict.fromkeys(problem for own in found for problem in own)):
        raise DamagedError(problems)


@torch.no_grad()
def _fill(path: Place, contents: Contents, pieces: Sequence[Piece]) -> Iterator[str]:
    """Fills pieces, file by file, with what was compared with its digest a moment before; what is another
    is reported and not used."""
    wanted: defaultdict[str, list[tuple[Block, list[Piece]]]] = defaultdict(list)
    of_name: defaultdict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        of_name[piece.name].append(piece)
    for name, held in of_name.items():
        for block in contents.tensors[name].blocks:
            if block.num_elements and (users := [piece for piece in held if _shared(piece, block) is not None]):
                wanted[block.file].append((block, users))
    for file, blocks in wanted.items():
        try:
            with opened(path / file) as reader:
                for block, users in blocks:
                    name = users[0].name
                    content = reader.read(block.first, block.num_bytes)
                    if block.digest is not None and digest_of(content) != block.digest:
                        yield f"{path / file}: tensor {name} has changed while it was read. Start again with --resume."
                        continue
                    values = torch.frombuffer(content, dtype=getattr(torch, contents.tensors[name].dtype)).view(
                        block.sizes
                    )
                    for piece in users:
                        theirs, ours = _shared(piece, block) or ((), ())
                        piece.tensor.detach()[ours].copy_(values[theirs])
        except OSError as error:
            yield f"{path / file} cannot be read: {error.strerror}."


def _shared(piece: Piece, block: Block) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What a piece and a saved block have of each other, as places in the block and in the piece; None
    where that is nothing."""
    theirs, ours = [], []
    for part, first, size in zip(piece.slices, block.offsets, block.sizes, strict=True):
        lo, hi = max(part.start, first), min(part.stop, first + size)
        if lo >= hi:
            return None
        theirs.append(slice(lo - first, hi - first))
        ours.append(slice(lo - part.start, hi - part.start))
    return tuple(theirs), tuple(ours)


def _check(path: Place, contents: Contents, pieces: Sequence[Piece], world: Group, device: torch.device) -> None:
    """Raises `PlanError` on all ranks where the tensors of a checkpoint are not those of the ranks, by
    name, shape or format."""
    own = {piece.name: f"{list(piece.shape)} {_dtype_name(piece.tensor.dtype)}" for piece in pieces}
    ours = {name: text for names in gather_values(world, own, device) for name, text in names.items()}
    theirs = {name: saved.text for name, saved in contents.tensors.items()}
    kinds = {
        "has no": [f"{name} {text}" for name, text in ours.items() if name not in theirs],
        "has": [
            f"{name} {theirs[name]} instead of {text}" for name, text in ours.items() if theirs.get(name, text) != text
        ],
        "has tensors that the plan's model does not use:": sorted(theirs.keys() - ours.keys()),
    }
    if problems := [f"{path} {kind} {named(items)}. {_remedy(items)}" for kind, items in kinds.items() if items]:
        raise PlanError(problems)


def _remedy(items: Sequence[str]) -> str:
    """What helps where these tensors differ."""
    if all(item.startswith("optimizer.") for item in items):
        return "Use the [optimizer] that it was saved with: what has a state follows from momentum and frozen groups."
    return "Use the model that it was saved with."


def _chunk(offsets: Sequence[int], sizes: Sequence[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
