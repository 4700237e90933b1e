"""Weights from a Hugging Face folder, or from one of Megatron-LM or torchtitan, into the shards of a rank, which reads
only its own slices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ...core.base.errors import PlanError, named
from ...core.model.model import ModelSpec
from ..tensor_parallel import Shard
from .config import family_of
from .folder import INDEX, QUANTISED, READ_DTYPES, SCALES, Folder
from .names import BASE_PREFIXES, sources, unused_names
from .parts import Source, file_shapes, regions
from .stored import StoredFolder, is_stored


def load_weights(model: ModelSpec, path: str, shards: Iterable[Shard]) -> int:
    """Fills the shards from the folder `path`; the number of bytes of tensors that were read for them.

    Raises `PlanError` with every problem when the folder holds another model than `model`, or not all of it.
    """
    with StoredFolder(path, model) if is_stored(path) else Folder(path) as folder:
        family = folder.family if isinstance(folder, StoredFolder) else family_of(model, folder)
        places = sources(model, family)
        names = _checked_names(model, folder, places)
        for shard in shards:
            source = places[shard.parameter.name]
            _fill(shard, source, names, folder)
        return folder.num_bytes_read


def _checked_names(model: ModelSpec, folder: Folder | StoredFolder, places: Mapping[str, Source]) -> dict[str, str]:
    """Tensor name -> its name in this folder. Raises `PlanError` when a tensor is missing, has another shape, or is
    left over, and when the index promises one that no file has."""
    if absent := folder.absent:
        raise PlanError(
            f"train.load={str(folder.path)!r}: {INDEX} names tensors that are not there: {named(absent)}. Write the "
            "folder again."
        )
    expected = file_shapes(places)
    names = {name: found for name in expected if (found := _found(name, folder.files)) is not None}
    problems = _listed("has no", [f"{name} {list(expected[name])}" for name in expected if name not in names])
    wrong = [
        f"{name} {list(folder.shape(found))} instead of {list(expected[name])}"
        for name, found in names.items()
        if folder.shape(found) != expected[name]
    ]
    problems += _listed("has", wrong)
    formats = sorted({folder.dtype(found) for found in names.values() if not folder.can_read(found)})
    if formats:
        problems.append(
            f"has tensors in {', '.join(formats)}; read are {', '.join(READ_DTYPES)}, and {QUANTISED} with scales"
        )
    used = {tensor for found in names.values() for tensor in (found, f"{found}{SCALES}")}
    problems += _listed(
        "has tensors that the plan's model does not use:", unused_names(model, set(folder.files) - used)
    )
    if problems:
        raise PlanError([f"train.load={str(folder.path)!r} {problem}." for problem in problems])
    return names


def _listed(what: str, items: list[str]) -> list[str]:
    """One problem, or none; it names the first few items."""
    return [f"{what} {named(items)}"] if items else []


def _found(name: str, files: Mapping[str, object]) -> str | None:
    """The name under which a folder has a tensor: files of a decoder without its head leave out the first word."""
    prefix = next((prefix for prefix in BASE_PREFIXES if name.startswith(prefix)), "")
    return next((candidate for candidate in (name, name.removeprefix(prefix)) if candidate in files), None)


@torch.no_grad()
def _fill(shard: Shard, source: Source, names: Mapping[str, str], folder: Folder | StoredFolder) -> None:
    """A rank's part of one parameter. Rows of padding, which no file has, become zero."""
    local: Tensor = shard.tensor
    if source.num_items * source.item_rows < source.shape[source.dim]:
        local.zero_()
    for region in regions(source, shard.slices):
        region.ours(local).copy_(region.theirs(folder.read(names[region.name], region.index)))
    shard.refresh()
