"""Logits that are held below a cap: c tanh(x / c) (Gemma 2, arXiv 2408.00118, section 2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base.autograd import Function
from ..numerics import Numerics


def soft_capped(x: Tensor, cap: float, numerics: Numerics) -> Tensor:
    """c tanh(x / c) of contiguous values in any format, in fp32; `x` itself where the cap is 0."""
    return _SoftCapped.apply(x, cap, numerics) if cap else x


class _SoftCapped(Function):
    """Its derivative is 1 - tanh(x / c)^2."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float, numerics: Numerics) -> Tensor:
        capped = numerics.elementwise(torch.tanh, x.float() / cap)
        ctx.dtype = x.dtype
        ctx.save_for_backward(capped)
        return capped * cap

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (capped,) = ctx.saved_tensors
        return torch.addcmul(dy, dy * capped, capped, value=-1).to(ctx.dtype), None, None
