"""Weights of all ranks into a Hugging Face folder, each rank writing its own slices: the files do not
depend on the layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...core.base.errors import PlanError, named
from ...core.base.files import write_text
from ...core.base.units import format_bytes
from ...core.model.parameters import expert_biases
from ...core.plan.plan import Plan
from ..data.tokenizer_files import tokenizer_files
from ..tensor_parallel import Shard
from ..tensor_parallel.context import DTYPES
from ..transport.base import Group
from ..transport.gather_values import gather_values
from .config import config_to_write
from .files import FileLayout, OpenFile, file_layouts, index_of
from .folder import INDEX
from .names import sources
from .parts import Source, file_shapes, regions

MAX_FILE_BYTES = 5 * 10**9
"""Tensors of one file, as Hugging Face's own files have been cut for years."""


def save_weights(
    plan: Plan, path: str, shards: Iterable[Shard], world: Group, device: torch.device, max_bytes: int = MAX_FILE_BYTES
) -> None:
    """Writes the model in the plan's precision to the folder `path`, which all ranks see, with its tokenizer where it
    has one (`tokenizer_files`); every rank of `world` calls it together.

    Whoever finds the folder while it is written finds no `model*.safetensors` in it. Raises
    `PlanError` as `check_save` does.
    """
    config = config_to_write(plan)
    places = sources(plan.model, config["model_type"])
    shapes = file_shapes(places)
    layouts = file_layouts(shapes, _dtypes(plan, places), max_bytes)
    folder, leads = Path(path), world.rank == 0
    partial = {layout: folder / f"{layout.name}.partial" for layout in layouts}
    if leads:
        _create(folder, partial)
    world.barrier()
    _write(_owned(list(shards), world, device), places, partial)
    world.barrier()
    if leads:
        for layout, file in partial.items():
            file.replace(folder / layout.name)
        if len(layouts) > 1:
            write_text(folder / INDEX, index_of(layouts))
        for name, file in tokenizer_files(plan).items():
            shutil.copyfile(file, folder / name)
        write_text(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    world.barrier()


def _create(folder: Path, files: Mapping[FileLayout, Path]) -> None:
    """Makes the folder and the files, or none of them. Raises `OSError` where there is no room for them."""
    try:
        folder.mkdir(exist_ok=True)
        for layout, file in files.items():
            layout.create(file)
    except OSError as error:
        for file in files.values():
            file.unlink(missing_ok=True)
        size = format_bytes(sum(layout.num_bytes for layout in files))
        raise OSError(
            f"the weights were not written to {folder}: {error.strerror}, and they have {size}. Make room, or save to "
            "another folder: from a checkpoint --resume writes them without a step more"
        ) from error


def check_complete(plan: Plan, shards: Iterable[Shard], world: Group, device: torch.device) -> None:
    """Raises `PlanError` on every rank where the ranks together lack parameters that the files have: a user's
    own blocks may use others.

    Every rank of `world` calls it together.
    """
    held = {
        name for names in gather_values(world, [shard.parameter.name for shard in shards], device) for name in names
    }
    missing = [name for name in sources(plan.model, config_to_write(plan)["model_type"]) if name not in held]
    if missing:
        raise PlanError(
            f"save_huggingface needs every parameter of model {plan.model.name}, but its blocks do not have "
            f"{named(missing)}. Use those layers in the blocks, or do not save."
        )


def _dtypes(plan: Plan, places: Mapping[str, Source]) -> dict[str, torch.dtype]:
    """The number format of every tensor: the plan's, and fp32 for the biases of experts, which nothing rounds."""
    whole = {parameter.name for parameter in expert_biases(plan.model)}
    own = DTYPES[plan.precision.dtype]
    return {
        name: torch.float32 if place in whole else own
        for place, source in places.items()
        for name in source.file_shapes
    }


def _owned(shards: Sequence[Shard], world: Group, device: torch.device) -> list[Shard]:
    """The shards of this rank that it writes: of equal slices on several ranks, and of a tied table's two
    ends, the first one's."""
    mine = [
        (shard.parameter.name, *(place for part in shard.slices for place in (part.start, part.stop)))
        for shard in shards
    ]
    everyone = gather_values(world, mine, device)
    earlier = {tuple(key) for keys in everyone[: world.rank] for key in keys}
    own: dict[Any, Shard] = {}
    for key, shard in zip(mine, shards, strict=True):
        if key not in earlier:
            own.setdefault(key, shard)
    return list(own.values())


@torch.no_grad()
def _write(shards: Iterable[Shard], places: Mapping[str, Source], files: Mapping[FileLayout, Path]) -> None:
    """Copies this rank's slices into the files, which are opened as they are needed."""
    layout_of = {name: layout for layout in files for name in layout.places}
    opened: dict[str, OpenFile] = {}
    for shard in shards:
        for region in regions(places[shard.parameter.name], shard.slices):
            layout = layout_of[region.name]
            if layout.name not in opened:
                opened[layout.name] = layout.open(files[layout])
            block = opened[layout.name].tensor(region.name)[region.index]
            region.theirs(block).copy_(region.ours(shard.tensor))
    for file in opened.values():
        file.close()
