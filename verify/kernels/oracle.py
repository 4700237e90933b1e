"""Numbers for cases of kernels, and what their results must be: written in torch, and not with our own sums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...core.base.reduction import Node, cut, maximal_nodes, merges_of
from .roundings import fused


def generator_of(seed: tuple[int, ...]) -> torch.Generator:
    """What makes the numbers of a seed, on every rank the same."""
    state = 0
    for part in seed:
        state = state * 1_000_003 + part + 1
    return torch.Generator().manual_seed(state % (1 << 62))


def numbers(seed: tuple[int, ...], n: int, dtype: torch.dtype) -> Tensor:
    """`n` numbers of very different size, so that a sum in another order has other bits."""
    generator = generator_of(seed)
    scale = torch.exp2(torch.randint(-8, 8, (n,), generator=generator).float())
    return (torch.randn(n, generator=generator) * scale).to(dtype)


def canonical(leaves: list[Tensor]) -> Tensor:
    """The canonical sum in fp32: a left part that is the largest power of two below the whole, then the rest."""
    if len(leaves) == 1:
        return leaves[0].float()
    left = 1
    while 2 * left < len(leaves):
        left *= 2
    return canonical(leaves[:left]) + canonical(leaves[left:])


def tree_products(left_MK: Tensor, right_KN: Tensor, leaf: int, nodes: Sequence[Node], *, in_sequence: bool) -> Tensor:
    """The canonical sums of `left @ right` over the leaves of each node, fp32 [nodes, m, n]. A leaf of `leaf` k is the
    exact sum rounded once, or `in_sequence` rounded after each product that is added."""
    product = _in_sequence if in_sequence else _in_double
    bounds = [(leaf * number, leaf * (number + 1)) for number in range(nodes[-1][1])]
    leaves = [product(left_MK[:, first:last], right_KN[first:last]) for first, last in bounds]
    return torch.stack([canonical(leaves[lo:hi]) for lo, hi in nodes])


def _in_double(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    return (left_MK.double() @ right_KN.double()).float() + 0.0  # no -0, since sums begin with 0


def _in_sequence(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    left, right = left_MK.float().numpy(), right_KN.float().numpy()
    total = np.zeros((len(left), right.shape[1]), np.float32)
    for k in range(len(right)):
        a, b = np.broadcast_arrays(left[:, k, None], right[None, k])
        total = fused(a, b, total)
    return torch.from_numpy(total)


class Sum:
    """A sum over `num_leaves` leaves, cut among `world_size` ranks as evenly as possible: what each rank ships."""

    def __init__(self, num_leaves: int, world_size: int):
        cuts = [cut(num_leaves, world_size, rank) for rank in range(world_size)]
        self.nodes = [maximal_nodes(num_leaves, lo, hi) for lo, hi in cuts]
        self.merges = merges_of(num_leaves, [node for nodes in self.nodes for node in nodes])

    def shipped(self, leaves: list[Tensor], rank: int) -> Tensor:
        """What `rank` puts into its buffer: its nodes one after the other, a single leaf as it is, others in fp32."""
        parts = [canonical(leaves[lo:hi]) for lo, hi in self.nodes[rank]]
        return torch.cat([torch.empty(0), *parts])


def different_bits(got: Tensor, want: Tensor) -> int:
    """How many bits two tensors of equal shape and type differ in; `got` may be on a device."""
    assert got.shape == want.shape and got.dtype == want.dtype
    got = got.cpu()
    bits = torch.bitwise_xor(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
    return sum(int((bits >> place & 1).sum()) for place in range(8))


def beyond(got: Tensor, want: Tensor) -> int:
    """How many elements are further from `want` (fp64) than a rounding to their type and a few in fp32 can bring them:
    one unit in the last place of bf16, 16 of fp32."""
    bound = want.abs() * (2.0**-8 if got.dtype == torch.bfloat16 else 2.0**-20)
    return int((~((got.double() - want).abs() <= bound)).sum())


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of `rows` in fp64."""
    wide = rows.double()
    return wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()
