"""`ExactNumerics`: every sum has leaves that belong to the problem and one fixed tree over them, so no layout changes a bit.

Products run on tiles whose shapes follow from the leaf sizes: a block of tokens inside one sample, a whole feature leaf, a whole
uncut dimension. The bits of a library product change with the shape and strides of its operands, so every tile is a contiguous
tensor: rows of activations and weights already are, features are copied. Sums over tiles are elementwise additions.

Everything is computed in fp32, from operands in bf16 too (torch's CPU has no product of bf16 with an fp32 result), partial sums travel in
fp32, and a result is rounded to the format of its operands once, when it is finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.leaves import LeafSizes
from ...core.reduction import CarryTree, Node, maximal_nodes, split
from ..transport.base import Group
from .base import Accumulator, Contribution, Numerics, OwnedLeaves, flatten, unflatten
from .exact_gradients import ExactAccumulator, TokenNodes, finished_tokens
from .exact_sum import ExactSum, exact_sum
from .summands import Summands, canonical_part, canonical_sum
from .tokens import OwnedTokens
from .tree import add_in_place, finished_part, fold, sum_over, token_nodes, token_sums

VECTOR_ELEMENTS = 64
"""Elementwise functions run on multiples of this: four AVX512 registers of fp32, two of which one library step takes."""


class ExactNumerics(Numerics):
    """Canonical numerics (design.md). `leaf_sizes` are the problem's."""

    mode = "exact"

    def __init__(self, leaf_sizes: LeafSizes, device: torch.device):
        super().__init__(device)
        self.gradient_block = leaf_sizes.gradient_token_block
        self.reduction_block = leaf_sizes.reduction_token_block

    def project(self, x_BSF: Tensor, weight_CF: Tensor, leaves: OwnedLeaves) -> Tensor:
        """One product per (token block, leaf)."""
        samples, sequence, features = x_BSF.shape
        x, weight_CF = x_BSF.reshape(samples * sequence, features).float(), weight_CF.float()
        blocks = list(self._token_blocks(samples, sequence))
        columns = []
        for lo, hi in leaves.bounds:
            weight_t = weight_CF[lo:hi].t()
            column = x.new_empty(samples * sequence, hi - lo)
            for first, last in blocks:
                torch.mm(x[first:last], weight_t, out=column[first:last])
            columns.append(column)
        return torch.cat(columns, 1).view(samples, sequence, -1).to(x_BSF.dtype)

    def contract(self, x_BSC: Tensor, weight_CF: Tensor, leaves: OwnedLeaves, group: Group, tokens: OwnedTokens | None) -> Tensor:
        """One product per (token block, leaf), whole leaves as K; the tree over leaves spans the ranks."""
        samples, sequence, _ = x_BSC.shape
        x, weight_CF = x_BSC.reshape(samples * sequence, -1).float(), weight_CF.float()
        bounds, first_leaf = leaves.bounds, leaves.first_leaf
        nodes = [leaves.nodes(rank) for rank in range(group.size)]
        values = [x.new_empty(samples * sequence, weight_CF.shape[1]) for _ in nodes[group.rank]]
        for first, last in self._token_blocks(samples, sequence):

            def leaf(index: int, out: Tensor | None, first: int = first, last: int = last) -> Tensor:
                lo, hi = bounds[index - first_leaf]
                return torch.mm(x[first:last, lo:hi].contiguous(), weight_CF[lo:hi], out=out)

            for node, value in zip(nodes[group.rank], values, strict=True):
                _tree(leaf, node, value[first:last])
        partial = [value.view(samples, sequence, -1) for value in values]
        return _over_ranks(group, partial, nodes, leaves.num_leaves, tokens, x_BSC.dtype)

    def weight_gradient(self, x_BSC: Tensor, y_BSF: Tensor, leaves: OwnedLeaves) -> Contribution:
        """Per sample: one product per (token block, leaf), the tree over token blocks."""
        return [self._sample_weight_gradient(x_SC, y_SF, leaves) for x_SC, y_SF in zip(x_BSC.float(), y_BSF.float(), strict=True)]

    def _sample_weight_gradient(self, x_SC: Tensor, y_SF: Tensor, leaves: OwnedLeaves) -> Tensor:
        blocks = list(self._token_blocks(1, len(x_SC)))
        total = x_SC.new_empty(x_SC.shape[1], y_SF.shape[1])
        for lo, hi in leaves.bounds:

            def block(index: int, out: Tensor | None, lo: int = lo, hi: int = hi) -> Tensor:
                first, last = blocks[index]
                return torch.mm(x_SC[first:last, lo:hi].contiguous().t(), y_SF[first:last], out=out)

            _tree(block, (0, len(blocks)), total[lo:hi])
        return total

    def elementwise(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """On a length that fills whole vector registers: the library computes a remainder by scalar code, whose sigmoid, silu and gelu
        have other bits (torch 2.13 on AVX512: up to 31 last elements)."""
        missing = -x.numel() % VECTOR_ELEMENTS
        return function(F.pad(x.flatten(), (0, missing)))[: x.numel()].view_as(x) if missing else function(x)

    def token_sums(self, x_BSN: Tensor, tokens: OwnedTokens | None = None) -> Contribution:
        """Per sample, by elementwise additions only: the width of a slice cannot matter. Of own tokens the tree nodes, [nodes, n]."""
        x_BSN = x_BSN.float()
        if tokens is not None:
            return list(token_nodes(x_BSN, self.reduction_block, tokens.nodes(tokens.tp_rank)))
        return list(token_sums(x_BSN, self.reduction_block))

    def sample_sums(self, x_BSN: Tensor) -> Contribution:
        return [sample.to(torch.float32, copy=True) for sample in x_BSN]

    def embedding_gradient(self, ids_BS: Tensor, gradient_BSH: Tensor, num_rows: int) -> Contribution:
        """Per sample, rows in the order of their positions."""
        return [
            torch.ops.aten.embedding_dense_backward(gradient_SH, ids_S, num_rows + 1, -1, False)[:num_rows]
            for ids_S, gradient_SH in zip(ids_BS, gradient_BSH.float(), strict=True)
        ]

    def sum_lookups(self, rows_BSH: Tensor, group: Group, tokens: OwnedTokens | None) -> Tensor:
        """One of the summands is not zero, so any order is exact; adding zero makes -0.0 into 0.0 on one rank as on many."""
        if group.size == 1:
            return rows_BSH + 0.0
        nodes = [((rank, rank + 1),) for rank in range(group.size)]
        return _over_ranks(group, [rows_BSH.float()], nodes, group.size, tokens, rows_BSH.dtype)

    def row_maximum(self, x_BS: Tensor, group: Group) -> Tensor:
        if group.size == 1:
            return x_BS
        return torch.stack(group.all_gather(x_BS)).amax(0)

    def leaf_sums(self, x_BSV: Tensor, leaves: OwnedLeaves) -> Tensor:
        """Block sums inside each vocabulary leaf."""
        return torch.stack([fold(x_BSV[..., lo:hi], 2) for lo, hi in leaves.bounds])

    def vocabulary_sums(self, sums: Sequence[Tensor], target_BS: Tensor, leaves: OwnedLeaves, group: Group) -> list[Tensor]:
        """The tree over leaves across the ranks; small, so every rank takes all nodes."""
        by_leaf = torch.stack(list(sums), 1)
        nodes = [leaves.nodes(rank) for rank in range(group.size)]

        def leaf(index: int, out: Tensor | None) -> Tensor:
            assert out is None
            return by_leaf[index - leaves.first_leaf]

        own = [_tree(leaf, node) for node in nodes[group.rank]]
        shapes = [(len(sums) * len(theirs) + 1, *target_BS.shape) for theirs in nodes]
        gathered = group.all_gather(torch.cat([*own, target_BS.unsqueeze(0)]), shapes)
        tree: CarryTree = CarryTree(leaves.num_leaves, add_in_place)
        for theirs, rows in zip(nodes, gathered, strict=True):
            for node, values in zip(theirs, rows[:-1].split(len(sums)), strict=True):
                tree.insert(node, values)
        return [*tree.root(), fold(torch.stack([rows[-1] for rows in gathered]), 0)]

    def sum_members(self, values: Tensor, summands: Summands, group: Group) -> Tensor:
        return canonical_sum(values, summands, group)

    def sum_members_part(self, values: Tensor, summands: Summands, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
        return canonical_part(values, summands, group, dim, sizes)

    def accumulator(self, num_samples: int, *, own_tokens: bool = False) -> Accumulator:
        return TokenNodes(num_samples) if own_tokens else ExactAccumulator(num_samples)

    def finish_tokens(self, gradients: Mapping[str, Accumulator], group: Group, tokens: OwnedTokens) -> dict[str, Accumulator]:
        return finished_tokens({name: each for name, each in gradients.items() if isinstance(each, TokenNodes)}, group, tokens)

    def reduce_gradients(
        self, gradients: Mapping[str, Accumulator], group: Group, samples_of: Callable[[int], tuple[int, int]]
    ) -> dict[str, Tensor]:
        """The batch tree, finished over the ranks: all gradients in one exchange."""
        trees = {name: accumulator.tree for name, accumulator in gradients.items() if isinstance(accumulator, ExactAccumulator)}
        if group.size == 1 or not trees:
            return {name: tree.root() for name, tree in trees.items()}
        num_samples = next(iter(trees.values())).num_leaves
        nodes = [maximal_nodes(num_samples, *samples_of(rank)) for rank in range(group.size)]
        own = nodes[group.rank]
        shapes = {name: tree.value(own[0]).shape for name, tree in trees.items()}
        values = [flatten(tree.value(node) for tree in trees.values()) for node in own]
        return unflatten(sum_over(group, values, nodes, num_samples), shapes)

    def sum(self, tensors: Iterable[Tensor]) -> ExactSum:
        return exact_sum(tensors, device=self.device)

    def sum_of_squares(self, tensors: Iterable[Tensor]) -> ExactSum:
        return exact_sum(tensors, squares=True, device=self.device)

    def _token_blocks(self, samples: int, sequence: int) -> Iterator[tuple[int, int]]:
        """Token blocks inside each sample, as rows of the flat [b*s, ...] tensor; a sample's last block may be shorter."""
        for sample in range(samples):
            for first in range(0, sequence, self.gradient_block):
                last = min(first + self.gradient_block, sequence)
                yield sample * sequence + first, sample * sequence + last


def _over_ranks(
    group: Group,
    values: Sequence[Tensor],
    nodes: Sequence[Sequence[Node]],
    num_leaves: int,
    tokens: OwnedTokens | None,
    dtype: torch.dtype,
) -> Tensor:
    """The finished sum of hidden states [b, s, n] whose leaves lie on the members, rounded to `dtype`: whole, or this rank's tokens."""
    if tokens is None:
        return sum_over(group, [value.reshape(-1) for value in values], nodes, num_leaves, dtype).view(values[0].shape)
    samples, _, features = values[0].shape
    return finished_part(group, values, nodes, num_leaves, tokens.parts).view(samples, -1, features).to(dtype)


def _tree(leaf: Callable[[int, Tensor | None], Tensor], node: tuple[int, int], out: Tensor | None = None) -> Tensor:
    """The value of a tree node, computed depth first. `leaf(index, out)` computes a leaf, into `out` where one is given."""
    if node[1] - node[0] == 1:
        return leaf(node[0], out)
    left, right = split(node)
    return _tree(leaf, left, out).add_(_tree(leaf, right))
