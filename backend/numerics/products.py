"""`Products`: what exact numerics ask for each product, whoever makes it: `LibraryProducts` here, tile by tile, or our
kernels in Triton (`kernel_products`). `product_choice` says which of them makes which form.

Shape suffixes as in `base`: N rows, which are tokens of several samples or copies of tokens; C this rank's part of a
cut feature dimension, F a whole one, E local experts; B samples of S tokens, or of H heads. Operands are fp32, bf16 or
fp16, sums fp32. `blocks` are the token blocks, intervals of N (of S in a weight gradient) that follow on one another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...core.base.reduction import Node
from ...core.layout.products import PRODUCT_FORMS
from .contributions import Leaf
from .outer_sums import OuterSums, outer_sum
from .owned_leaves import OwnedLeaves
from .row_groups import ExpertRows
from .sample_sums import SampleSums
from .tiles import Intervals, contract_tiles, multiply_blocks, project_tiles


class Products(ABC):
    """Products with bits that follow from the problem alone: from an element's row and column of the whole operands,
    and from the leaves of what is added over."""

    heads_at_once: int | None = 1
    """Of a sample, in one call of `multiply_heads`; None for all."""

    @abstractmethod
    def project(self, x_NF: Tensor, weight_CF: Tensor, leaves: OwnedLeaves, blocks: Intervals) -> Tensor:
        """x W^T, [n, c] in the format of `x`."""

    @abstractmethod
    def contract(self, x_NC: Tensor, weight_CF: Tensor, leaves: OwnedLeaves, blocks: Intervals) -> Tensor:
        """x W, fp32 [nodes, n, f]: a value for each node of the tree over the feature leaves that this rank has."""

    @abstractmethod
    def multiply(self, x_NF: Tensor, matrix_FK: Tensor, blocks: Intervals) -> Tensor:
        """x times a matrix that no rank cuts, [n, k] in the format of `x`."""

    @abstractmethod
    def weight_gradient(self, x_BSC: Tensor, y_BSF: Tensor, leaves: OwnedLeaves, blocks: Intervals) -> SampleSums:
        """x^T y over the tokens of each sample, [c, f], which `blocks` make up."""

    @abstractmethod
    def weight_gradient_nodes(
        self, x_BSC: Tensor, y_BSF: Tensor, leaves: OwnedLeaves, blocks: Intervals, nodes: Sequence[Node]
    ) -> list[list[Tensor]]:
        """The same for each sample and each of the `nodes` of the tree over blocks that a rank has, together all of
        its blocks; first and last block of a node are counted from the rank's first."""

    @abstractmethod
    def project_experts(self, x_NF: Tensor, weight_ECF: Tensor, rows: ExpertRows, leaves: OwnedLeaves) -> Tensor:
        """x W^T with the expert of each row, [n, c] in the format of `x`."""

    @abstractmethod
    def contract_experts(self, x_NC: Tensor, weight_ECF: Tensor, rows: ExpertRows, leaves: OwnedLeaves) -> Tensor:
        """x W with the expert of each row, fp32 [nodes, n, f] as `contract`."""

    @abstractmethod
    def expert_weight_gradient(
        self, x_NC: Tensor, y_NF: Tensor, rows: ExpertRows, leaves: OwnedLeaves
    ) -> Iterator[tuple[Leaf, Tensor]]:
        """For each leaf of `rows` the sums over every expert's rows of it of x_C y_F^T, fp32 [e, c, f]."""

    @abstractmethod
    def multiply_heads(self, left_BHMK: Tensor, right_BHKN: Tensor) -> Tensor:
        """The product of two matrices for each head of each sample, [b, h, m, n], all fp32."""


