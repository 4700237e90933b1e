"""Weight gradients computed into the sum they belong to: `TokenProduct`, and `InterleavedProduct` of parts
whose rows alternate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_AT_ONCE = 256
"""Rows of a gradient whose product is held besides the sum where the library cannot add a narrow
product to an fp32 sum."""


@dataclass(frozen=True)
class TokenProduct:
    """The sum over tokens of x_C y_F^T, [c, f], not computed yet: `add_to` needs no other tensor of that size.

    Of bf16 operands each product is rounded to bf16, as the library does, and added in fp32.
    """

    x_TC: Tensor
    y_TF: Tensor

    def total(self) -> Tensor:
        """A sum that begins with this product, fp32."""
        if self.x_TC.dtype == torch.float32:
            return self.x_TC.t() @ self.y_TF
        total = torch.zeros(self.x_TC.shape[1], self.y_TF.shape[1], dtype=torch.float32, device=self.x_TC.device)
        self.add_to(total)
        return total

    def add_to(self, total_CF: Tensor) -> None:
        """Adds the product to a sum, in fp32 or rounded to the sum's narrower format."""
        if self.x_TC.dtype == total_CF.dtype:
            total_CF.addmm_(self.x_TC.t(), self.y_TF)
            return
        for x_TC, rows in zip(self.x_TC.split(ROWS_AT_ONCE, 1), total_CF.split(ROWS_AT_ONCE), strict=True):
            rows.add_(x_TC.t() @ self.y_TF)


@dataclass(frozen=True)
class InterleavedProduct(TokenProduct):
    """The same of n fused parts, x_TC being [n, t, c] and the gradient [n c, f]: feature j of part
    i is its row n j + i."""

    def total(self) -> Tensor:
        num_parts, _, width = self.x_TC.shape
        make = torch.empty if self.x_TC.dtype == torch.float32 else torch.zeros
        total = make(num_parts * width, self.y_TF.shape[1], dtype=torch.float32, device=self.x_TC.device)
        for number, x_TC in enumerate(self.x_TC):
            if x_TC.dtype == torch.float32:
                torch.mm(x_TC.t(), self.y_TF, out=total[number::num_parts])
            else:
                TokenProduct(x_TC, self.y_TF).add_to(total[number::num_parts])
        return total

    def add_to(self, total_CF: Tensor) -> None:
        for number, x_TC in enumerate(self.x_TC):
            TokenProduct(x_TC, self.y_TF).add_to(total_CF[number :: len(self.x_TC)])
