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
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

LEAST_ELEMENTS = 4096


def multiply_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """One tile, `left @ right`, into `out`. Where strides do change bits, tiles are copied: for
    one column, and on a GPU.

    `contiguous()` would leave a matrix of one column as it is, whatever the stride of that
    dimension, which changes bits too.
    """
    if out.is_cpu and out.shape[1] > 1:
        torch.mm(left, right, out=out)
    else:
        out.copy_(torch.mm(*(part.clone(memory_format=torch.contiguous_format) for part in (left, right))))


def joins(left: Tensor, right: Tensor, rows: Sequence[int], columns: Sequence[int]) -> bool:
    """Whether `left @ right` has in each of its tiles, of so many rows and columns, the bits of the tile's own
    product."""
    if not left.is_cpu:
        return False
    if len(rows) == len(columns) == 1:
        return columns[0] > 1
    return _joins(_turned(left), _turned(right), tuple(rows), left.shape[1], tuple(columns), torch.get_num_threads())


def adds(left: Tensor, right: Tensor) -> bool:
    """Whether a product added to a sum while it is made (`addmm_`) gives the bits of the product added afterwards."""
    if not left.is_cpu or right.shape[1] == 1:
        return False
    return _adds(_turned(left), _turned(right), len(left), left.shape[1], right.shape[1], torch.get_num_threads())


def _turned(matrix: Tensor) -> bool:
    """Whether the columns of a matrix are runs of memory, and not its rows."""
    return matrix.stride(1) != 1


@lru_cache(maxsize=4096)
def _joins(
    left_turned: bool, right_turned: bool, rows: tuple[int, ...], inner: int, columns: tuple[int, ...], threads: int
) -> bool:
    for seed in range(_draws(sum(rows) * sum(columns))):
        left, right = _drawn(seed, sum(rows), inner, left_turned), _drawn(~seed, inner, sum(columns), right_turned)
        whole = left @ right
        for lefts, wholes in zip(left.split(rows), whole.split(rows), strict=True):
            for part, of_whole in zip(right.split(columns, 1), wholes.split(columns, 1), strict=True):
                tile = torch.empty_like(of_whole)
                multiply_into(tile, lefts, part)
                if not torch.equal(tile, of_whole):
                    return False
    return True


@lru_cache(maxsize=4096)
def _adds(left_turned: bool, right_turned: bool, rows: int, inner: int, columns: int, threads: int) -> bool:
    for seed in range(_draws(rows * columns)):
        left, right = _drawn(seed, rows, inner, left_turned), _drawn(~seed, inner, columns, right_turned)
        total, product = _drawn(seed + 1, rows, columns, False), torch.empty(rows, columns)
        multiply_into(product, left, right)
        if not torch.equal(total + product, total.clone().addmm_(left, right)):
            return False
    return True


def _draws(num_elements: int) -> int:
    return math.ceil(LEAST_ELEMENTS / num_elements) if num_elements else 0


def _drawn(seed: int, rows: int, columns: int, turned: bool) -> Tensor:
    """Random numbers, [rows, columns], stored column by column if `turned`."""
    generator = torch.Generator().manual_seed(seed % 2**32)
    numbers = torch.empty((columns, rows) if turned else (rows, columns)).uniform_(-1, 1, generator=generator)
    return numbers.t() if turned else numbers
