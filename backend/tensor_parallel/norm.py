"""LayerNorm and RMSNorm, computed in fp32 and rounded once. Rows are whole on every rank, so only their weights'
gradients need the canonical sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...core.layout.stage_parameters import Usage
from ..base.autograd import Function
from ..gradients.parameter import Shard
from ..numerics import Contribution, Numerics
from .compiled_norm import layer_backward, layer_forward, rms_backward, rms_forward
from .context import LayerContext


class Norm(nn.Module):
    """[b, s, h] -> [b, s, h]: the model's norm with parameters `name.weight` and, for a LayerNorm that has one,
    `name.bias`.

    Where the plan recomputes norms, a layer's norm keeps its input, and who uses its result in a
    backward makes it again.
    """

    def __init__(self, context: LayerContext, name: str):
        super().__init__()
        self.name = name
        self.context = context
        # nobody keeps what a norm behind attention or MLP makes
        in_layer = name.startswith("layers.") and not name.endswith(".post_norm")
        self.recomputed = "norm" in context.recomputed_modules and in_layer
        self.eps = context.model.norm_eps
        self.epsilon = torch.tensor(self.eps, device=context.numerics.device)
        self.weight, self.weight_usage = context.shard(f"{name}.weight")
        self.bias: Shard | None
        self.bias_usage: Usage | None
        self.bias, self.bias_usage = context.shard(f"{name}.bias") if context.has(f"{name}.bias") else (None, None)
        self._function = self._chosen(context.numerics)

    def _chosen(self, numerics: Numerics) -> type[Function]:
        """What computes the norm."""
        if numerics.compiles:
            return _CompiledLayerNorm if self.is_centred else _CompiledRmsNorm
        of_squares = _RmsNorm if numerics.mode == "exact" else _FastRmsNorm
        return _LayerNorm if self.is_centred else of_squares

    @property
    def is_centred(self) -> bool:
        """True for a LayerNorm, which takes the mean away."""
        return self.context.model.norm == "layernorm"

    @property
    def factor(self) -> Tensor:
        """[h]: what normed rows are multiplied by, fp32 where it is not the weight alone."""
        offset = self.context.model.norm_offset
        return self.weight.operand.float() + offset if offset else self.weight.operand

    def submit(self, ctx: Any, weight: Callable[[], Contribution], bias: Callable[[], Contribution]) -> None:
        """Leaves the gradients of weight and, where there is one, bias to the stage."""
        work = [(self.weight_usage, weight)]
        if self.bias_usage is not None:
            work.append((self.bias_usage, bias))
        self.context.submit(self.name, work, ctx.microbatch)

    def forward(self, x_BSH: Tensor) -> Tensor:
        y_BSH = self._function.apply(x_BSH, self)
        if not self.recomputed:
            return y_BSH
        again = self.context.keep(x_BSH)
        return self.context.can_repeat(y_BSH, lambda: self._again(again()), self.name)

    def _again(self, x_BSH: Tensor) -> Tensor:
        with torch.no_grad():
            return self._function.apply(x_BSH, self)

    def token_sums(self, x_BSH: Tensor) -> Contribution:
        """The sums over the tokens that this rank has."""
        return self.context.numerics.token_sums(x_BSH, self.context.tokens)


class HeadNorm(Norm):
    """[b, s, l, q, d] -> the same: the model's norm of every head, with one weight for all; l key/value
    heads of q heads each."""

    def __init__(self, context: LayerContext, name: str):
        super().__init__(context, name)
        self.recomputed = False

    def token_sums(self, x_BSH: Tensor) -> Contribution:
        """The sums over the tokens and heads that this rank has."""
        return self.context.numerics.head_sums(x_BSH, self.context.heads)


class HeadNorms(nn.Module):
    """Queries [b, s, l, q, d] and keys [b, s, l, 1, d] -> the same, every head normed, with one weight for queries and
    one for keys."""

    def __init__(self, context: LayerContext, prefix: str):
        super().__init__()
        self.queries, self.keys = (HeadNorm(context, f"{prefix}.{name}") for name in ("query_norm", "key_norm"))

    def forward(self, q_BSLQD: Tensor, k_BSLQD: Tensor) -> tuple[Tensor, Tensor]:
        return self.queries(q_BSLQD.contiguous()), self.keys(k_BSLQD.contiguous())


class _LayerNorm(Function):
    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, layer: Norm) -> Tensor:
        ctx.layer, ctx.microbatch = layer, layer.context.microbatch
        weight, bias = layer.factor.float(), None if layer.bias is None else layer.bias.operand.float()
        y_BSH, mean, rstd = torch.native_layer_norm(x_BSH.float(), x_BSH.shape[-1:], weight, bias, layer.eps)
        ctx.save_for_backward(x_BSH, mean, rstd)
        return y_BSH.to(x_BSH.dtype)

    @staticmethod
    def backward(ctx: Any, dy_BSH: Tensor) -> tuple[Tensor, None]:
        (x_BSH, mean, rstd), layer, dtype = ctx.saved_tensors, ctx.layer, dy_BSH.dtype
        dy_BSH, x_BSH = dy_BSH.contiguous().float(), x_BSH.float()
        dx_BSH, _, _ = torch.ops.aten.native_layer_norm_backward(
            dy_BSH, x_BSH, x_BSH.shape[-1:], mean, rstd, layer.factor.float(), None, [True, False, False]
        )
        layer.submit(
            ctx,
            lambda: layer.token_sums((x_BSH - mean).mul_(rstd).mul_(dy_BSH)),
            lambda: layer.token_sums(dy_BSH),
        )
        return dx_BSH.to(dtype), None


class _RmsNorm(Function):
    """y = x r w with r = 1/sqrt(mean(x^2) + eps) (Zhang & Sennrich 2019); dx = r (g - n mean(g n)) with
    n = x r and g = w dy."""

    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, layer: Norm) -> Tensor:
        ctx.layer, ctx.microbatch = layer, layer.context.microbatch
        wide = x_BSH.float()
        rstd = layer.context.numerics.elementwise(torch.rsqrt, wide.square().mean(-1, keepdim=True) + layer.eps)
        ctx.save_for_backward(x_BSH, rstd)
        return (wide * rstd).mul_(layer.factor).to(x_BSH.dtype)

    @staticmethod
    def backward(ctx: Any, dy_BSH: Tensor) -> tuple[Tensor, None]:
        x_BSH, rstd = ctx.saved_tensors
        layer, normed, dtype = ctx.layer, x_BSH.float() * rstd, dy_BSH.dtype
        dy_BSH = dy_BSH.float()
        g = dy_BSH * layer.factor
        dx_BSH = (g - normed * (g * normed).mean(-1, keepdim=True)).mul_(rstd)

        def gradient() -> Contribution:
            return layer.token_sums(normed * dy_BSH)

        layer.context.submit(layer.name, [(layer.weight_usage, gradient)], ctx.microbatch)
        return dx_BSH.to(dtype), None


class _FastRmsNorm(Function):
    """The same in fewer passes: the library's LayerNorm of mean 0 has this gradient of the weight, and of the
    input this less r mean(g)."""

    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, layer: Norm) -> Tensor:
        ctx.layer, ctx.microbatch = layer, layer.context.microbatch
        wide = x_BSH.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        rstd = torch.addcmul(layer.epsilon, norm, norm, value=1 / x_BSH.shape[-1]).rsqrt_()
        ctx.save_for_backward(x_BSH, rstd)
        return (wide * rstd).mul_(layer.factor).to(x_BSH.dtype)

    @staticmethod
    def backward(ctx: Any, dy_BSH: Tensor) -> tuple[Tensor, None]:
        (x_BSH, rstd), layer, dtype = ctx.saved_tensors, ctx.layer, dy_BSH.dtype
        dy_BSH, x_BSH, weight, width = (
            dy_BSH.contiguous().float(),
            x_BSH.float(),
            layer.factor.float(),
            x_BSH.shape[-1:],
        )

        def backward(*wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
            return torch.ops.aten.native_layer_norm_backward(
                dy_BSH, x_BSH, width, torch.zeros_like(rstd), rstd, weight, None, wanted
            )

        later = layer.context.weight_work.deferring
        dx_BSH, gradient, _ = backward(True, not later, False)
        dx_BSH.addcmul_((dy_BSH @ weight).unsqueeze(-1), rstd, value=1 / len(weight))
        work = (lambda: backward(False, True, False)[1]) if later else lambda: gradient
        layer.context.submit(layer.name, [(layer.weight_usage, work)], ctx.microbatch)
        return dx_BSH.to(dtype), None


class _CompiledRmsNorm(Function):
    """As `_RmsNorm`."""

    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, layer: Norm) -> Tensor:
        ctx.layer, ctx.microbatch = layer, layer.context.microbatch
        y_BSH, rstd = rms_forward(x_BSH.detach(), layer.factor, layer.eps)
        ctx.save_for_backward(x_BSH, rstd)
        return y_BSH

    @staticmethod
    def backward(ctx: Any, dy_BSH: Tensor) -> tuple[Tensor, None]:
        (x_BSH, rstd), layer = ctx.saved_tensors, ctx.layer
        dx_BSH, dweight = rms_backward(dy_BSH.contiguous(), x_BSH.detach(), rstd, layer.factor)
        layer.context.submit(layer.name, [(layer.weight_usage, lambda: dweight)], ctx.microbatch)
        return dx_BSH, None


class _CompiledLayerNorm(Function):
    """As `_LayerNorm`."""

    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, layer: Norm) -> Tensor:
        ctx.layer, ctx.microbatch = layer, layer.context.microbatch
        bias = None if layer.bias is None else layer.bias.operand
        y_BSH, mean, rstd = layer_forward(x_BSH.detach(), layer.factor, bias, layer.eps)
        ctx.save_for_backward(x_BSH, mean, rstd)
        return y_BSH

    @staticmethod
    def backward(ctx: Any, dy_BSH: Tensor) -> tuple[Tensor, None]:
        (x_BSH, mean, rstd), layer = ctx.saved_tensors, ctx.layer
        dx_BSH, dweight, dbias = layer_backward(dy_BSH.contiguous(), x_BSH.detach(), mean, rstd, layer.factor)
        layer.submit(ctx, lambda: dweight, lambda: dbias)
        return dx_BSH, None