class LibraryProducts(Products):
    """The library's, one product per tile or several tiles at once where that has the same bits (`same_bits`). Tiles
    are a block of tokens times a feature leaf; operands are widened to fp32, for torch's CPU has no product of bf16
    with an fp32 result."""

    def project(self, x_NF: Tensor, weight_CF: Tensor, leaves: OwnedLeaves, blocks: Intervals) -> Tensor:
        return project_tiles(x_NF.float(), weight_CF.float(), leaves.bounds, blocks).to(x_NF.dtype)

    def contract(self, x_NC: Tensor, weight_CF: Tensor, leaves: OwnedLeaves, blocks: Intervals) -> Tensor:
        return contract_tiles(x_NC.float(), weight_CF.float(), leaves.bounds, blocks, leaves.own_nodes)

    def multiply(self, x_NF: Tensor, matrix_FK: Tensor, blocks: Intervals) -> Tensor:
        return multiply_blocks(x_NF.float(), matrix_FK.float(), blocks).to(x_NF.dtype)

    def weight_gradient(self, x_BSC: Tensor, y_BSF: Tensor, leaves: OwnedLeaves, blocks: Intervals) -> SampleSums:
        return OuterSums(x_BSC.float(), y_BSF.float(), leaves.bounds, blocks)

    def weight_gradient_nodes(
        self, x_BSC: Tensor, y_BSF: Tensor, leaves: OwnedLeaves, blocks: Intervals, nodes: Sequence[Node]
    ) -> list[list[Tensor]]:
        return [
            [outer_sum(x_SC, y_SF, leaves.bounds, blocks[first:last]) for first, last in nodes]
            for x_SC, y_SF in zip(x_BSC.float(), y_BSF.float(), strict=True)
        ]

    def project_experts(self, x_NF: Tensor, weight_ECF: Tensor, rows: ExpertRows, leaves: OwnedLeaves) -> Tensor:
        x, weight = x_NF.float(), weight_ECF.float()
        columns = []
        for lo, hi in leaves.bounds:
            column = x.new_empty(len(x), hi - lo)
            for group in rows.groups:
                torch.mm(
                    x[group.first : group.last], weight[group.expert, lo:hi].t(), out=column[group.first : group.last]
                )
            columns.append(column)
        return torch.cat(columns, 1).to(x_NF.dtype)

    def contract_experts(self, x_NC: Tensor, weight_ECF: Tensor, rows: ExpertRows, leaves: OwnedLeaves) -> Tensor:
        x, weight = x_NC.float(), weight_ECF.float()
        nodes = leaves.nodes(leaves.tp_rank)
        values = x.new_empty(len(nodes), len(x), weight.shape[2])
        for group in rows.groups:
            part = x[group.first : group.last]
            products = [torch.mm(part[:, lo:hi].contiguous(), weight[group.expert, lo:hi]) for lo, hi in leaves.bounds]
            for node, value in zip(nodes, values, strict=True):
                value[group.first : group.last] = _node_sum(products, node, leaves.first_leaf)
        return values

    def expert_weight_gradient(
        self, x_NC: Tensor, y_NF: Tensor, rows: ExpertRows, leaves: OwnedLeaves
    ) -> Iterator[tuple[Leaf, Tensor]]:
        x, y = x_NC.float(), y_NF.float()
        for leaf, groups in zip(rows.leaves, rows.by_leaf, strict=True):
            total = x.new_empty(rows.num_experts, x.shape[1], y.shape[1])
            for expert, group in enumerate(groups):
                if group is None:
                    total[expert].zero_()
                    continue
                here = slice(group.first, group.last)
                for lo, hi in leaves.bounds:
                    torch.mm(x[here, lo:hi].contiguous().t(), y[here], out=total[expert, lo:hi])
            yield leaf, total

    def multiply_heads(self, left_BHMK: Tensor, right_BHKN: Tensor) -> Tensor:
        made = left_BHMK.new_empty(*left_BHMK.shape[:3], right_BHKN.shape[3])
        for lefts, rights, outs in zip(left_BHMK, right_BHKN, made, strict=True):
            for left, right, out in zip(lefts, rights, outs, strict=True):
                torch.mm(left, right, out=out)
        return made


def by_library() -> Mapping[str, Products]:
    """All forms by the library."""
    return dict.fromkeys(PRODUCT_FORMS, LibraryProducts())


def _node_sum(products: list[Tensor], node: Node, first_leaf: int) -> Tensor:
    """The tree over the leaves of a node; the products of its leaves are used up."""
    length = node[1] - node[0]
    if length == 1:
        return products[node[0] - first_leaf]
    middle = node[0] + (1 << (length - 1).bit_length() - 1)
    return _node_sum(products, (node[0], middle), first_leaf).add_(_node_sum(products, (middle, node[1]), first_leaf))
