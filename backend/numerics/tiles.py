"""Products of exact numerics, tile by tile: a block of tokens inside one sample, a whole feature leaf,
a whole uncut dimension.

The bits of a library product change with the shape of its operands, so a tile's shape is a property of the problem. On
the CPU they do not change with addresses and strides, once torch was started with the switch of MKL (`probe` measures
both with a plan's shapes), so tiles are read from and written to the tensors that hold them. Sums over tiles are
elementwise additions in the order of the canonical tree, into buffers that are used again; tiles of a result that is
cut further, into 512 x 512, were slower (docs/log.md). Several tiles are one product, and a product is added to a sum
as it is made, where that was measured to give the same bits (`same_bits`).

Shape suffixes: N rows, which are tokens of several samples; C this rank's part of a cut feature dimension; F a whole
one. `features` are the feature leaves and `blocks` the token blocks, intervals `[lo, hi)` of C and N that follow on one
another; all tensors are fp32, their rows runs of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...core.base.reduction import Node, split
from .same_bits import adds, joins, multiply_into

Interval = tuple[int, int]

ROWS_AT_ONCE = 512
"""Tokens of one product at most: with them a library packs a weight matrix seldom enough."""

Tree = int | tuple["Tree", "Tree"]
"""The order of a sum: the number of a product, or two sums that are added, left plus right."""


def project_tiles(x_NF: Tensor, weight_CF: Tensor, features: Sequence[Interval], blocks: Sequence[Interval]) -> Tensor:
    """x W^T, [n, c]: one product per (leaf, block), or of several where bits are the same."""
    y_NC = x_NF.new_empty(len(x_NF), len(weight_CF))
    if not features or not blocks:
        return y_NC
    weight_t = weight_CF.t()
    for together in groups(blocks, ROWS_AT_ONCE):
        first, last = together[0][0], together[-1][1]
        if joins(x_NF[first:last], weight_t, sizes(together), sizes(features)):
            torch.mm(x_NF[first:last], weight_t, out=y_NC[first:last])
            continue
        for lo, hi in features:
            for start, stop in together:
                multiply_into(y_NC[start:stop, lo:hi], x_NF[start:stop], weight_t[:, lo:hi])
    return y_NC


def contract_tiles(
    x_NC: Tensor, weight_CF: Tensor, features: Sequence[Interval], blocks: Sequence[Interval], nodes: Sequence[Node]
) -> Tensor:
    """x W, [nodes, n, f]: one product per (block, leaf), added up to the values of tree nodes over these leaves."""
    values = x_NC.new_empty(len(nodes), len(x_NC), weight_CF.shape[1])
    weights = [weight_CF[lo:hi] for lo, hi in features]
    trees = [(tree_over(node), value) for node, value in zip(nodes, values, strict=True)]
    buffers: list[Tensor] = []
    for first, last in _joined(x_NC, weights, blocks) if nodes else ():
        parts = [x_NC[first:last, lo:hi] for lo, hi in features]
        for tree, value in trees:
            sum_products_into(value[first:last], tree, parts, weights, buffers)
    return values


def multiply_blocks(x_NF: Tensor, matrix_FK: Tensor, blocks: Sequence[Interval]) -> Tensor:
    """x times a matrix, [n, k]: one product per block."""
    y_NK = x_NF.new_empty(len(x_NF), matrix_FK.shape[1])
    for first, last in _joined(x_NF, [matrix_FK], blocks):
        multiply_into(y_NK[first:last], x_NF[first:last], matrix_FK)
    return y_NK


def sum_products_into(
    out: Tensor, tree: Tree, left: Sequence[Tensor], right: Sequence[Tensor], buffers: list[Tensor], depth: int = 0
) -> None:
    """The sum of `left[i] @ right[i]` over the products i of a tree into `out`, depth first. `buffers` hold the right
    half of every level of the tree, which is no product that can be added as it is made; those that are missing or too
    short are made."""
    if isinstance(tree, int):
        multiply_into(out, left[tree], right[tree])
        return
    sum_products_into(out, tree[0], left, right, buffers, depth)
    add_products_to(out, tree[1], left, right, buffers, depth)


def add_products_to(
    total: Tensor, tree: Tree, left: Sequence[Tensor], right: Sequence[Tensor], buffers: list[Tensor], depth: int = 0
) -> None:
    """Adds the sum of `sum_products_into` to `total`."""
    if isinstance(tree, int) and adds(left[tree], right[tree]):
        total.addmm_(left[tree], right[tree])
        return
    if depth == len(buffers):
        buffers.append(total.new_empty(total.shape))
    elif len(buffers[depth]) < len(total):
        buffers[depth] = total.new_empty(total.shape)
    term = buffers[depth][: len(total)]
    sum_products_into(term, tree, left, right, buffers, depth + 1)
    total.add_(term)


def tree_over(node: Node) -> Tree:
    """The order of the canonical sum over the products of a node.

    >>> tree_over((3, 6))
    ((3, 4), 5)
    """
    if node[1] - node[0] == 1:
        return node[0]
    first, second = split(node)
    return tree_over(first), tree_over(second)


def groups(intervals: Sequence[Interval], most: int) -> Iterator[list[Interval]]:
    """Neighbours that together have `most` items at most, or are one."""
    together: list[Interval] = []
    for lo, hi in intervals:
        if together and hi - together[0][0] > most:
            yield together
            together = []
        together.append((lo, hi))
    if together:
        yield together


def sizes(intervals: Sequence[Interval]) -> list[int]:
    """How long each is."""
    return [hi - lo for lo, hi in intervals]


def _joined(x_NC: Tensor, weights: Sequence[Tensor], blocks: Sequence[Interval]) -> Iterator[Interval]:
    """The blocks, several as one where their products with all of these matrices then have the same bits."""
    shapes = {weight.shape: weight for weight in weights}.values()
    for together in groups(blocks, ROWS_AT_ONCE):
        whole = together[0][0], together[-1][1]
        part = x_NC[whole[0] : whole[1]]
        if all(joins(part[:, : len(each)], each, sizes(together), each.shape[1:]) for each in shapes):
            yield whole
        else:
            yield from together
