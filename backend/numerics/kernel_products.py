"""`KernelProducts`: the products of exact numerics by our kernels in Triton (`kernels.exact_products`).

A kernel adds up the inside of a leaf by itself, k by k in fp32 and in the steps of a tensor core in bf16 and fp16, and
the leaves by the canonical tree. One launch makes what the library makes tile by tile. Leaves are those of the library:
feature leaves, and `gradient_token_block` tokens; only the order inside of one is another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core.base.errors import PlanError
from ...core.base.reduction import Node, split
from .contributions import Leaf
from .owned_leaves import OwnedLeaves
from .products import Products
from .row_groups import ExpertRows
from .sample_sums import SampleSums
from .tiles import Intervals

if TYPE_CHECKING:
    from ..kernels.exact_products import ExactProducts
    from ..kernels.kernel import Kernel

INTERPRETED_ARCHITECTURE = 80
"""Whose tiles an interpreter takes: those whose compiled code is carried out without a GPU too."""


class KernelProducts(Products):
    """`made` launches the kernel; `gradient_block` tokens are a leaf of a weight gradient."""

    heads_at_once = None

    def __init__(self, made: ExactProducts, gradient_block: int):
        self._made, self._gradient_block = made, gradient_block

    def project(self, x_NF: Tensor, weight_CF: Tensor, leaves: OwnedLeaves, blocks: Intervals) -> Tensor:
        x, weight = _in_one_format(x_NF, weight_CF)
        return self._made.project(x, weight).to(x_NF.dtype)

    def contract(self, x_NC: Tensor, weight_CF: Tensor, leaves: OwnedLeaves, blocks: Intervals) -> Tensor:
        if not leaves.own_nodes:
            return x_NC.new_empty(0, len(x_NC), weight_CF.shape[1], dtype=torch.float32)
        return self._made.contract(*_in_one_format(x_NC, weight_CF), leaves.width, leaves.own_nodes)

    def multiply(self, x_NF: Tensor, matrix_FK: Tensor, blocks: Intervals) -> Tensor:
        x, matrix = _in_one_format(x_NF, matrix_FK)
        return self._made.contract(x, matrix, len(matrix), ((0, 1),))[0].to(x_NF.dtype)

    def weight_gradient(self, x_BSC: Tensor, y_BSF: Tensor, leaves: OwnedLeaves, blocks: Intervals) -> SampleSums:
        return KernelSums(*_in_one_format(x_BSC, y_BSF), self._made, self._gradient_block, (0, len(blocks)))

    def weight_gradient_nodes(
        self, x_BSC: Tensor, y_BSF: Tensor, leaves: OwnedLeaves, blocks: Intervals, nodes: Sequence[Node]
    ) -> list[list[Tensor]]:
        values = self._made.weight_gradient(*_in_one_format(x_BSC, y_BSF), self._gradient_block, nodes)
        return [list(values[:, sample]) for sample in range(len(x_BSC))]

    def project_experts(self, x_NF: Tensor, weight_ECF: Tensor, rows: ExpertRows, leaves: OwnedLeaves) -> Tensor:
        x, weight = _in_one_format(x_NF, weight_ECF)
        groups = [(group.expert, group.first, group.last) for group in rows.groups]
        return self._made.project_experts(x, weight, groups).to(x_NF.dtype)

    def contract_experts(self, x_NC: Tensor, weight_ECF: Tensor, rows: ExpertRows, leaves: OwnedLeaves) -> Tensor:
        groups = [(group.expert, group.first, group.last) for group in rows.groups]
        return self._made.contract_experts(*_in_one_format(x_NC, weight_ECF), groups, leaves.width, leaves.own_nodes)

    def expert_weight_gradient(
        self, x_NC: Tensor, y_NF: Tensor, rows: ExpertRows, leaves: OwnedLeaves
    ) -> Iterator[tuple[Leaf, Tensor]]:
        x, y = _in_one_format(x_NC, y_NF)
        for leaf, groups in zip(rows.leaves, rows.by_leaf, strict=True):
            there = [group for group in groups if group is not None]
            made = self._made.expert_weight_gradient(
                x, y, [(group.expert, group.first, group.last) for group in there], self._gradient_block
            )
            total = made
            if len(there) < rows.num_experts:
                total = made.new_zeros(rows.num_experts, *made.shape[1:])
                for group, value in zip(there, made, strict=True):
                    total[group.expert] = value
            yield leaf, total

    def multiply_heads(self, left_BHMK: Tensor, right_BHKN: Tensor) -> Tensor:
        made = self._made.multiply_each(left_BHMK.flatten(0, 1), right_BHKN.flatten(0, 1))
        return made.view(*left_BHMK.shape[:2], *made.shape[1:])


@dataclass(frozen=True)
class KernelSums(SampleSums):
    """For every sample the sum over tokens of x_C y_F^T, [c, f]: the canonical tree over leaves of `leaf` tokens, of
    which `node` is all of a sample."""

    x_BSC: Tensor
    y_BSF: Tensor
    made: ExactProducts
    leaf: int
    node: Node

    def __len__(self) -> int:
        return len(self.x_BSC)

    def total(self, samples: Node) -> Tensor:
        lo, hi = samples
        if hi - lo == 1:
            return self.made.weight_gradient(self.x_BSC[lo:hi], self.y_BSF[lo:hi], self.leaf, [self.node])[0, 0]
        first, second = split(samples)
        return self.total(first).add_(self.total(second))

    def add_to(self, total: Tensor, samples: Node) -> None:
        total.add_(self.total(samples))


def kernel_products(device: torch.device, gradient_block: int) -> KernelProducts:
    """Those of a device. Raises `PlanError` where the kernel cannot run (`why_no_kernels`)."""
    if why := why_no_kernels(device):
        raise PlanError(f'numerics.triton_products: {why}. Leave it out, or use numerics.triton_products=["none"].')
    from ..kernels.exact_products import ExactProducts, tiles_for
    from ..kernels.launch import launch_alone

    if device.type == "cpu":
        from ..kernels.interpreted import launch_interpreted

        return KernelProducts(ExactProducts(launch_interpreted, 1, tiles_for(INTERPRETED_ARCHITECTURE)), gradient_block)

    def launch(
        kernel: Kernel,
        num_blocks: int,
        arguments: Mapping[str, Any],
        constants: Mapping[str, Any],
        reached: Sequence[Tensor] = (),
    ) -> None:
        with torch.cuda.device(device):
            launch_alone(kernel, num_blocks, arguments, constants)

    found = torch.cuda.get_device_properties(device)
    tiles = tiles_for(10 * found.major + found.minor)
    return KernelProducts(ExactProducts(launch, found.multi_processor_count, tiles), gradient_block)


def why_no_kernels(device: torch.device) -> str:
    """Why a device cannot run the kernel of products; empty where it can."""
    try:
        from ..kernels import catalog
        from ..kernels.interpreted import is_interpreted
    except ImportError:
        return "Triton is not installed (pip install 'shardproof[gpu]')"
    if device.type == "cpu":
        return "" if is_interpreted() else "processors interpret kernels, and only where TRITON_INTERPRET=1 is set"
    if is_interpreted():
        return "TRITON_INTERPRET is set, which interprets kernels on processors alone: unset it"
    found, least = torch.cuda.get_device_properties(device), catalog.kernel("exact_product").least_architecture
    if 10 * found.major + found.minor < least:
        return f"{found.name} has compute capability {found.major}.{found.minor}, below {least / 10}"
    return ""


def _in_one_format(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one format, fp32 where they have two."""
    return (left, right) if left.dtype == right.dtype else (left.float(), right.float())
