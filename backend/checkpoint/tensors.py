"""Tensors that lie in pieces on many ranks, into a folder and back by `torch.distributed.checkpoint` (DCP).

`torch.distributed.checkpoint.save` and `load` want a process group, which ranks in threads do not have. Their steps do not: every rank
plans what it writes, one takes out what is planned twice and says who writes what, and after the writing it puts the index down. So the
steps run here, with DCP's own planner, writer and reader, and plans travel through a `Group`. What is written is an ordinary checkpoint,
which DCP reads anywhere, and `dcp_to_torch_save` converts.
"""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    LoadPlanner,
    Metadata,
    ReadItem,
    SavePlan,
    default_planner,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ...core.errors import PlanError, named
from ..measure import gather_objects
from ..transport.base import Group


@dataclass(frozen=True, eq=False)
class Piece:
    """The block `slices` of the tensor `name`, which has `shape`, as a rank holds it: `tensor` is read when saving, filled when loading.

    Not `written` are pieces that others have as well, but cut in other places.
    """

    name: str
    shape: tuple[int, ...]
    slices: tuple[slice, ...]
    tensor: Tensor
    written: bool = True

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Where the block begins in the whole tensor, and its shape."""
        return ChunkStorageMetadata(torch.Size(part.start for part in self.slices), self.tensor.shape)

    @property
    def index(self) -> MetadataIndex:
        """What identifies the block: equal ones on several ranks are written once."""
        return MetadataIndex(self.name, self.chunk.offsets)


def write_tensors(path: Path, pieces: Sequence[Piece], world: Group, device: torch.device) -> None:
    """Saves a folder `path` with all tensors that the ranks of `world`, which call this together, have pieces of.

    It is on the disk when this returns on rank 0. Raises `ValueError` when the pieces of a tensor overlap or leave parts out, `OSError`
    when a rank has not written all that it was to write.
    """
    writer, planner, leads = FileSystemWriter(path), _SavePlanner(pieces), world.rank == 0
    planner.set_up_planner({}, is_coordinator=leads)
    writer.set_up_storage_writer(leads)
    wanted = gather_objects(world, writer.prepare_local_plan(planner.create_local_plan()), device)
    agreed: list[SavePlan] | None = None
    if leads:
        plans, metadata = planner.create_global_plan(wanted)
        agreed = writer.prepare_global_plan(plans)
    agreed = gather_objects(world, agreed, device)[0]
    written = gather_objects(world, writer.write_data(planner.finish_plan(agreed[world.rank]), planner).wait(), device)
    for rank, (plan, done) in enumerate(zip(agreed, written, strict=True)):
        if len(done) < len(plan.items):
            raise OSError(f"{path}: rank {rank} has written {len(done)} of its {len(plan.items)} pieces. Look at its disk, and save again.")
    if leads:
        writer.finish(metadata, written)


def read_tensors(path: Path, pieces: Sequence[Piece], world: Group, device: torch.device) -> None:
    """Fills the pieces of every rank of `world`, which call this together, from the folder `path`, whatever layout saved it.

    Raises `PlanError` on every rank when the folder has other tensors than the ranks, or cannot be read.
    """
    reader = FileSystemReader(path)
    try:
        metadata = reader.read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise _unreadable(path, error) from error
    _check(path, metadata, pieces, world, device)
    planner = _LoadPlanner(pieces)
    planner.set_up_planner({}, metadata, world.rank == 0)
    reader.set_up_storage_reader(metadata, world.rank == 0)
    try:
        reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise _unreadable(path, error) from error


class _SavePlanner(DefaultSavePlanner):
    """DCP's own, but for what a rank has: pieces instead of a state dict of distributed tensors."""

    def __init__(self, pieces: Sequence[Piece]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {piece.index: piece for piece in pieces if piece.written}

    def create_local_plan(self) -> SavePlan:
        """All pieces of this rank."""
        return SavePlan(
            [
                WriteItem(
                    index,
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(piece.chunk, TensorProperties(piece.tensor.dtype), torch.Size(piece.shape)),
                )
                for index, piece in self._pieces.items()
            ]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Who writes what: of equal pieces one. Raises `ValueError` that names tensor and ranks where they do not make it up once."""
        _check_whole(default_planner.dedup_save_plans(all_plans, self.dedup_save_to_lowest_rank))
        return super().create_global_plan(all_plans)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The values of a piece."""
        return self._pieces[write_item.index].tensor.detach()


def _check_whole(plans: Sequence[SavePlan]) -> None:
    """Raises `ValueError` for the first tensor of which ranks write elements twice, or not all."""
    elements: Counter[str] = Counter()
    shapes: dict[str, torch.Size] = {}
    writers: defaultdict[str, set[int]] = defaultdict(set)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            assert item.tensor_data is not None, "everything saved is a tensor"
            name, block = item.index.fqn, item.tensor_data
            elements[name] += block.chunk.sizes.numel()
            shapes[name] = block.size
            writers[name].add(rank)
    for name, shape in shapes.items():
        if elements[name] != shape.numel():
            ranks = ", ".join(map(str, sorted(writers[name])))
            raise ValueError(f"{name} has {shape.numel()} elements, and ranks {ranks} are to write {elements[name]} of it.")


class _LoadPlanner(LoadPlanner):
    """Reads into pieces; `dest_index.index` counts them, since two of a rank may be the same block (both ends of a tied table)."""

    def __init__(self, pieces: Sequence[Piece]):
        self._pieces = pieces

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Takes note of what the checkpoint holds."""
        assert metadata is not None
        self._saved = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """For every piece the parts of saved blocks that it is made of."""
        items = []
        for number, piece in enumerate(self._pieces):
            saved = self._saved[piece.name]
            assert not isinstance(saved, BytesStorageMetadata), piece.name
            for item in create_read_items_for_chunk_list(piece.name, saved, [piece.chunk]):
                items.append(replace(item, dest_index=replace(item.dest_index, index=number)))
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Every rank reads what it wants."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return central_plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The part of a piece that a saved block fills."""
        number = read_item.dest_index.index
        assert number is not None
        part = tuple(slice(first, first + size) for first, size in zip(read_item.dest_offsets, read_item.lengths, strict=True))
        return self._pieces[number].tensor.detach()[part]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do: the part is the piece's own memory."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Never called: everything saved is a tensor."""
        raise AssertionError(read_item)


def _check(path: Path, metadata: Metadata, pieces: Sequence[Piece], world: Group, device: torch.device) -> None:
    """Raises `PlanError` on all ranks where the tensors of a checkpoint are not those of the ranks, by name, shape or format."""
    own = {piece.name: _described(piece.shape, piece.tensor.dtype) for piece in pieces}
    ours = {name: text for names in gather_objects(world, own, device) for name, text in names.items()}
    theirs = {
        name: "no tensor" if isinstance(saved, BytesStorageMetadata) else _described(tuple(saved.size), saved.properties.dtype)
        for name, saved in metadata.state_dict_metadata.items()
    }
    kinds = {
        "has no": [f"{name} {text}" for name, text in ours.items() if name not in theirs],
        "has": [f"{name} {theirs[name]} instead of {text}" for name, text in ours.items() if theirs.get(name, text) != text],
        "has tensors that the plan's model does not use:": sorted(theirs.keys() - ours.keys()),
    }
    if problems := [f"{path} {kind} {named(items)}. Use the model that it was saved with." for kind, items in kinds.items() if items]:
        raise PlanError(problems)


def _described(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def _unreadable(path: Path, error: Exception) -> PlanError:
    return PlanError(f"{path}: this checkpoint cannot be read: {error}. Remove it to resume from the one before.")
