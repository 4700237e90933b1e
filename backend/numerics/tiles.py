"""Products of exact numerics, tile by tile: a block of tokens inside one sample, a whole feature leaf,
a whole uncut dimension.

The bits of a library product change with the shape of its operands, so a tile's shape is a property of the problem. On
the CPU they do not change with addresses and strides, once torch was started with the switch of MKL (`probe` measures
both with a plan's shapes), so tiles are read from and written to the tensors that hold them. Sums over tiles are
elementwise additions in the order of the canonical tree, into buffers that are used again; tiles of a result that is
cut further, into 512 x 512, were slower (docs/log.md). Several tiles are one product, and a product is added to a sum
as it is made, where that was measured to give the same bits (`same_bits`). What is done for given shapes is worked out
once.

Shape suffixes: N rows, which are tokens of several samples; C this rank's part of a cut feature dimension; F a whole
one. `features` are the feature leaves and `blocks` the token blocks, intervals `[lo, hi)` of C and N that follow on one
another; all tensors are fp32, their rows runs of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from functools import lru_cache

from torch import Tensor

from ...core.base.reduction import Node, split
from .same_bits import Operands, multiply_into

Interval = tuple[int, int]
Intervals = tuple[Interval, ...]

ROWS_AT_ONCE = 512
"""Tokens of one product at most: with them a library packs a weight matrix seldom enough."""

Tree = int | tuple["Tree", "Tree"]
"""The order of a sum: the number of a product, or two sums that are added, left plus right."""


class Op(Enum):
    """What a step does to its target, a place of the sum or one of the buffers after it."""

    SET = auto()
    """Product `source` is written there."""
    ADD_PRODUCT = auto()
    """Product `source` is added as it is made."""
    ADD = auto()
    """Place `source` is added."""


Step = tuple[Op, int, int]
"""(what, target, source)."""


def project_tiles(x_NF: Tensor, weight_CF: Tensor, features: Intervals, blocks: Intervals) -> Tensor:
    """x W^T, [n, c]: one product per (leaf, block), or of several where bits are the same."""
    y_NC = x_NF.new_empty(len(x_NF), len(weight_CF))
    weight_t = weight_CF.t()
    for (first, last), (lo, hi) in _projection(Operands.of(x_NF, weight_t), features, blocks, x_NF.shape[1]):
        multiply_into(y_NC[first:last, lo:hi], x_NF[first:last], weight_t[:, lo:hi])
    return y_NC


def contract_tiles(
    x_NC: Tensor, weight_CF: Tensor, features: Intervals, blocks: Intervals, nodes: tuple[Node, ...]
) -> Tensor:
    """x W, [nodes, n, f]: one product per (block, leaf), added up to the values of tree nodes over these leaves."""
    values = x_NC.new_empty(len(nodes), len(x_NC), weight_CF.shape[1])
    if not nodes:
        return values
    rows, orders = _contraction(Operands.of(x_NC, weight_CF), features, blocks, nodes, weight_CF.shape[1])
    weights = weight_CF.split_with_sizes(sizes(features))
    buffers = scratch(values[0], max(sizes(rows)), orders)
    for first, last in rows:
        parts = x_NC[first:last].split_with_sizes(sizes(features), 1)
        room = [buffer[: last - first] for buffer in buffers]
        for value, order in zip(values.unbind(), orders, strict=True):
            follow(order, [value[first:last], *room], parts, weights)
    return values


def multiply_blocks(x_NF: Tensor, matrix_FK: Tensor, blocks: Intervals) -> Tensor:
    """x times a matrix, [n, k]: one product per block, or of several where bits are the same."""
    y_NK = x_NF.new_empty(len(x_NF), matrix_FK.shape[1])
    for first, last in _rows(Operands.of(x_NF, matrix_FK), blocks, (x_NF.shape[1],), matrix_FK.shape[1]):
        multiply_into(y_NK[first:last], x_NF[first:last], matrix_FK)
    return y_NK


def follow(order: Sequence[Step], places: Sequence[Tensor], left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    """Makes a sum of products `left[i] @ right[i]` in the first of `places`; the others are `scratch`."""
    for op, target, source in order:
        if op is Op.SET:
            multiply_into(places[target], left[source], right[source])
        elif op is Op.ADD_PRODUCT:
            places[target].addmm_(left[source], right[source])
        else:
            places[target].add_(places[source])


def steps(tree: Tree, as_made: Callable[[int], bool], *, added: bool = False) -> tuple[Step, ...]:
    """A sum of products, depth first, written to place 0 or `added` to it. `as_made(i)` says of a product whether it
    can be added as it is made; a right half that is anything else lies in a place of its own before.

    >>> [f"{op.name} {target} {source}" for op, target, source in steps(((0, 1), 2), lambda product: product < 2)]
    ['SET 0 0', 'ADD_PRODUCT 0 1', 'SET 1 2', 'ADD 0 1']
    """

    def written(tree: Tree, place: int) -> Iterator[Step]:
        if isinstance(tree, int):
            yield Op.SET, place, tree
        else:
            yield from written(tree[0], place)
            yield from over(tree[1], place)

    def over(tree: Tree, place: int) -> Iterator[Step]:
        if isinstance(tree, int) and as_made(tree):
            yield Op.ADD_PRODUCT, place, tree
        else:
            yield from written(tree, place + 1)
            yield Op.ADD, place, place + 1

    return tuple(over(tree, 0) if added else written(tree, 0))


def scratch(like: Tensor, num_rows: int, orders: Sequence[Sequence[Step]]) -> list[Tensor]:
    """The buffers [num_rows, ...] that these sums need besides their result."""
    count = max(target for order in orders for _, target, _ in order)
    return [like.new_empty(num_rows, *like.shape[1:]) for _ in range(count)]


def tree_over(node: Node) -> Tree:
    """The order of the canonical sum over the products of a node.

    >>> tree_over((3, 6))
    ((3, 4), 5)
    """
    if node[1] - node[0] == 1:
        return node[0]
    first, second = split(node)
    return tree_over(first), tree_over(second)


def groups(intervals: Sequence[Interval], most: int) -> Iterator[Intervals]:
    """Neighbours that together have `most` items at most, or are one."""
    together: list[Interval] = []
    for lo, hi in intervals:
        if together and hi - together[0][0] > most:
            yield tuple(together)
            together = []
        together.append((lo, hi))
    if together:
        yield tuple(together)


@lru_cache(maxsize=1024)
def sizes(intervals: Intervals) -> tuple[int, ...]:
    """How long each is."""
    return tuple(hi - lo for lo, hi in intervals)


@lru_cache(maxsize=1024)
def _projection(
    operands: Operands, features: Intervals, blocks: Intervals, inner: int
) -> tuple[tuple[Interval, Interval], ...]:
    """The rows and columns of every product of `project_tiles`."""
    found: list[tuple[Interval, Interval]] = []
    for together in groups(blocks, ROWS_AT_ONCE) if features else ():
        if operands.joins(sizes(together), inner, sizes(features)):
            found.append(((together[0][0], together[-1][1]), (features[0][0], features[-1][1])))
        else:
            found += [(block, leaf) for leaf in features for block in together]
    return tuple(found)


@lru_cache(maxsize=1024)
def _contraction(
    operands: Operands, features: Intervals, blocks: Intervals, nodes: tuple[Node, ...], width: int
) -> tuple[Intervals, tuple[tuple[Step, ...], ...]]:
    """The rows that products of `contract_tiles` have, and the order of the sum of each node."""
    inner = sizes(features)
    rows = _rows(operands, blocks, inner, width)

    def as_made(leaf: int) -> bool:
        return all(operands.adds(count, inner[leaf], width) for count in sizes(rows))

    return rows, tuple(steps(tree_over(node), as_made) for node in nodes)


@lru_cache(maxsize=1024)
def _rows(operands: Operands, blocks: Intervals, inner: tuple[int, ...], width: int) -> Intervals:
    """The blocks, several as one where products of all of these lengths then have the same bits."""
    found: list[Interval] = []
    for together in groups(blocks, ROWS_AT_ONCE):
        if all(operands.joins(sizes(together), each, (width,)) for each in set(inner)):
            found.append((together[0][0], together[-1][1]))
        else:
            found += together
    return tuple(found)
