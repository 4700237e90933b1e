"""Canonical sums inside one tensor: the tree by elementwise additions, whose bits depend on
nothing but the two numbers. On the CPU compiled loops (`csrc`) make sums over tokens where they were built.

See `core.base.reduction` for the tree, and `summands` for sums over the members of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.base.reduction import Node

try:
    from . import _exact as compiled
except ImportError:
    compiled = None  # type: ignore[assignment]


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
    """Sums over blocks of tokens, [b, blocks, n], the last block shorter where `block` does not divide
    s: `fold` inside each."""
    samples, sequence, features = x_BSN.shape
    if _is_for_loops(x_BSN):
        return _compiled_sums(x_BSN, block, whole=False)
    full = sequence - sequence % block
    blocks = []
    if full:
        blocks.append(fold(x_BSN[:, :full].reshape(samples, full // block, block, features), 2))
    if full < sequence:
        blocks.append(fold(x_BSN[:, full:], 1).unsqueeze(1))
    return torch.cat(blocks, 1)


def token_sums(x_BSN: Tensor, block: int) -> Tensor:
    """Sums over the tokens of each sample, [b, n]: those of blocks, then the canonical tree over the blocks."""
    if _is_for_loops(x_BSN):
        return _compiled_sums(x_BSN, block, whole=True).squeeze(1)
    sums = tree_fold(block_sums(x_BSN, block), 1)
    # one token is its own sum, but the result must not share its memory
    return sums.clone() if x_BSN.shape[1] == 1 else sums


def node_sums(leaves_BLN: Tensor, nodes: Sequence[Node]) -> Tensor:
    """The values of tree nodes from just their leaves, one node after the other: [b, nodes, n]."""
    parts = leaves_BLN.split([hi - lo for lo, hi in nodes], 1)
    return torch.stack([tree_fold(part, 1) for part in parts], 1)


def _is_for_loops(x_BSN: Tensor) -> bool:
    """Whether compiled loops add these: fp32 numbers of the CPU, features one behind the other."""
    return (
        compiled is not None
        and x_BSN.is_cpu
        and x_BSN.dtype == torch.float32
        and x_BSN.stride(2) == 1
        and x_BSN.numel() > 0
    )


def _compiled_sums(x_BSN: Tensor, block: int, *, whole: bool) -> Tensor:
    """The sums of each sample as a `whole`, [b, 1, n], or of each block, [b, blocks, n]."""
    samples, sequence, features = x_BSN.shape
    sums = x_BSN.new_empty(samples, 1 if whole else -(-sequence // block), features)
    sample_stride, token_stride, _ = x_BSN.stride()
    compiled.token_sums(
        x_BSN.data_ptr(),
        samples,
        sequence,
        features,
        sample_stride,
        token_stride,
        block,
        whole,
        sums.data_ptr(),
    )
    return sums
