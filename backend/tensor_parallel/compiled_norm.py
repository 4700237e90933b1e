"""LayerNorm and RMSNorm in compiled kernels: one pass forward and one backward, with the sums over tokens in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..base.autograd import Function
from ..numerics.compiled import compiled

if TYPE_CHECKING:
    from .norm import Norm


@compiled
def rms_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y [.., h] and 1/sqrt(mean(x^2) + eps) [.., 1], fp32."""
    wide = x.float()
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * rstd * weight).to(x.dtype), rstd


@compiled
def rms_backward(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """dx [.., h] and the gradient of the weight [h], fp32."""
    normed = x.float() * rstd
    return _input_gradient(dy, normed, rstd, weight, centered=False).to(dy.dtype), _sums(normed * dy)


@compiled
def layer_forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y [.., h], and the mean and 1/sqrt(variance + eps) of every row [.., 1], fp32."""
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    rstd = ((wide - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    return ((wide - mean) * rstd * weight + bias).to(x.dtype), mean, rstd


@compiled
def layer_backward(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dx [.., h] and the gradients of weight and bias [h], fp32."""
    normed = (x.float() - mean) * rstd
    dx = _input_gradient(dy, normed, rstd, weight, centered=True)
    return dx.to(dy.dtype), _sums(normed * dy), _sums(dy)


def _input_gradient(dy: Tensor, normed: Tensor, rstd: Tensor, weight: Tensor, *, centered: bool) -> Tensor:
    g = dy.float() * weight
    dx = g - normed * (g * normed).mean(-1, keepdim=True)
    return (dx - g.mean(-1, keepdim=True) if centered else dx) * rstd


def _sums(x: Tensor) -> Tensor:
    return x.float().flatten(0, -2).sum(0)


class CompiledRmsNorm(Function):
    """As `norm._RmsNorm`."""

    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, layer: Norm) -> Tensor:
        ctx.layer, ctx.microbatch = layer, layer.context.microbatch
        y_BSH, rstd = rms_forward(x_BSH.detach(), layer.weight.operand, layer.eps)
        ctx.save_for_backward(x_BSH, rstd)
        return y_BSH

    @staticmethod
    def backward(ctx: Any, dy_BSH: Tensor) -> tuple[Tensor, None]:
        (x_BSH, rstd), layer = ctx.saved_tensors, ctx.layer
        dx_BSH, dweight = rms_backward(dy_BSH.contiguous(), x_BSH.detach(), rstd, layer.weight.operand)
        layer.context.submit(layer.name, [(layer.weight_usage, lambda: dweight)], ctx.microbatch)
        return dx_BSH, None


class CompiledLayerNorm(Function):
    """As `norm._LayerNorm`."""

    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, layer: Norm) -> Tensor:
        assert layer.bias is not None
        ctx.layer, ctx.microbatch = layer, layer.context.microbatch
        y_BSH, mean, rstd = layer_forward(x_BSH.detach(), layer.weight.operand, layer.bias.operand, layer.eps)
        ctx.save_for_backward(x_BSH, mean, rstd)
        return y_BSH

    @staticmethod
    def backward(ctx: Any, dy_BSH: Tensor) -> tuple[Tensor, None]:
        (x_BSH, mean, rstd), layer = ctx.saved_tensors, ctx.layer
        dx_BSH, dweight, dbias = layer_backward(dy_BSH.contiguous(), x_BSH.detach(), mean, rstd, layer.weight.operand)
        work = [(layer.weight_usage, lambda: dweight), (layer.bias_usage, lambda: dbias)]
        layer.context.submit(layer.name, work, ctx.microbatch)
        return dx_BSH, None
