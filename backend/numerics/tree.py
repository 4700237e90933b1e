"""Canonical sums of tensors: inside one tensor by elementwise additions, and over the members of a group.

Only elementwise additions are used, whose bits depend on nothing but the two numbers. See `core.reduction` for the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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


def block_sums(x_BSN: Tensor, block: int) -> Tensor:
    """Sums over blocks of tokens, [b, blocks, n], the last block shorter where `block` does not divide s: `fold` inside each."""
    samples, sequence, features = x_BSN.shape
    whole = sequence - sequence % block
    blocks = []
    if whole:
        blocks.append(fold(x_BSN[:, :whole].reshape(samples, whole // block, block, features), 2))
    if whole < sequence:
        blocks.append(fold(x_BSN[:, whole:], 1).unsqueeze(1))
    return torch.cat(blocks, 1)


def token_sums(x_BSN: Tensor, block: int) -> Tensor:
    """Sums over the tokens of each sample, [b, n]: those of blocks, then the canonical tree over the blocks."""
    sums = tree_fold(block_sums(x_BSN, block), 1)
    return sums.clone() if x_BSN.shape[1] == 1 else sums  # one token is its own sum, but the result must not share its memory


def token_nodes(x_BSN: Tensor, block: int, nodes: Sequence[Node]) -> Tensor:
    """The tree nodes of a rank that has only the tokens of `nodes`, in order: [b, nodes, n]."""
    sums, first = block_sums(x_BSN, block), nodes[0][0]
    return torch.stack([tree_fold(sums[:, lo - first : hi - first], 1) for lo, hi in nodes], 1)


def finished_part(
    group: Group,
    values: Sequence[Tensor],
    nodes: Sequence[Sequence[Node]],
    num_leaves: int,
    parts_of: Callable[[Tensor], Sequence[Tensor]],
) -> Tensor:
    """The finished sum of this member's part of the elements, flat: the first half of `sum_over`.

    `parts_of` cuts a value into the members' parts, flat ones.
    """
    cuts = [parts_of(value) for value in values]
    outgoing = [torch.stack(parts) for parts in zip(*cuts, strict=True)]
    own = outgoing[group.rank].shape[1]
    arrived = group.all_to_all(outgoing, [(len(theirs), own) for theirs in nodes])
    pairs = [pair for theirs, rows in zip(nodes, arrived, strict=True) for pair in zip(theirs, rows, strict=True)]
    return _finish(pairs, num_leaves)


def sum_over(
    group: Group,
    values: Sequence[Tensor],
    nodes: Sequence[Sequence[Node]],
    num_leaves: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The finished sum over `num_leaves` leaves that lie on the members of a group, flat, the same on every member.

    `nodes[i]` are the tree nodes that member i holds; `values` are this member's, one flat tensor per node, and are used up. Each
    member finishes the tree for an even part of the elements (all-to-all), then all take all parts (all-gather): 2(n-1)/n of the data
    leaves each rank when cuts are aligned. The finished sum is rounded to `dtype`.
    """
    if group.size == 1:
        return _finish(zip(nodes[0], values, strict=True), num_leaves).to(dtype)
    parts = [cut(values[0].numel(), group.size, member) for member in range(group.size)]
    own = finished_part(group, values, nodes, num_leaves, lambda value: [value[first:last] for first, last in parts]).to(dtype)
    return torch.cat(group.all_gather(own, [(last - first,) for first, last in parts]))


def _finish(pairs, num_leaves: int) -> Tensor:
    tree: CarryTree = CarryTree(num_leaves, add_in_place)
    for node, value in pairs:
        tree.insert(node, value)
    return tree.root()
