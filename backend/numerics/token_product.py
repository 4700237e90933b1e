"""Contributions computed into the sum they belong to (Megatron's gradient accumulation fusion): `AddedInPlace`.

The first microbatch writes, so that no sum is zeroed before; later ones add. Besides the sum nothing of its size is
ever held. `TokenProduct` is a weight's, `InterleavedProduct` that of parts whose rows alternate, `ExpertProduct` that
of all local experts, and `LookupRows` a table's, of which only the rows that were looked up are touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor

ROWS_AT_ONCE = 256
"""Rows of a gradient whose product is held besides the sum where the library cannot add a narrow
product to an fp32 sum."""


class AddedInPlace(ABC):
    """A sum over one microbatch's tokens, not computed yet."""

    @abstractmethod
    def total(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """A sum that begins with it."""

    @abstractmethod
    def add_to(self, total: Tensor) -> None:
        """Adds it to a sum, in the sum's format."""


@dataclass(frozen=True)
class TokenProduct(AddedInPlace):
    """The sum over tokens of x_C y_F^T, [c, f].

    Of bf16 operands and an fp32 sum, products are added in fp32 where the library can (cuBLAS), and are rounded to bf16
    before elsewhere.
    """

    x_TC: Tensor
    y_TF: Tensor

    def total(self, dtype: torch.dtype = torch.float32) -> Tensor:
        total = torch.empty(self.x_TC.shape[1], self.y_TF.shape[1], dtype=dtype, device=self.x_TC.device)
        self.write(total)
        return total

    def write(self, total_CF: Tensor) -> None:
        """Puts the product where a sum begins."""
        if self.x_TC.dtype == total_CF.dtype:
            torch.mm(self.x_TC.t(), self.y_TF, out=total_CF)
        elif _library_adds(self.x_TC, total_CF):
            torch.ops.aten.mm.dtype_out(self.x_TC.t(), self.y_TF, total_CF.dtype, out=total_CF)
        else:
            for x_TC, rows in zip(self.x_TC.split(ROWS_AT_ONCE, 1), total_CF.split(ROWS_AT_ONCE), strict=True):
                rows.copy_(x_TC.t() @ self.y_TF)

    def add_to(self, total: Tensor) -> None:
        if self.x_TC.dtype == total.dtype:
            total.addmm_(self.x_TC.t(), self.y_TF)
        elif _library_adds(self.x_TC, total):
            torch.ops.aten.addmm.dtype_out(total, self.x_TC.t(), self.y_TF, total.dtype, out=total)
        else:
            for x_TC, rows in zip(self.x_TC.split(ROWS_AT_ONCE, 1), total.split(ROWS_AT_ONCE), strict=True):
                rows.add_(x_TC.t() @ self.y_TF)


@dataclass(frozen=True)
class InterleavedProduct(TokenProduct):
    """The same of n fused parts, x_TC being [n, t, c] and the gradient [n c, f]: feature j of part
    i is its row n j + i."""

    def total(self, dtype: torch.dtype = torch.float32) -> Tensor:
        num_parts, _, width = self.x_TC.shape
        total = torch.empty(num_parts * width, self.y_TF.shape[1], dtype=dtype, device=self.x_TC.device)
        self.write(total)
        return total

    def write(self, total_CF: Tensor) -> None:
        for number, x_TC in enumerate(self.x_TC):
            TokenProduct(x_TC, self.y_TF).write(total_CF[number :: len(self.x_TC)])

    def add_to(self, total: Tensor) -> None:
        for number, x_TC in enumerate(self.x_TC):
            TokenProduct(x_TC, self.y_TF).add_to(total[number :: len(self.x_TC)])


@dataclass(frozen=True)
class ExpertProduct(AddedInPlace):
    """The sums over every expert's rows of x_C y_F^T, [e, c, f]. `spans` are (expert, first, last) rows of x and y,
    in the order of experts; an expert may have several and may have none, whose sum is left as it is."""

    x_NC: Tensor
    y_NF: Tensor
    spans: Sequence[tuple[int, int, int]]
    num_experts: int

    def total(self, dtype: torch.dtype = torch.float32) -> Tensor:
        shape = self.num_experts, self.x_NC.shape[1], self.y_NF.shape[1]
        total, written = torch.empty(shape, dtype=dtype, device=self.x_NC.device), set()
        for expert, (first, *others) in self._by_expert():
            first.write(total[expert])
            for other in others:
                other.add_to(total[expert])
            written.add(expert)
        for expert in set(range(self.num_experts)) - written:
            total[expert].zero_()
        return total

    def add_to(self, total: Tensor) -> None:
        for expert, products in self._by_expert():
            for product in products:
                product.add_to(total[expert])

    def _by_expert(self) -> list[tuple[int, list[TokenProduct]]]:
        return [
            (expert, [TokenProduct(self.x_NC[first:last], self.y_NF[first:last]) for _, first, last in spans])
            for expert, spans in groupby(self.spans, key=lambda span: span[0])
        ]


@dataclass(frozen=True)
class LookupRows(AddedInPlace):
    """The rows of a gradient [b, s, h] added to the rows of their ids in a table [num_rows, h]; an id of `num_rows`
    belongs to another rank."""

    ids_BS: Tensor
    gradient_BSH: Tensor
    num_rows: int

    def total(self, dtype: torch.dtype = torch.float32) -> Tensor:
        total = torch.zeros(self.num_rows, self.gradient_BSH.shape[-1], dtype=dtype, device=self.ids_BS.device)
        self.add_to(total)
        return total

    def add_to(self, total: Tensor) -> None:
        ids, rows = self.ids_BS.flatten(), self.gradient_BSH.flatten(0, -2).float()
        if total.dtype != torch.float32:  # a token may come often: its rows are added in fp32, and rounded once
            total.add_(torch.ops.aten.embedding_dense_backward(rows, ids, self.num_rows + 1, -1, False)[:-1])
            return
        elsewhere = ids == self.num_rows
        # zeros for a row of another rank's: to select the others would wait for the device
        ids, rows = ids.masked_fill(elsewhere, 0), rows.masked_fill(elsewhere.unsqueeze(1), 0)
        if total.device.type == "cpu":
            total.index_add_(0, ids, rows)
        else:  # sorts ids, and so adds in one order; the other does where it may on CPUs only
            total.index_put_((ids,), rows, accumulate=True)


def _library_adds(operand: Tensor, total: Tensor) -> bool:
    narrow = operand.dtype in (torch.bfloat16, torch.float16)
    return narrow and total.dtype == torch.float32 and _adds_narrow_products(total.device.type)


@lru_cache
def _adds_narrow_products(device_type: str) -> bool:
    """Whether the library adds a product of bf16 operands to an fp32 sum in one call: on CUDA since torch 2.10 or so,
    on CPUs not yet. Asked once, of a small product."""
    if device_type == "cpu":
        return False
    operand = torch.ones(16, 16, dtype=torch.bfloat16, device=device_type)
    total = torch.ones(16, 16, device=device_type)
    try:
        torch.ops.aten.addmm.dtype_out(total, operand, operand, torch.float32, out=total)
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    return True
