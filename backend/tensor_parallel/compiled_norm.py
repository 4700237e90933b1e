"""Kernels of LayerNorm and RMSNorm: one pass forward and one backward, with the sums over tokens in it."""

from __future__ import annotations

from torch import Tensor

from ..numerics.compiled import compiled


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
def layer_forward(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y [.., h], and the mean and 1/sqrt(variance + eps) of every row [.., 1], fp32."""
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    rstd = ((wide - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    normed = (wide - mean) * rstd * weight
    return (normed if bias is None else normed + bias).to(x.dtype), mean, rstd


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
