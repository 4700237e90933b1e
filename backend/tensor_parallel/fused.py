"""Several linear layers fused into one whose features are cut: gate and up-projection of a gated
MLP, query, key and value.

Features are grouped by item (an MLP unit, a key/value group), `widths[i]` of every item for part i, so that a cut
between items gives each rank its items of every part. Megatron-Core instead puts whole parts one behind the other
and cuts each (`stride` of its column-parallel layer), which ties the order of features to the number of parts only
where all are equally wide.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def split_fused(x: Tensor, widths: Sequence[int], dim: int = -1) -> list[Tensor]:
    """The parts of fused features, contiguous tensors of their own: part i has `widths[i]` features of every item.

    Raises `ValueError` when the features are no whole items.

    >>> [part.tolist() for part in split_fused(torch.arange(6), (2, 1))]
    [[0, 1, 3, 4], [2, 5]]
    """
    dim %= x.dim()
    if x.shape[dim] % sum(widths):
        raise ValueError(f"{x.shape[dim]} features are no whole items of {' + '.join(map(str, widths))}.")
    return list(_Split.apply(x, tuple(widths), dim))


class _Split(torch.autograd.Function):
    """`split_fused`, whose backward writes the parts where they belong, which is faster than to put them
    one behind the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, widths: tuple[int, ...], dim: int) -> tuple[Tensor, ...]:
        ctx.of = widths, dim
        if _are_pairs(x, widths, dim):
            pairs = x.contiguous().view(torch.int64)
            return pairs.to(torch.int32).view(torch.float32), (pairs >> 32).to(torch.int32).view(torch.float32)
        return tuple(
            part.flatten(dim, dim + 1).contiguous() for part in _items(x, widths, dim).split(list(widths), dim + 1)
        )

    @staticmethod
    def backward(ctx: Any, *parts: Tensor) -> tuple[Tensor, None, None]:
        widths, dim = ctx.of
        if _are_pairs(parts[0], widths, dim):
            return torch.view_as_real(torch.complex(*parts)).flatten(-2), None, None
        return join_fused(parts, widths, dim), None, None


def _are_pairs(x: Tensor, widths: tuple[int, ...], dim: int) -> bool:
    """Whether two neighbouring elements can be moved as one number, which takes half the time of copies
    with strides on a CPU."""
    on_cpu = x.device.type == "cpu" and sys.byteorder == "little"
    return (
        on_cpu and widths == (1, 1) and dim == x.dim() - 1 and x.dtype == torch.float32 and x.storage_offset() % 2 == 0
    )


def _items(x: Tensor, widths: Sequence[int], dim: int) -> Tensor:
    return x.unflatten(dim, (x.shape[dim] // sum(widths), sum(widths)))


def join_fused(parts: Sequence[Tensor], widths: Sequence[int], dim: int = 0) -> Tensor:
    """The fused tensor of parts that lie one after another, such as gate and up-projection of published
    weights: undoes `split_fused`.

    Raises `ValueError` when the parts have not `widths[i]` features each of as many items.

    >>> join_fused([torch.tensor([0, 1, 3, 4]), torch.tensor([2, 5])], (2, 1)).tolist()
    [0, 1, 2, 3, 4, 5]
    """
    dim %= parts[0].dim()
    sizes = [part.shape[dim] for part in parts]
    counts = {divmod(size, width) for size, width in zip(sizes, widths, strict=True)}
    if len(counts) > 1 or next(iter(counts))[1]:
        raise ValueError(f"parts of {sizes} features have not {list(widths)} of as many items each.")
    ((num_items, _),) = counts
    items = [part.unflatten(dim, (num_items, width)) for part, width in zip(parts, widths, strict=True)]
    return torch.cat(items, dim + 1).flatten(dim, dim + 1)
