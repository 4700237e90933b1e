"""`ExactNumerics`: every sum has leaves that belong to the problem and one fixed tree over them, so no layout changes a bit.

Products run on tiles whose shapes follow from the leaf sizes: a block of tokens inside one sample, a whole feature leaf, a whole
uncut dimension. The bits of a library product change with the shape and strides of its operands, so every tile is a contiguous
tensor: rows of activations and weights already are, features are copied. Sums over tiles are elementwise additions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.leaves import LeafSizes
from ...core.reduction import CarryTree, maximal_nodes, split
from ..transport.base import Group
from .base import Accumulator, Contribution, Numerics, OwnedLeaves, flatten, unflatten
from .exact_sum import ExactSum, exact_sum
from .tree import add_in_place, fold, sum_over, token_sums

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
        x = x_BSF.reshape(samples * sequence, features)
        blocks = list(self._token_blocks(samples, sequence))
        columns = []
        for lo, hi in leaves.bounds:
            weight_t = weight_CF[lo:hi].t()
            column = x.new_empty(samples * sequence, hi - lo)
            for first, last in blocks:
                torch.mm(x[first:last], weight_t, out=column[first:last])
            columns.append(column)
        return torch.cat(columns, 1).view(samples, sequence, -1)

    def contract(self, x_BSC: Tensor, weight_CF: Tensor, leaves: OwnedLeaves, group: Group) -> Tensor:
        """One product per (token block, leaf), whole leaves as K; the tree over leaves spans the ranks."""
        samples, sequence, _ = x_BSC.shape
        x = x_BSC.reshape(samples * sequence, -1)
        bounds, first_leaf = leaves.bounds, leaves.first_leaf
        nodes = [leaves.nodes(rank) for rank in range(group.size)]
        values = [x.new_empty(samples * sequence, weight_CF.shape[1]) for _ in nodes[group.rank]]
        for first, last in self._token_blocks(samples, sequence):

            def leaf(index: int, out: Tensor | None, first: int = first, last: int = last) -> Tensor:
                lo, hi = bounds[index - first_leaf]
                return torch.mm(x[first:last, lo:hi].contiguous(), weight_CF[lo:hi], out=out)

            for node, value in zip(nodes[group.rank], values, strict=True):
                _tree(leaf, node, value[first:last])
        total = sum_over(group, [value.view(-1) for value in values], nodes, leaves.num_leaves)
        return total.view(samples, sequence, -1)

    def weight_gradient(self, x_BSC: Tensor, y_BSF: Tensor, leaves: OwnedLeaves) -> Contribution:
        """Per sample: one product per (token block, leaf), the tree over token blocks."""
        return [self._sample_weight_gradient(x_SC, y_SF, leaves) for x_SC, y_SF in zip(x_BSC, y_BSF, strict=True)]

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

    def token_sums(self, x_BSN: Tensor) -> Contribution:
        """Per sample, by elementwise additions only: the width of a slice cannot matter."""
        return list(token_sums(x_BSN, self.reduction_block))

    def sample_sums(self, x_BSN: Tensor) -> Contribution:
        return [sample.clone() for sample in x_BSN]

    def embedding_gradient(self, ids_BS: Tensor, gradient_BSH: Tensor, num_rows: int) -> Contribution:
        """Per sample, rows in the order of their positions."""
        return [
            torch.ops.aten.embedding_dense_backward(gradient_SH, ids_S, num_rows + 1, -1, False)[:num_rows]
            for ids_S, gradient_SH in zip(ids_BS, gradient_BSH, strict=True)
        ]

    def sum_lookups(self, rows_BSH: Tensor, group: Group) -> Tensor:
        """One of the summands is not zero, so any order is exact; adding zero makes -0.0 into 0.0 on one rank as on many."""
        if group.size == 1:
            return rows_BSH + 0.0
        nodes = [((rank, rank + 1),) for rank in range(group.size)]
        return sum_over(group, [rows_BSH.reshape(-1)], nodes, group.size).view(rows_BSH.shape)

    def row_maximum(self, x_BS: Tensor, group: Group) -> Tensor:
        if group.size == 1:
            return x_BS
        return torch.stack(group.all_gather(x_BS)).amax(0)

    def softmax_sums(self, exp_BSV: Tensor, target_BS: Tensor, leaves: OwnedLeaves, group: Group) -> tuple[Tensor, Tensor]:
        """Block sums inside each vocabulary leaf, then the tree over leaves across the ranks; small, so every rank takes all nodes."""
        sums = [fold(exp_BSV[..., lo:hi], 2).clone() for lo, hi in leaves.bounds]
        nodes = [leaves.nodes(rank) for rank in range(group.size)]

        def leaf(index: int, out: Tensor | None) -> Tensor:
            assert out is None
            return sums[index - leaves.first_leaf]

        values = [_tree(leaf, node) for node in nodes[group.rank]]
        shape = tuple(target_BS.shape)
        gathered = group.all_gather(torch.stack([*values, target_BS]), [(len(theirs) + 1, *shape) for theirs in nodes])
        tree: CarryTree = CarryTree(leaves.num_leaves, add_in_place)
        for theirs, rows in zip(nodes, gathered, strict=True):
            for node, row in zip(theirs, rows[:-1], strict=True):
                tree.insert(node, row)
        return tree.root(), fold(torch.stack([rows[-1] for rows in gathered]), 0)

    def accumulator(self, num_samples: int) -> Accumulator:
        return ExactAccumulator(num_samples)

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


class ExactAccumulator:
    """A gradient as a carry tree over the samples of the global batch."""

    def __init__(self, num_samples: int):
        self.tree: CarryTree = CarryTree(num_samples, add_in_place)

    def add(self, first_sample: int, contribution: Contribution) -> None:
        """Each sample's sum is a leaf."""
        for offset, value in enumerate(contribution):
            self.tree.insert((first_sample + offset, first_sample + offset + 1), value)

    @property
    def held(self) -> list[Tensor]:
        """At most log2 n + 1 partial sums when samples arrive in order."""
        return [self.tree.value(node) for node in self.tree.nodes]


def _tree(leaf: Callable[[int, Tensor | None], Tensor], node: tuple[int, int], out: Tensor | None = None) -> Tensor:
    """The value of a tree node, computed depth first. `leaf(index, out)` computes a leaf, into `out` where one is given."""
    if node[1] - node[0] == 1:
        return leaf(node[0], out)
    left, right = split(node)
    return _tree(leaf, left, out).add_(_tree(leaf, right))
