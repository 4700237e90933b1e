"""What the library does with tiles of a plan's shapes, measured: whether a tile's bits depend on where it lies, and
whether two tiles side by side may be one product."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ...core.model.parameters import parameters
from ...core.plan.plan import Plan
from .same_bits import Operands, multiply_into

Sizes = tuple[int, int, int]
"""(tokens, features of a leaf, whole features) of a tile."""

TileFunction = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

TILES: Mapping[str, TileFunction] = {
    "project": lambda x, weight, y: (x, weight.t()),
    "contract": lambda x, weight, y: (y, weight),
    "weight_gradient": lambda x, weight, y: (y.t(), x),
}
"""The two matrices of a form's tile, of x [tokens, whole], weight [leaf, whole] and y [tokens, leaf]. A matrix that
nobody cuts is a leaf by itself, multiplied as in `project` and in `contract`."""


def tile_sizes(plan: Plan) -> set[Sizes]:
    """Those of all tiles, shorter last blocks and leaves among them; a matrix that no rank cuts is one leaf."""
    return cut_tiles(plan) | whole_tiles(plan)


def cut_tiles(plan: Plan) -> set[Sizes]:
    """Of the matrices that ranks cut."""
    sequence, block = plan.batch.sequence, plan.leaf_sizes.gradient_token_block
    sizes = set()
    for parameter in parameters(plan.model):
        if parameter.cut is not None and len(parameter.shape) == 2:
            dim, feature = parameter.cut
            leaves = plan.leaf_sizes.feature(feature)
            widths = {leaves.block, leaves.num_items % leaves.block or leaves.block}
            sizes |= {
                (tokens, width * parameter.unit, parameter.shape[1 - dim])
                for width in widths
                for tokens in (min(block, sequence), sequence % block)
                if tokens
            }
    return sizes


def whole_tiles(plan: Plan) -> set[Sizes]:
    """Of the matrices that nobody cuts."""
    sequence, sizes = plan.batch.sequence, plan.leaf_sizes
    blocks = {min(each, sequence) for each in (sizes.reduction_token_block, sizes.gradient_token_block)}
    return {
        (tokens, *parameter.shape)
        for parameter in parameters(plan.model)
        if parameter.cut is None and len(parameter.shape) == 2 and not parameter.name.startswith("embedding.")
        for size in blocks
        for tokens in (size, sequence % size)
        if tokens
    }


def tile_differences(form: str, sizes: Sizes, device: torch.device) -> int:
    """Elements of a tile that differ where it lies inside of larger tensors."""
    alone, inside = (_tile(form, sizes, device, place) for place in (torch.clone, elsewhere))
    return int((alone != inside).sum())


def tiles_join(form: str, sizes: Sizes, device: torch.device) -> bool:
    """Whether one product of tiles side by side, two of them along each dimension that has several, has their bits."""
    left, right = TILES[form](*_operands(sizes, device))
    columns = (right.shape[1],) * (2 if form == "project" else 1)
    return Operands.of(left, right).joins((len(left),) * 2, left.shape[1], columns)


def elsewhere(x: Tensor) -> Tensor:
    """The same matrix as columns of a wider one, four bytes off any alignment."""
    rows, columns = x.shape
    return x.new_empty(rows, columns + 6)[:, 1 : 1 + columns].copy_(x)


def _tile(form: str, sizes: Sizes, device: torch.device, place: Callable[[Tensor], Tensor]) -> Tensor:
    """One tile, all of whose tensors are where `place` puts them."""
    left, right = TILES[form](*map(place, _operands(sizes, device)))
    out = place(left.new_empty(len(left), right.shape[1]))
    multiply_into(out, left, right)
    return out


def _operands(sizes: Sizes, device: torch.device) -> list[Tensor]:
    tokens, leaf, whole = sizes
    return [
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)
        for seed, shape in enumerate(((tokens, whole), (leaf, whole), (tokens, leaf)))
    ]
