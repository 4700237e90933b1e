"""`OuterSums`: weight gradients of exact numerics that are computed into the sum they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from torch import Tensor

from ...core.base.reduction import CarryTree, Node, maximal_nodes, sibling, split
from .same_bits import joins
from .tiles import Interval, Tree, add_products_to, groups, sizes, sum_products_into, tree_over

BYTES_AT_ONCE = 1 << 20
"""Of a sum that all its products are added to before the next rows of it come: what stays in the second cache."""


@dataclass(frozen=True)
class OuterSums(Sequence[Tensor]):
    """The sums over tokens of x_C y_F^T for every sample, [c, f] each, not computed yet; item by item they are.

    `x_BSC` and `y_BSF` are fp32, `features` the feature leaves, intervals of C, and `blocks` the token blocks of a
    sample. A tile is a product over one block of tokens for one leaf; a sample's sum is the canonical tree over its
    blocks.
    """

    x_BSC: Tensor
    y_BSF: Tensor
    features: Sequence[Interval]
    blocks: Sequence[Interval]

    def __len__(self) -> int:
        return len(self.x_BSC)

    @overload
    def __getitem__(self, sample: int) -> Tensor: ...

    @overload
    def __getitem__(self, sample: slice) -> list[Tensor]: ...

    def __getitem__(self, sample: int | slice) -> Tensor | list[Tensor]:
        if isinstance(sample, slice):
            return [self[each] for each in range(*sample.indices(len(self)))]
        if not -len(self) <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}.")
        return self.total(self._order((sample % len(self), sample % len(self) + 1)))

    def insert_into(self, batch: CarryTree[Tensor], first_sample: int) -> None:
        """Adds all samples to the tree over the samples of a global batch, whose next are these."""
        for lo, hi in maximal_nodes(batch.num_leaves, first_sample, first_sample + len(self)):
            order, other = self._order((lo - first_sample, hi - first_sample)), sibling(batch.num_leaves, (lo, hi))
            if other is None or other not in batch.nodes:
                batch.insert((lo, hi), self.total(order))
                continue
            total = batch.take(other)  # on the left or on the right: an addition has the same bits both ways
            self.add_to(total, order)
            batch.insert((min(lo, other[0]), max(hi, other[1])), total)

    def total(self, order: Tree) -> Tensor:
        """A sum of products, [c, f]."""
        total_CF = self.y_BSF.new_empty(self.x_BSC.shape[2], self.y_BSF.shape[2])
        buffers: list[Tensor] = []
        for (lo, hi), columns_t, rows in self._pieces():
            sum_products_into(total_CF[lo:hi], order, columns_t, rows, buffers)
        return total_CF

    def add_to(self, total_CF: Tensor, order: Tree) -> None:
        """Adds a sum of products to one."""
        buffers: list[Tensor] = []
        for (lo, hi), columns_t, rows in self._pieces():
            add_products_to(total_CF[lo:hi], order, columns_t, rows, buffers)

    def _order(self, samples: Node) -> Tree:
        """Of the sum over the samples of a node: product `sample * blocks + block` is that of a block."""
        if samples[1] - samples[0] > 1:
            left, right = split(samples)
            return self._order(left), self._order(right)
        return _numbered(tree_over((0, len(self.blocks))), samples[0] * len(self.blocks))

    def _pieces(self) -> Iterator[tuple[Interval, list[Tensor], list[Tensor]]]:
        """Intervals of rows of a sum, one after the other, with both operands of all products."""
        rows = [y_SF[first:last] for y_SF in self.y_BSF for first, last in self.blocks]
        columns_t = [x_SC[first:last].t() for x_SC in self.x_BSC for first, last in self.blocks]
        shapes = {len(row): (row, column_t) for row, column_t in zip(rows, columns_t, strict=True)}.values()
        for together in groups(self.features, max(1, BYTES_AT_ONCE // (4 * self.y_BSF.shape[2]))):
            lo, hi = together[0][0], together[-1][1]
            width = list(self.y_BSF.shape[2:])
            if all(joins(column_t[lo:hi], row, sizes(together), width) for row, column_t in shapes):
                together = [(lo, hi)]
            for start, stop in together:
                yield (start, stop), [column_t[start:stop] for column_t in columns_t], rows


def _numbered(tree: Tree, first: int) -> Tree:
    """The same tree over products that are counted from `first`."""
    if isinstance(tree, int):
        return tree + first
    return _numbered(tree[0], first), _numbered(tree[1], first)


def outer_sum(x_SC: Tensor, y_SF: Tensor, features: Sequence[Interval], blocks: Sequence[Interval]) -> Tensor:
    """x^T y of one sample over some of its blocks, which are a node of the tree over them all, [c, f]."""
    (total,) = OuterSums(x_SC.unsqueeze(0), y_SF.unsqueeze(0), features, blocks)
    return total
