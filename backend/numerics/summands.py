"""`Summands`: what a sum over the members of a group is made of, and the canonical sum of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ...core.reduction import CarryTree, Node, cut, maximal_nodes
from ..transport.base import Group
from .tree import add_in_place


@dataclass(frozen=True)
class Summands:
    """Who brings which values to a sum over `num_leaves` leaves, which lie on the members one interval after the other.

    `nodes[i]` are the nodes of the canonical tree that member i has a value for, in order: single leaves, or sums of its own it has
    made already. A member may have none. The bits of the sum do not depend on which member has which leaf.
    """

    num_leaves: int
    nodes: tuple[tuple[Node, ...], ...]

    @classmethod
    def one_each(cls, size: int) -> Summands:
        """Every member is a leaf: the order is fixed, but the bits depend on how many members there are."""
        return cls.leaves([1] * size)

    @classmethod
    def leaves(cls, counts: Sequence[int]) -> Summands:
        """`counts[i]` leaves on member i, each with a value of its own."""
        return cls(sum(counts), tuple(tuple((leaf, leaf + 1) for leaf in range(lo, hi)) for lo, hi in _intervals(counts)))

    @classmethod
    def partial_sums(cls, counts: Sequence[int]) -> Summands:
        """`counts[i]` leaves on member i, which it has added up to the largest nodes of the tree inside its interval.

        >>> Summands.partial_sums([3, 3]).nodes
        (((0, 2), (2, 3)), ((3, 4), (4, 6)))
        """
        return cls(sum(counts), tuple(maximal_nodes(sum(counts), lo, hi) for lo, hi in _intervals(counts)))

    def shipped(self, member: int) -> tuple[Node, ...]:
        """The nodes that a member sends: the largest ones it can make of what it has."""
        own = self.nodes[member]
        return maximal_nodes(self.num_leaves, own[0][0], own[-1][1]) if own else ()


def canonical_sum(values: Tensor, summands: Summands, group: Group) -> Tensor:
    """[n, ...] of this member's nodes -> [...], the sum over all leaves, the same on every member. fp32 at least, rounded once.

    Each member finishes an even part of the elements (all-to-all), then all take all parts (all-gather).
    """
    shape, partial = values.shape[1:], _merged(values, summands, group.rank)
    elements = shape.numel()
    bounds = [cut(elements, group.size, member) for member in range(group.size)]
    own = _finished(partial.view(len(partial), elements), summands, group, bounds).to(values.dtype)
    whole = own if group.size == 1 else torch.cat(group.all_gather(own, [(hi - lo,) for lo, hi in bounds]))
    return whole.view(shape)


def canonical_part(values: Tensor, summands: Summands, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    """This member's `sizes[rank]` items of `canonical_sum` along a dimension of [...]: its first half, one all-to-all."""
    partial = _merged(values, summands, group.rank).movedim(dim + 1, 1)
    rows = partial.shape[2:]
    bounds = [(lo * rows.numel(), hi * rows.numel()) for lo, hi in _intervals(sizes)]
    own = _finished(partial.reshape(len(partial), partial.shape[1] * rows.numel()), summands, group, bounds)
    return own.view(sizes[group.rank], *rows).movedim(0, dim).contiguous().to(values.dtype)


def _merged(values: Tensor, summands: Summands, member: int) -> Tensor:
    """The values of the nodes that a member ships, [n, ...], in fp32 at least; it shares no memory with `values`."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    tree: CarryTree = CarryTree(summands.num_leaves, torch.add)
    for node, value in zip(summands.nodes[member], wide, strict=True):
        tree.insert(node, value)
    assert tree.nodes == summands.shipped(member)
    return torch.stack([tree.value(node) for node in tree.nodes]) if tree.nodes else wide.clone()


def _finished(partial: Tensor, summands: Summands, group: Group, bounds: Sequence[tuple[int, int]]) -> Tensor:
    """The finished sum of this member's elements `bounds[rank]`, flat, from [nodes, elements] on every member."""
    lo, hi = bounds[group.rank]
    nodes = [summands.shipped(member) for member in range(group.size)]
    arrived = group.all_to_all([partial[:, first:last] for first, last in bounds], [(len(theirs), hi - lo) for theirs in nodes])
    if summands.num_leaves == 0:
        return partial.new_zeros(hi - lo)
    tree: CarryTree = CarryTree(summands.num_leaves, add_in_place)
    for theirs, rows in zip(nodes, arrived, strict=True):
        for node, row in zip(theirs, rows, strict=True):
            tree.insert(node, row)
    return tree.root()


def _intervals(sizes: Sequence[int]) -> Iterable[tuple[int, int]]:
    return pairwise(accumulate(sizes, initial=0))
