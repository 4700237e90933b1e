"""`OuterSums`: weight gradients of exact numerics that are computed into the sum they belong to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from ...core.base.reduction import Node, split
from .same_bits import Operands
from .sample_sums import SampleSums
from .tiles import Intervals, Step, Tree, follow, groups, scratch, sizes, steps, tree_over

BYTES_AT_ONCE = 1 << 20
"""Of a sum that all its products are added to before the next rows of it come: what stays in the second cache."""


@dataclass(frozen=True)
class OuterSums(SampleSums):
    """For every sample the sum over tokens of x_C y_F^T, [c, f].

    `x_BSC` and `y_BSF` are fp32, `features` the feature leaves, intervals of C, and `blocks` the token blocks that make
    up a sample. A tile is a product over one block of tokens for one leaf; a sample's sum is the canonical tree over
    its blocks.
    """

    x_BSC: Tensor
    y_BSF: Tensor
    features: Intervals
    blocks: Intervals

    def __len__(self) -> int:
        return len(self.x_BSC)

    def total(self, samples: Node) -> Tensor:
        total_CF = self.y_BSF.new_empty(self.x_BSC.shape[2], self.y_BSF.shape[2])
        self._make(samples, total_CF, added=False)
        return total_CF

    def add_to(self, total: Tensor, samples: Node) -> None:
        self._make(samples, total, added=True)

    def _make(self, samples: Node, total_CF: Tensor, *, added: bool) -> None:
        """Writes the sum over samples to `total_CF` or adds it, some rows after the other."""
        tokens = sizes(self.blocks)
        rows = [part for y_SF in self.y_BSF.unbind() for part in y_SF.split_with_sizes(tokens)]
        columns_t = [part.t() for x_SC in self.x_BSC.unbind() for part in x_SC.split_with_sizes(tokens)]
        operands, width = Operands.of(columns_t[0], rows[0]), total_CF.shape[1]
        pieces, order = _way(operands, self.features, self.blocks, width, samples, added)
        pieces_of_columns = zip(*(column_t.split_with_sizes(pieces) for column_t in columns_t), strict=True)
        buffers = scratch(total_CF, max(pieces), [order])
        for piece, parts in zip(total_CF.split_with_sizes(pieces), pieces_of_columns, strict=True):
            follow(order, [piece, *(buffer[: len(piece)] for buffer in buffers)], parts, rows)


@lru_cache(maxsize=1024)
def _way(
    operands: Operands, features: Intervals, blocks: Intervals, width: int, samples: Node, added: bool
) -> tuple[tuple[int, ...], tuple[Step, ...]]:
    """How many rows of a sum are made at a time, one piece after the other, and the order of each."""
    tokens, pieces = sizes(blocks), list[int]()
    for together in groups(features, max(1, BYTES_AT_ONCE // (4 * width))):
        joined = all(operands.joins(sizes(together), count, (width,)) for count in set(tokens))
        pieces += [together[-1][1] - together[0][0]] if joined else sizes(together)

    def as_made(product: int) -> bool:
        return all(operands.adds(piece, tokens[product % len(tokens)], width) for piece in set(pieces))

    return tuple(pieces), steps(_order(samples, tree_over((0, len(tokens)))), as_made, added=added)


def _order(samples: Node, blocks: Tree) -> Tree:
    """Of the sum over the samples of a node, each of which is one over its blocks: product `sample * number of blocks +
    block` is that of a block."""
    if samples[1] - samples[0] > 1:
        left, right = split(samples)
        return _order(left, blocks), _order(right, blocks)
    return _numbered(blocks, samples[0] * (_last(blocks) + 1))


def _last(tree: Tree) -> int:
    return tree if isinstance(tree, int) else _last(tree[1])


def _numbered(tree: Tree, first: int) -> Tree:
    """The same tree over products that are counted from `first`."""
    if isinstance(tree, int):
        return tree + first
    return _numbered(tree[0], first), _numbered(tree[1], first)


def outer_sum(x_SC: Tensor, y_SF: Tensor, features: Intervals, blocks: Intervals) -> Tensor:
    """x^T y of one sample over some of its blocks, which are a node of the tree over them all, [c, f]."""
    lo, hi = blocks[0][0], blocks[-1][1]
    inside = tuple((first - lo, last - lo) for first, last in blocks)
    return OuterSums(x_SC[lo:hi].unsqueeze(0), y_SF[lo:hi].unsqueeze(0), features, inside).total((0, 1))
