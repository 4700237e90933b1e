"""Products of exact numerics, tile by tile: a block of tokens inside one sample, a whole feature leaf,
a whole uncut dimension.

The bits of a library product change with the shape of its operands, so a tile's shape is a property of the problem. On
the CPU they do not change with addresses and strides, once torch was started with the switch of MKL (`probe` measures
both with a plan's shapes), so tiles are read from and written to the tensors that hold them. Sums over tiles are
elementwise additions in the order of the canonical tree, into buffers that are used again; tiles of a result that is
cut further, into 512 x 512, were slower (docs/log.md).

Shape suffixes: N rows, which are tokens of several samples; C this rank's part of a cut feature dimension; F a whole
one. `features` are the feature leaves and `blocks` the token blocks, intervals `[lo, hi)` of C and N; all tensors are
fp32, their rows runs of memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.base.reduction import Node, split

Interval = tuple[int, int]


def project_tiles(x_NF: Tensor, weight_CF: Tensor, features: Sequence[Interval], blocks: Sequence[Interval]) -> Tensor:
    """x W^T, [n, c]: one product per (leaf, block)."""
    y_NC = x_NF.new_empty(len(x_NF), len(weight_CF))
    rows = [x_NF[first:last] for first, last in blocks]
    for lo, hi in features:
        weight_t, column = weight_CF[lo:hi].t(), y_NC[:, lo:hi]
        for row, (first, last) in zip(rows, blocks, strict=True):
            multiply_into(column[first:last], row, weight_t)
    return y_NC


def contract_tiles(
    x_NC: Tensor, weight_CF: Tensor, features: Sequence[Interval], blocks: Sequence[Interval], nodes: Sequence[Node]
) -> Tensor:
    """x W, [nodes, n, f]: one product per (block, leaf), added up to the values of tree nodes over these leaves."""
    values = x_NC.new_empty(len(nodes), len(x_NC), weight_CF.shape[1])
    weights = [weight_CF[lo:hi] for lo, hi in features]
    buffers = scratch(values[0], _longest(blocks), _longest(nodes)) if nodes else []
    for first, last in blocks:
        parts = [x_NC[first:last, lo:hi] for lo, hi in features]
        room = [buffer[: last - first] for buffer in buffers]
        for node, value in zip(nodes, values, strict=True):
            sum_products_into(value[first:last], node, parts, weights, room)
    return values


def outer_tiles(
    x_NC: Tensor, y_NF: Tensor, features: Sequence[Interval], blocks: Sequence[Interval], node: Node
) -> Tensor:
    """x^T y over the blocks of a tree node over them, [c, f]: one product per (leaf, block)."""
    total_CF = y_NF.new_empty(x_NC.shape[1], y_NF.shape[1])
    columns_t, rows = [x_NC[first:last].t() for first, last in blocks], [y_NF[first:last] for first, last in blocks]
    buffers = scratch(total_CF, _longest(features), node[1] - node[0])
    for lo, hi in features:
        parts = [column_t[lo:hi] for column_t in columns_t]
        room = [buffer[: hi - lo] for buffer in buffers]
        sum_products_into(total_CF[lo:hi], node, parts, rows, room)
    return total_CF


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


def sum_products_into(
    out: Tensor, node: Node, left: Sequence[Tensor], right: Sequence[Tensor], room: Sequence[Tensor]
) -> None:
    """The sum of `left[i] @ right[i]` over the leaves i of a tree node into `out`, depth first; `room` is
    what `scratch` makes."""
    if node[1] - node[0] == 1:
        multiply_into(out, left[node[0]], right[node[0]])
        return
    first, second = split(node)
    sum_products_into(out, first, left, right, room)
    sum_products_into(room[0], second, left, right, room[1:])
    out.add_(room[0])


def scratch(like: Tensor, num_rows: int, num_leaves: int) -> list[Tensor]:
    """The buffers [num_rows, ...] that a tree over so many leaves needs besides its result: the right half of
    every level above a leaf."""
    return [like.new_empty(num_rows, *like.shape[1:]) for _ in range((num_leaves - 1).bit_length())]


def _longest(intervals: Sequence[Interval]) -> int:
    return max(hi - lo for lo, hi in intervals)
