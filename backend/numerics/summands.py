"""`Summands`: what a sum over the members of a group is made of, and the one way in which exact
numerics finish such a sum.

Only elementwise additions are used, whose bits depend on nothing but the two numbers. See
`core.base.reduction` for the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ...core.base.reduction import CarryTree, Node, maximal_nodes, merges_of
from ..transport.base import Group
from .tree import add_in_place


@dataclass(frozen=True)
class Summands:
    """Who brings which values to a sum over `num_leaves` leaves, which lie on the members one interval after the other.

    `nodes[i]` are the nodes of the canonical tree that member i has a value for, in order: single leaves,
    or sums of its own it has made already. A member may have none. The bits of the sum do not depend on
    which member has which leaf.
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
        return cls(
            sum(counts), tuple(tuple((leaf, leaf + 1) for leaf in range(lo, hi)) for lo, hi in _intervals(counts))
        )

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

    @property
    def order(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How many values each member ships, and the order of their sum, as `Group.tree_sum` takes both."""
        return _order(self)


@lru_cache(maxsize=1024)
def _order(summands: Summands) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shipped = [summands.shipped(member) for member in range(len(summands.nodes))]
    merges = merges_of(summands.num_leaves, [node for theirs in shipped for node in theirs])
    return tuple(map(len, shipped)), merges


def merged(values: Tensor, summands: Summands, member: int) -> Tensor:
    """The values of the nodes that a member ships, [n, ...], in fp32 at least; it shares no memory with `values`."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    tree: CarryTree = CarryTree(summands.num_leaves, torch.add)
    for node, value in zip(summands.nodes[member], wide, strict=True):
        tree.insert(node, value)
    assert tree.nodes == summands.shipped(member)
    return torch.stack([tree.value(node) for node in tree.nodes]) if tree.nodes else wide.clone()


def sum_over(group: Group, values: Tensor, summands: Summands, dtype: torch.dtype = torch.float32) -> Tensor:
    """The finished sum [...] of [n, ...], a value for each node that a member ships, the same on every
    member; `values` are used up.

    Each member finishes the tree for an even part of the elements (all-to-all), then all take all parts (all-gather):
    2(n-1)/n of the data leaves each rank when cuts are aligned. The finished sum is rounded to `dtype`.
    """
    shape = values.shape[1:]
    if not summands.num_leaves:
        return values.new_zeros(shape, dtype=dtype)
    flat = values.reshape(len(values), shape.numel())
    return group.tree_all_reduce(flat, *summands.order, dtype).view(shape)


def part_over(
    group: Group,
    values: Tensor,
    summands: Summands,
    *,
    dim: int,
    sizes: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """This member's `sizes[rank]` items of `sum_over` along a dimension of [...]: its first half, one all-to-all."""
    return _finished(group, values.split(list(sizes), dim + 1), summands).to(dtype)


def open_over(group: Group, values: Tensor, summands: Summands, *, dim: int, sizes: Sequence[int]) -> Tensor:
    """As `part_over`, where the members together do not have all leaves: the values of the largest
    nodes they have, [n, ...]."""
    tree = _joined(group, values.split(list(sizes), dim + 1), summands)
    return torch.stack([tree.value(node) for node in tree.nodes])


def _finished(group: Group, parts: Sequence[Tensor], summands: Summands) -> Tensor:
    """The finished sum of the part that every member has for this one; `parts[i]`, [n, ...], is
    what member i finishes."""
    if not summands.num_leaves:
        own = parts[group.rank]
        return own.new_zeros(own.shape[1:])
    return group.tree_sum(parts, *summands.order)


def _joined(group: Group, parts: Sequence[Tensor], summands: Summands) -> CarryTree[Tensor]:
    """What all members have for the part of this one, added up."""
    nodes, own = [summands.shipped(member) for member in range(group.size)], parts[group.rank]
    arrived = group.all_to_all(parts, [(len(theirs), *own.shape[1:]) for theirs in nodes]) if group.size > 1 else [own]
    tree: CarryTree = CarryTree(summands.num_leaves, add_in_place)
    for theirs, rows in zip(nodes, arrived, strict=True):
        for node, row in zip(theirs, rows, strict=True):
            tree.insert(node, row)
    return tree


def _intervals(sizes: Sequence[int]) -> Iterable[tuple[int, int]]:
    return pairwise(accumulate(sizes, initial=0))
