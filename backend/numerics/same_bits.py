"""Which larger products of the library have the bits of the tiles inside them on this machine: measured, not assumed.

The bits of exact numerics are those of tiles (`tiles`), each a product of its own. One product of several tiles reads
and packs its operands once, and one that is added to a sum as it is made spares a pass over both. The library promises
neither the same bits, and often has them: for every shape, each of these is compared with the tiles on random numbers
the first time it comes up in a process, and used where no bit differs. What a layout has on a rank decides which
products are tried, so it changes time and never bits.

Numbers are drawn until `LEAST_ELEMENTS` were compared: another order of a sum changes about every second element.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

LEAST_ELEMENTS = 4096


VECTOR_BYTES = 16
"""A matrix whose rows begin at multiples of it is read by a GPU as a copy of it would be, 16 bytes at a time."""


def multiply_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """One tile, `left @ right`, into `out`. Where strides do change bits, tiles are copied: one column, and on a GPU
    where rows are not aligned, or where the product of views was measured to differ from that of their copies.

    `contiguous()` would leave a matrix of one column as it is, whatever the stride of that
    dimension, which changes bits too.
    """
    if (out.is_cpu and out.shape[1] > 1) or (not out.is_cpu and _views_do(out, left, right)):
        torch.mm(left, right, out=out)
    else:
        out.copy_(_of_copies(left, right))


def _of_copies(left: Tensor, right: Tensor) -> Tensor:
    """What a tile is on a GPU: the product of matrices whose rows follow on one another."""
    return torch.mm(*(part.clone(memory_format=torch.contiguous_format) for part in (left, right)))


def _views_do(*matrices: Tensor) -> bool:
    """Whether the library makes a tile on a GPU from these views as from their copies."""
    aligned = all(
        each.data_ptr() % VECTOR_BYTES == 0 and max(each.stride()) * each.element_size() % VECTOR_BYTES == 0
        for each in matrices
    )
    return aligned and _same_from_views(
        tuple((tuple(each.shape), each.stride()) for each in matrices), matrices[0].device, matrices[0].dtype
    )


Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides of a matrix."""


@lru_cache(maxsize=4096)
def _same_from_views(places: tuple[Place, ...], device: torch.device, dtype: torch.dtype) -> bool:
    """Measured on the device the first time that a product comes up there; the host waits for it then."""
    (rows, columns), _ = places[0]
    for seed in range(_draws(rows * columns)):
        out, left, right = (_placed(place, 3 * seed + number, device, dtype) for number, place in enumerate(places))
        torch.mm(left, right, out=out)
        if not torch.equal(out, _of_copies(left, right)):
            return False
    return True


def _placed(place: Place, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Random numbers with these sizes and strides, others between them."""
    shape, strides = place
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if min(shape) else 0
    numbers = torch.empty(extent).uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))
    return numbers.to(device, dtype).as_strided(shape, strides)


class Operands(NamedTuple):
    """What the bits of a product depend on besides its shape: where the columns of a matrix, and not its rows, are runs
    of memory, the library's threads, and the device that multiplies."""

    left_turned: bool
    right_turned: bool
    threads: int
    device: torch.device

    @classmethod
    def of(cls, left: Tensor, right: Tensor) -> Operands:
        """Those of `left @ right`."""
        return cls(left.stride(1) != 1, right.stride(1) != 1, torch.get_num_threads(), left.device)

    def joins(self, rows: tuple[int, ...], inner: int, columns: tuple[int, ...]) -> bool:
        """Whether one product of length `inner` has in each of its tiles, of so many rows and columns, the bits of the
        tile's own product."""
        return len(rows) == len(columns) == 1 or _joins(self, rows, inner, columns)

    def adds(self, rows: int, inner: int, columns: int) -> bool:
        """Whether a product that is added to a sum while it is made (`addmm_`) gives the bits of one that is added
        afterwards. Not on a GPU, where they would be those of views, not of copies."""
        return self.device.type == "cpu" and columns > 1 and _adds(self, rows, inner, columns)


@lru_cache(maxsize=4096)
def _joins(operands: Operands, rows: tuple[int, ...], inner: int, columns: tuple[int, ...]) -> bool:
    for seed in range(_draws(sum(rows) * sum(columns))):
        left, right = _operands(operands, seed, sum(rows), inner, sum(columns))
        whole = left.new_empty(sum(rows), sum(columns))
        multiply_into(whole, left, right)
        for lefts, wholes in zip(left.split(rows), whole.split(rows), strict=True):
            for part, of_whole in zip(right.split(columns, 1), wholes.split(columns, 1), strict=True):
                tile = torch.empty_like(of_whole)
                multiply_into(tile, lefts, part)
                if not torch.equal(tile, of_whole):
                    return False
    return True


@lru_cache(maxsize=4096)
def _adds(operands: Operands, rows: int, inner: int, columns: int) -> bool:
    for seed in range(_draws(rows * columns)):
        left, right = _operands(operands, seed, rows, inner, columns)
        total = _drawn(seed, rows, columns, operands.device, turned=False)
        product = torch.empty_like(total)
        multiply_into(product, left, right)
        if not torch.equal(total + product, total.clone().addmm_(left, right)):
            return False
    return True


def _draws(num_elements: int) -> int:
    return math.ceil(LEAST_ELEMENTS / num_elements) if num_elements else 0


def _operands(operands: Operands, seed: int, rows: int, inner: int, columns: int) -> tuple[Tensor, Tensor]:
    left = _drawn(2 * seed + 1, rows, inner, operands.device, turned=operands.left_turned)
    return left, _drawn(2 * seed + 2, inner, columns, operands.device, turned=operands.right_turned)


def _drawn(seed: int, rows: int, columns: int, device: torch.device, *, turned: bool) -> Tensor:
    """Random numbers, [rows, columns], stored column by column if `turned`."""
    shape, generator = (columns, rows) if turned else (rows, columns), torch.Generator().manual_seed(seed)
    numbers = torch.empty(shape).uniform_(-1, 1, generator=generator).to(device)
    return numbers.t() if turned else numbers
