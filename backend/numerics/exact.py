"""`ExactNumerics`: every sum has leaves that belong to the problem and one fixed tree over them, so
no layout changes a bit.

`products` makes the products, by the library or by our kernels; sums over what they give are elementwise additions
(`tree`).

Sums are fp32 whatever the operands, partial ones are sent in fp32, and a result is rounded to the format of its
operands once, when it is finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.base.reduction import CarryTree, cut, maximal_nodes
from ...core.layout.chunks import Chunks
from ...core.layout.leaves import LeafSizes
from ..transport.base import Group
from .base import Numerics, flatten, unflatten
from .contributions import Accumulator, Contribution
from .copies import Copies
from .device_sum import DeviceSum, device_sum
from .exact_gradients import ExactAccumulator, TokenNodes, finished_parts
from .exact_sum import ExactSum, exact_sum
from .expert_rows import ExactExpertNumerics
from .heads import OwnedHeads, OwnedPart
from .lookup_sums import LookupSums
from .observed import observed
from .open_sums import OpenKind, OpenSums
from .owned_leaves import OwnedLeaves
from .products import Products, by_library
from .summands import Summands, merged, open_over, part_over, sum_over
from .tiles import Intervals
from .tokens import OwnedTokens
from .tree import add_in_place, block_sums, fold, node_sums, token_sums, tree_fold

VECTOR_ELEMENTS = 64
"""Elementwise functions run on multiples of this: four AVX512 registers of fp32, two of which
one library step takes."""


class ExactNumerics(ExactExpertNumerics, Numerics):
    """Canonical numerics (design.md). `leaf_sizes` are the problem's."""

    mode = "exact"

    def __init__(
        self,
        leaf_sizes: LeafSizes,
        device: torch.device,
        *,
        cp: int = 1,
        cp_rank: int = 0,
        products: Mapping[str, Products] | None = None,
    ):
        """`cp` says which part of every sequence the rank has; sums over tokens then stay open. `products` make each of
        `PRODUCT_FORMS`; without, the library makes all."""
        super().__init__(device)
        self.products = by_library() if products is None else products
        self.cp, self.cp_rank = cp, cp_rank
        self.leaf_sizes = leaf_sizes
        self.gradient_block = leaf_sizes.gradient_token_block
        self.reduction_block = leaf_sizes.reduction_token_block

    def project(self, x_BSF: Tensor, weight_CF: Tensor, leaves: OwnedLeaves) -> Tensor:
        samples, sequence, features = x_BSF.shape
        blocks = token_blocks(samples, sequence, self.gradient_block)
        y = self.products["project"].project(x_BSF.reshape(-1, features), weight_CF, leaves, blocks)
        return y.view(samples, sequence, -1)

    @observed
    def partial_contract(self, x_BSC: Tensor, weight_CF: Tensor, leaves: OwnedLeaves) -> Tensor:
        """A value for each of this rank's nodes of the tree over leaves."""
        samples, sequence, features = x_BSC.shape
        blocks = token_blocks(samples, sequence, self.gradient_block)
        values = self.products["contract"].contract(x_BSC.reshape(-1, features), weight_CF, leaves, blocks)
        return values.view(len(values), samples, sequence, -1)

    def partial_sum(self, terms_BSLR: Tensor, leaves: OwnedLeaves) -> Tensor:
        first = leaves.first_leaf
        own = tuple((leaf, leaf + 1) for leaf in range(first, first + terms_BSLR.shape[2]))
        nodes = tuple(own if tp_rank == leaves.tp_rank else () for tp_rank in range(leaves.tp))
        return merged(terms_BSLR.movedim(2, 0), Summands(leaves.num_leaves, nodes), leaves.tp_rank)

    def finish_contract(
        self, partial: Tensor, leaves: OwnedLeaves, group: Group, tokens: OwnedTokens | None, dtype: torch.dtype
    ) -> Tensor:
        """The tree over leaves spans the ranks."""
        return _over_ranks(group, partial, leaves.summands, tokens, dtype)

    @observed
    def multiply(self, x_BSK: Tensor, matrix_KN: Tensor) -> Tensor:
        """Sequence parallelism cuts between blocks of `reduction_token_block` tokens."""
        samples, sequence, features = x_BSK.shape
        x, blocks = x_BSK.reshape(samples * sequence, features), token_blocks(samples, sequence, self.reduction_block)
        return self.products["multiply"].multiply(x, matrix_KN, blocks).view(samples, sequence, -1)

    @property
    def heads_at_once(self) -> int | None:
        return self.products["heads"].heads_at_once

    def multiply_heads(self, left_BHMK: Tensor, right_BHKN: Tensor) -> Tensor:
        return self.products["heads"].multiply_heads(left_BHMK, right_BHKN)

    @observed
    def weight_gradient(self, x_BSC: Tensor, y_BSF: Tensor, leaves: OwnedLeaves) -> Contribution:
        """Per sample the tree over token blocks."""
        blocks, products = token_blocks(1, x_BSC.shape[1], self.gradient_block), self.products["weight_gradient"]
        if self.cp == 1:
            return products.weight_gradient(x_BSC, y_BSF, leaves, blocks)
        chunks = Chunks(len(blocks) * self.cp, self.cp, self.cp_rank)
        own = [(chunks.local(lo), chunks.local(lo) + hi - lo) for lo, hi in chunks.nodes()]
        nodes = products.weight_gradient_nodes(x_BSC, y_BSF, leaves, blocks, own)
        return self._over_sequence("blocks", chunks, nodes)

    def elementwise(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """On a length that fills whole vector registers: the library computes a remainder by scalar code, whose
        sigmoid, silu and gelu have other bits (torch 2.13 on AVX512: up to 31 last elements)."""
        missing = -x.numel() % VECTOR_ELEMENTS
        return function(F.pad(x.flatten(), (0, missing)))[: x.numel()].view_as(x) if missing else function(x)

    @observed
    def token_sums(self, x_BSN: Tensor, tokens: OwnedTokens | None = None) -> Contribution:
        """Per sample, by elementwise additions only: the width of a slice cannot matter. Of own tokens the
        tree nodes, [nodes, n]."""
        x_BSN = x_BSN.float()
        if tokens is not None:
            return list(node_sums(block_sums(x_BSN, self.reduction_block), tokens.nodes(tokens.member)))
        if self.cp == 1:
            return list(token_sums(x_BSN, self.reduction_block))
        sums = block_sums(x_BSN, self.reduction_block)
        chunks = Chunks(sums.shape[1] * self.cp, self.cp, self.cp_rank)
        return self._over_sequence("tokens", chunks, [list(nodes) for nodes in node_sums(sums, chunks.nodes())])

    @observed
    def head_sums(self, x_BSLQD: Tensor, heads: OwnedHeads | None) -> Contribution:
        """Per sample: the query heads of a key/value head are added first, then as `token_sums` the leaves
        (head, block of tokens)."""
        x_BLSD = fold(x_BSLQD.float(), 3).transpose(1, 2).contiguous()
        sums = block_sums(x_BLSD.flatten(0, 1), self.reduction_block).view(len(x_BLSD), -1, x_BLSD.shape[-1])
        if heads is not None:
            return list(node_sums(sums, heads.nodes(heads.member)))
        if self.cp == 1:
            return [sample.clone() for sample in tree_fold(sums, 1)]
        members = OwnedHeads(self.leaf_sizes, self.cp * x_BSLQD.shape[1], 1, 0, self.cp, self.cp_rank)
        open_nodes = tuple(members.nodes(member) for member in range(self.cp))
        return OpenSums(
            "heads",
            members.num_leaves,
            open_nodes,
            [list(nodes) for nodes in node_sums(sums, open_nodes[self.cp_rank])],
        )

    @observed
    def embedding_gradient(self, ids_BS: Tensor, gradient_BSH: Tensor, num_rows: int) -> Contribution:
        """Per sample, rows in the order of their positions. On a GPU whole tables, since which rows there are would be
        waited for."""
        if self.cp == 1 and ids_BS.is_cpu:
            return LookupSums(ids_BS, gradient_BSH.float(), num_rows)
        return [
            torch.ops.aten.embedding_dense_backward(gradient_SH, ids_S, num_rows + 1, -1, False)[:num_rows]
            for ids_S, gradient_SH in zip(ids_BS, gradient_BSH.float(), strict=True)
        ]

    def sum_lookups(self, rows_BSH: Tensor, group: Group, tokens: OwnedTokens | None) -> Tensor:
        """One of the summands is not zero, so any order is exact; adding zero makes -0.0 into 0.0
        on one rank as on many."""
        if group.size == 1:
            return rows_BSH + 0.0
        return _over_ranks(group, rows_BSH.float().unsqueeze(0), Summands.one_each(group.size), tokens, rows_BSH.dtype)

    def row_maximum(self, x_BS: Tensor, group: Group) -> Tensor:
        if group.size == 1:
            return x_BS
        return torch.stack(group.all_gather(x_BS)).amax(0)

    def leaf_sums(self, x_BSC: Tensor, leaves: OwnedLeaves) -> Tensor:
        """The sum inside each leaf."""
        return torch.stack([fold(x_BSC[..., lo:hi], 2) for lo, hi in leaves.bounds])

    def row_sums(
        self, sums: Sequence[Tensor], leaves: OwnedLeaves, group: Group, single: Tensor | None = None
    ) -> list[Tensor]:
        """The tree over leaves across the ranks; small, so every rank takes all nodes."""
        by_leaf = torch.stack(list(sums), 1)
        nodes = [leaves.nodes(rank) for rank in range(group.size)]
        others = [] if single is None else [single.unsqueeze(0)]

        own = [tree_fold(by_leaf[lo - leaves.first_leaf : hi - leaves.first_leaf], 0) for lo, hi in nodes[group.rank]]
        shapes = [(len(sums) * len(theirs) + len(others), *sums[0].shape[1:]) for theirs in nodes]
        gathered = group.all_gather(torch.cat([*own, *others]), shapes)
        tree: CarryTree = CarryTree(leaves.num_leaves, add_in_place)
        for theirs, rows in zip(nodes, gathered, strict=True):
            for node, values in zip(theirs, rows[: len(sums) * len(theirs)].split(len(sums)), strict=True):
                tree.insert(node, values)
        return [*tree.root(), *([fold(torch.stack([rows[-1] for rows in gathered]), 0)] if others else [])]

    def sum_members(self, values: Tensor, summands: Summands, group: Group) -> Tensor:
        return sum_over(group, merged(values, summands, group.rank), summands, values.dtype)

    def sum_members_part(
        self, values: Tensor, summands: Summands, group: Group, dim: int, sizes: Sequence[int]
    ) -> Tensor:
        return part_over(
            group, merged(values, summands, group.rank), summands, dim=dim, sizes=sizes, dtype=values.dtype
        ).contiguous()

    def accumulator(self, num_samples: int, *, partial: bool = False) -> Accumulator:
        return TokenNodes(num_samples) if partial else ExactAccumulator(num_samples)

    def finish_parts(
        self, gradients: Mapping[str, Accumulator], group: Group, owned: Mapping[str, OwnedPart]
    ) -> dict[str, Accumulator]:
        """All gradients of one kind of parts together, that have equally many uses."""
        finished: dict[str, Accumulator] = {}
        for part in dict.fromkeys(owned.values()):
            of_part = {
                name: each for name, each in gradients.items() if owned[name] == part and isinstance(each, TokenNodes)
            }
            with group.recorder.layer(part.layer):
                for num_rows in sorted({each.num_rows for each in of_part.values()}):
                    same_rows = {name: each for name, each in of_part.items() if each.num_rows == num_rows}
                    finished.update(finished_parts(same_rows, group, part))
        return finished

    def reduce_gradients(
        self, gradients: Mapping[str, Accumulator], group: Group, samples_of: Callable[[int], tuple[int, int]]
    ) -> dict[str, Tensor]:
        """The batch tree, finished over the ranks: all gradients in one exchange."""
        trees = {
            name: accumulator.tree
            for name, accumulator in gradients.items()
            if isinstance(accumulator, ExactAccumulator)
        }
        if group.size == 1 or not trees:
            return {name: tree.root() for name, tree in trees.items()}
        values, summands, shapes = _over_samples(trees, group, samples_of)
        return unflatten(sum_over(group, values, summands), shapes)

    def reduce_gradients_part(
        self, gradients: Mapping[str, Accumulator], copies: Copies, samples_of: Callable[[int], tuple[int, int]]
    ) -> Tensor:
        trees = {
            name: accumulator.tree
            for name, accumulator in gradients.items()
            if isinstance(accumulator, ExactAccumulator)
        }
        shard = copies.shard
        values, summands, _ = _over_samples(trees, shard, copies.of_shard(samples_of))
        sizes = [hi - lo for lo, hi in (cut(values.shape[1], shard.size, member) for member in range(shard.size))]
        if copies.replicate is None:
            return part_over(shard, values, summands, dim=0, sizes=sizes)
        held = open_over(shard, values, summands, dim=0, sizes=sizes)
        nodes = tuple(maximal_nodes(summands.num_leaves, *samples) for samples in copies.of_replicate(samples_of))
        return sum_over(copies.replicate, held, Summands(summands.num_leaves, nodes))

    def sum(self, tensors: Iterable[Tensor]) -> ExactSum | DeviceSum:
        return self._sum(tensors, squares=False)

    def sum_of_squares(self, tensors: Iterable[Tensor]) -> ExactSum | DeviceSum:
        return self._sum(tensors, squares=True)

    def _sum(self, tensors: Iterable[Tensor], *, squares: bool) -> ExactSum | DeviceSum:
        """On the CPU by what the numbers are; on a device without looking at them."""
        if self.device.type == "cpu":
            return exact_sum(tensors, squares=squares, device=self.device)
        return device_sum(tensors, squares=squares, device=self.device)

    def _over_sequence(self, kind: OpenKind, chunks: Chunks, samples: list[list[Tensor]]) -> Contribution:
        """What this rank has of the sums over all leaves of each sample: a value for each of its nodes."""
        members = tuple(Chunks(chunks.num_items, self.cp, member).nodes() for member in range(self.cp))
        return OpenSums(kind, chunks.num_items, members, samples)


@lru_cache(maxsize=1024)
def token_blocks(samples: int, sequence: int, block: int) -> Intervals:
    """Token blocks inside each sample, as rows of the flat [b*s, ...] tensor; a sample's last block may be shorter."""
    return tuple(
        (sample * sequence + first, sample * sequence + min(first + block, sequence))
        for sample in range(samples)
        for first in range(0, sequence, block)
    )


def _over_samples(
    trees: Mapping[str, CarryTree[Tensor]], group: Group, samples_of: Callable[[int], tuple[int, int]]
) -> tuple[Tensor, Summands, dict[str, torch.Size]]:
    """The nodes of the batch's tree that this member has, [nodes, n] over all gradients, who brings which, and
    the gradients' shapes."""
    num_samples = next(iter(trees.values())).num_leaves
    summands = Summands(num_samples, tuple(maximal_nodes(num_samples, *samples_of(rank)) for rank in range(group.size)))
    own = summands.nodes[group.rank]
    shapes = {name: tree.value(own[0]).shape for name, tree in trees.items()}
    return torch.stack([flatten(tree.value(node) for tree in trees.values()) for node in own]), summands, shapes


def _over_ranks(
    group: Group, values: Tensor, summands: Summands, tokens: OwnedTokens | None, dtype: torch.dtype
) -> Tensor:
    """The finished sum of hidden states [nodes, b, s, n] whose leaves lie on the members, rounded to `dtype`:
    whole, or own tokens."""
    if tokens is None:
        return sum_over(group, values, summands, dtype)
    return part_over(group, values, summands, dim=1, sizes=tokens.sizes, dtype=dtype)
