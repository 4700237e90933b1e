"""LayerNorm and RMSNorm. Rows are whole on every rank, so only their weights' gradients need the canonical sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .context import LayerContext


class Norm(nn.Module):
    """[b, s, h] -> [b, s, h]: the model's norm with parameters `name.weight` and, for LayerNorm, `name.bias`."""

    def __init__(self, context: LayerContext, name: str):
        super().__init__()
        self.name = name
        self.context = context
        self.eps = context.model.norm_eps
        self.weight, self.weight_usage = context.shard(f"{name}.weight")
        self.bias, self.bias_usage = context.shard(f"{name}.bias") if context.model.norm == "layernorm" else (None, None)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return (_RmsNorm if self.bias is None else _LayerNorm).apply(x_BSH, self)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, layer: Norm) -> Tensor:
        assert layer.bias is not None
        ctx.layer, ctx.microbatch = layer, layer.context.microbatch
        y, mean, rstd = torch.native_layer_norm(x_BSH, x_BSH.shape[-1:], layer.weight.storage, layer.bias.storage, layer.eps)
        ctx.save_for_backward(x_BSH, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy_BSH: Tensor) -> tuple[Tensor, None]:
        x_BSH, mean, rstd = ctx.saved_tensors
        layer, dy_BSH, sums = ctx.layer, dy_BSH.contiguous(), ctx.layer.context.numerics.token_sums
        dx_BSH, _, _ = torch.ops.aten.native_layer_norm_backward(
            dy_BSH, x_BSH, x_BSH.shape[-1:], mean, rstd, layer.weight.storage, layer.bias.storage, [True, False, False]
        )
        work = [(layer.weight_usage, lambda: sums((x_BSH - mean) * rstd * dy_BSH)), (layer.bias_usage, lambda: sums(dy_BSH))]
        layer.context.submit(layer.name, work, ctx.microbatch)
        return dx_BSH, None


class _RmsNorm(torch.autograd.Function):
    """y = x r w with r = 1/sqrt(mean(x^2) + eps) (Zhang & Sennrich 2019); dx = r (g - n mean(g n)) with n = x r and g = w dy."""

    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, layer: Norm) -> Tensor:
        ctx.layer, ctx.microbatch = layer, layer.context.microbatch
        rstd = layer.context.numerics.elementwise(torch.rsqrt, x_BSH.square().mean(-1, keepdim=True) + layer.eps)
        ctx.save_for_backward(x_BSH, rstd)
        return (x_BSH * rstd).mul_(layer.weight.storage)

    @staticmethod
    def backward(ctx: Any, dy_BSH: Tensor) -> tuple[Tensor, None]:
        x_BSH, rstd = ctx.saved_tensors
        layer, normed = ctx.layer, x_BSH * rstd
        g = dy_BSH * layer.weight.storage
        dx_BSH = (g - normed * (g * normed).mean(-1, keepdim=True)).mul_(rstd)

        def gradient():
            return layer.context.numerics.token_sums(normed * dy_BSH)

        layer.context.submit(layer.name, [(layer.weight_usage, gradient)], ctx.microbatch)
        return dx_BSH, None
