"""Canonical sums of tensors: inside one tensor by elementwise additions, and over the members of a group.

Only elementwise additions are used, whose bits depend on nothing but the two numbers. See `core.reduction` for the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.reduction import CarryTree, Node, cut
from ..transport.base import Group


def add_in_place(left: Tensor, right: Tensor) -> Tensor:
    """`left + right`, kept in `left`: for values that belong to the caller."""
    return left.add_(right)


def fold(x: Tensor, dim: int) -> Tensor:
    """The sum over `dim` by adding the upper half to the lower one until one item is left; a middle item waits.

    The order depends on the length alone. It suits the inside of a leaf: whole halves are added at once.
    """
    while (length := x.shape[dim]) > 1:
        half = length // 2
        folded = x.narrow(dim, 0, half) + x.narrow(dim, length - half, half)
        x = torch.cat([folded, x.narrow(dim, half, 1)], dim) if length % 2 else folded
    return x.squeeze(dim)


def tree_fold(x: Tensor, dim: int) -> Tensor:
    """The sum over `dim` as the canonical tree over its items: neighbours pair up, a last odd one waits."""
    while (length := x.shape[dim]) > 1:
        pairs = x.narrow(dim, 0, length - length % 2).unflatten(dim, (length // 2, 2))
        paired = pairs.select(dim + 1, 0) + pairs.select(dim + 1, 1)
        x = torch.cat([paired, x.narrow(dim, length - 1, 1)], dim) if length % 2 else paired
    return x.squeeze(dim)


def token_sums(x_BSN: Tensor, block: int) -> Tensor:
    """Sums over the tokens of each sample, [b, n]: `fold` inside blocks of tokens, the canonical tree over the blocks."""
    samples, sequence, features = x_BSN.shape
    whole = sequence - sequence % block
    blocks = []
    if whole:
        blocks.append(fold(x_BSN[:, :whole].reshape(samples, whole // block, block, features), 2))
    if whole < sequence:
        blocks.append(fold(x_BSN[:, whole:], 1).unsqueeze(1))
    sums = tree_fold(torch.cat(blocks, 1), 1)
    return sums.clone() if sequence == 1 else sums  # one token is its own sum, but the result must not share its memory


def sum_over(group: Group, values: Sequence[Tensor], nodes: Sequence[Sequence[Node]], num_leaves: int) -> Tensor:
    """The finished sum over `num_leaves` leaves that lie on the members of a group, flat, the same on every member.

    `nodes[i]` are the tree nodes that member i holds; `values` are this member's, one flat tensor per node, and are used up. Each
    member finishes the tree for an even part of the elements (all-to-all), then all take all parts (all-gather): 2(n-1)/n of the data
    leaves each rank when cuts are aligned.
    """
    if group.size == 1:
        return _finish(zip(nodes[0], values, strict=True), num_leaves)
    num_elements = values[0].numel()
    parts = [cut(num_elements, group.size, member) for member in range(group.size)]
    lo, hi = parts[group.rank]
    outgoing = [torch.stack([value[first:last] for value in values]) for first, last in parts]
    arrived = group.all_to_all(outgoing, [(len(theirs), hi - lo) for theirs in nodes])
    pairs = [pair for theirs, rows in zip(nodes, arrived, strict=True) for pair in zip(theirs, rows, strict=True)]
    own = _finish(pairs, num_leaves)
    return torch.cat(group.all_gather(own, [(last - first,) for first, last in parts]))


def _finish(pairs, num_leaves: int) -> Tensor:
    tree: CarryTree = CarryTree(num_leaves, add_in_place)
    for node, value in pairs:
        tree.insert(node, value)
    return tree.root()
