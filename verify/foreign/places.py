"""Where the tensors of other stacks lie: what a rank holds of them, read from a DTensor's
placements or as the user says."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ...core.base.digest import Region, full_region
from ...core.base.errors import PlanError

Cuts = Mapping[str, Sequence["Slice"]]
"""Pattern of names (`layers.*.attention`) -> what this rank holds of such a tensor; the first
pattern that fits counts."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What a rank holds of dimension `dim` of a tensor: it begins at element `first` of `size`, and ends where
    the rank's tensor ends."""

    dim: int
    first: int
    size: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A plain tensor that fills `region` of one of `shape`."""

    local: Any
    shape: tuple[int, ...]
    region: Region


def cuts_of(name: str, cuts: Cuts) -> Sequence[Slice]:
    """What the user said about the tensors of a name."""
    return next((slices for pattern, slices in cuts.items() if fnmatchcase(name, pattern)), ())


def is_dtensor(value: object) -> bool:
    """Whether a value is a tensor that knows its own placements."""
    loaded = sys.modules.get("torch.distributed.tensor")  # a second to load, and without it there are none
    return loaded is not None and isinstance(value, loaded.DTensor)


def is_partial(tensor: Any) -> bool:
    """Whether a tensor is a sum that no rank holds: each has a term of it."""
    return is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements)


def place(tensor: Any, name: str, slices: Sequence[Slice] = ()) -> Placed | None:
    """Where a tensor lies; None where this rank holds nothing of it, or a term of a sum (`is_partial`).

    What `slices` say is about what a DTensor takes for the whole. Raises `PlanError` for slices that do not fit it.
    """
    if is_dtensor(tensor):
        if is_partial(tensor) or tensor.device_mesh.get_coordinate() is None:
            return None
        local, shape, region = (
            tensor.to_local(),
            tuple(tensor.shape),
            _region(tensor.shape, tensor.device_mesh, tensor.placements),
        )
    else:
        local, shape, region = tensor, tuple(tensor.shape), full_region(tensor.shape)
    if not local.numel():
        return None
    sizes, spans = list(shape), list(region)
    for each in slices:
        dim = each.dim if each.dim >= 0 else each.dim + len(sizes)
        if not 0 <= dim < len(sizes) or each.first < 0 or each.first + sizes[dim] > each.size:
            raise PlanError(
                f"{each} does not fit {name}, of which this rank has {list(shape)}. Mend `cuts` of the recorder."
            )
        lo, hi = spans[dim]
        spans[dim], sizes[dim] = (lo + each.first, hi + each.first), each.size
    return Placed(local, tuple(sizes), tuple(spans))


def place_as(tensor: Any, raw: Any) -> Placed | None:
    """Where a plain tensor lies into which a parallel style turned a DTensor: the part `raw` was, or a
    part in one dimension more.

    None where neither fits. A style that ends a module (`RowwiseParallel(output_layouts=Shard(1))`)
    leaves only sizes to go by.
    """
    from torch.distributed.tensor import Replicate, Shard

    mesh = raw.device_mesh
    if mesh.get_coordinate() is None or mesh.ndim != 1 or tensor.ndim != raw.ndim:
        return None
    for placement in (Replicate(), *(Shard(dim) for dim in range(raw.ndim))):
        region = _region(raw.shape, mesh, (placement,))
        if tuple(hi - lo for lo, hi in region) == tuple(tensor.shape):
            return Placed(tensor, tuple(raw.shape), region) if tensor.numel() else None
    return None


def _region(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> Region:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(tuple(shape), mesh, placements)
    return tuple((lo, lo + size) for lo, size in zip(offsets, sizes, strict=True))
