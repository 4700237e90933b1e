"""What context-parallel ranks exchange for attention: heads for tokens between neighbours, and between the others
keys and values, whose gradients go back to the ranks that own them.

Neighbours have chunks of the sequence that lie side by side, early and late ones: together they have the two chunks of
one of cp_outer ranks. So after heads have been exchanged for tokens (DeepSpeed-Ulysses, arXiv 2309.14509), all goes on
as with cp_outer ranks and a part of the heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.base.reduction import CarryTree
from ...core.layout.chunks import Chunks
from ..tensor_parallel import LayerContext
from ..transport.base import Group


class KeySums:
    """Gradients of keys and values side by side, [b, groups, keys, n], summed over the blocks of
    queries that this rank has.

    The leaves of the tree are all blocks of the sequence, each as long as the keys up to its end.
    """

    def __init__(self, chunks: Chunks, block: int):
        self.block = block
        self.blocks = Chunks(-(-chunks.num_items // block), chunks.cp, chunks.cp_rank)
        self.tree: CarryTree[Tensor] = CarryTree(self.blocks.num_items, _add_longer)

    def add(self, index: int, value: Tensor) -> None:
        """Takes what block `index` gives to the keys up to its end; it belongs to this object now."""
        self.tree.insert((index, index + 1), value)


def tokens_for_heads(group: Group, parts: Sequence[Tensor]) -> list[Tensor]:
    """From [b, heads, s, n] of this rank's tokens [b, heads / size, size * s, n] of all members' tokens, in the order
    of the sequence: member r gets the r-th even part of the heads of every tensor."""
    outgoing = [
        torch.cat([part.chunk(group.size, 1)[member].reshape(-1) for part in parts]) for member in range(group.size)
    ]
    arrived = group.all_to_all(outgoing, [tuple(each.shape) for each in outgoing])
    shapes = [(part.shape[0], part.shape[1] // group.size, *part.shape[2:]) for part in parts]
    return [in_order(pieces, 2) for pieces in _apart(arrived, shapes)]


def heads_for_tokens(group: Group, parts: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `tokens_for_heads`."""
    chunks = [part.chunk(2 * group.size, 2) for part in parts]
    outgoing = [
        torch.cat([torch.cat([each[member], each[-1 - member]], 2).reshape(-1) for each in chunks])
        for member in range(group.size)
    ]
    arrived = group.all_to_all(outgoing, [tuple(each.shape) for each in outgoing])
    shapes = [(*part.shape[:2], part.shape[2] // group.size, part.shape[3]) for part in parts]
    return [torch.cat(pieces, 1) for pieces in _apart(arrived, shapes)]


def in_order(pieces: Sequence[Tensor], dim: int) -> Tensor:
    """The tokens of all members along `dim` in the order of the sequence: each has an early and a late chunk."""
    halves = [piece.chunk(2, dim) for piece in pieces]
    return torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], dim)


def _apart(arrived: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[list[Tensor]]:
    """Of each tensor what every member has sent; all members' have one shape."""
    sizes = [math.prod(shape) for shape in shapes]
    by_member = [flat.split(sizes) for flat in arrived]
    return [[pieces[index].view(shape) for pieces in by_member] for index, shape in enumerate(shapes)]


def gathered(context: LayerContext, parts: Sequence[Tensor]) -> list[Tensor]:
    """Tensors [b, groups, keys, n] of the whole sequence, contiguous, from those of this rank's tokens."""
    group = context.cp_outer
    if group.size == 1:
        return list(parts)
    own = torch.cat(list(parts), -1)
    members = _ring_gather(group, own) if context.plan.runtime.context_parallel == "ring" else group.all_gather(own)
    return [part.contiguous() for part in in_order(members, 2).split([part.shape[-1] for part in parts], -1)]


def scattered(context: LayerContext, sums: KeySums, dtype: torch.dtype) -> Tensor:
    """The sums over all blocks of the sequence, of this rank's keys only, rounded to `dtype`."""
    if context.cp_outer.size == 1:
        return sums.tree.root().to(dtype)
    return (_finished(context, sums) if context.numerics.mode == "exact" else _reduced(context, sums, dtype)).to(dtype)


def _ring_gather(group: Group, own: Tensor) -> list[Tensor]:
    """What every member holds, passed on from neighbour to neighbour in size - 1 steps."""
    found, nothing = {group.rank: own.detach()}, own.new_empty(0)
    following = (group.rank + 1) % group.size
    for step in range(1, group.size):
        source = (group.rank - step) % group.size
        parts = [found[(source + 1) % group.size] if member == following else nothing for member in range(group.size)]
        shapes = [tuple(own.shape) if member == (group.rank - 1) % group.size else (0,) for member in range(group.size)]
        found[source] = group.all_to_all(parts, shapes)[(group.rank - 1) % group.size]
    return [found[member] for member in range(group.size)]


def _finished(context: LayerContext, sums: KeySums) -> Tensor:
    """The canonical tree over all blocks: every rank sends each owner the rows of its nodes that are not
    zero, all in one exchange."""
    group, block, chunks = (
        context.cp_outer,
        sums.block,
        [Chunks(context.chunks.num_items, context.cp_outer.size, rank) for rank in range(context.cp_outer.size)],
    )
    nodes = [Chunks(sums.blocks.num_items, group.size, rank).nodes() for rank in range(group.size)]
    assert sums.tree.nodes == nodes[group.rank]
    values = [sums.tree.value(node) for node in sums.tree.nodes]
    outgoing = [
        torch.cat([value[:, :, start : start + chunks[0].size] for value in values for start in owner.starts], 2)
        for owner in chunks
    ]
    own, (samples, groups, _, width) = chunks[group.rank], values[0].shape
    rows = [[own.rows_before(start, node[1] * block) for node in theirs for start in own.starts] for theirs in nodes]
    arrived = group.all_to_all(outgoing, [(samples, groups, sum(counts), width) for counts in rows])
    trees: list[CarryTree[Tensor]] = [CarryTree(sums.blocks.num_items, _add_longer) for _ in own.starts]
    for theirs, counts, value in zip(nodes, rows, arrived, strict=True):
        parts = iter(value.split(counts, 2))
        for node in theirs:
            for tree in trees:
                tree.insert(node, next(parts))
    return torch.cat([tree.root() for tree in trees], 2)


def _reduced(context: LayerContext, sums: KeySums, dtype: torch.dtype) -> Tensor:
    """The library's sum over the ranks."""
    group, chunks = context.cp_outer, context.query_chunks
    first = sums.tree.value(sums.tree.nodes[0])
    total = first.new_zeros(*first.shape[:2], chunks.num_items, first.shape[3])
    for node in sums.tree.nodes:
        value = sums.tree.value(node)
        total[:, :, : value.shape[2]].add_(value)
    owners = [Chunks(chunks.num_items, group.size, rank) for rank in range(group.size)]
    parts = [torch.cat([total[:, :, lo:hi] for lo, hi in owner.spans], 2).to(dtype) for owner in owners]
    return group.reduce_scatter(parts)


def _add_longer(left: Tensor, right: Tensor) -> Tensor:
    """The sum of what earlier blocks give to the first keys and later ones to more of them, kept in `right`."""
    right[:, :, : left.shape[2]].add_(left)
    return right
