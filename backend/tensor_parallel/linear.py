"""Linear layers cut over tensor parallelism: `ColumnParallelLinear` cuts its output features, `RowParallelLinear` its input features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..numerics import Contribution
from .context import LayerContext


class ParallelLinear(nn.Module):
    """What both kinds share: the three products (see `numerics.base`), recorded under the layer's name.

    With sequence parallelism a whole-feature side has this rank's tokens outside of the layer, and all of them inside.

    `weight` and `bias` name the parameters; the bias is left out where the model has none.
    """

    def __init__(self, context: LayerContext, name: str, *, weight: str | None = None, role: Literal["", "embedding", "output"] = ""):
        super().__init__()
        weight = weight or f"{name}.weight"
        self.name = name
        self.context = context
        self.leaves = context.owned_leaves(weight)
        self.shard, self.usage = context.shard(weight, role)
        self.bias, self.bias_usage = context.shard(f"{name}.bias") if context.has(f"{name}.bias") else (None, None)

    def gather(self, x_BSF: Tensor) -> Tensor:
        """All tokens of the whole-feature side."""
        with self.context.recorder.layer(self.name):
            return self.context.gather(x_BSF)

    def project(self, x_BSF: Tensor) -> Tensor:
        """[b, s, f] of all tokens -> [b, s, c]: whole features to this rank's part of the cut ones."""
        cut_size, full_size = self.shard.storage.shape
        with self.context.recorder.layer(self.name):
            self.context.recorder.product(_tokens(x_BSF), cut_size, full_size)
            return self.context.numerics.project(x_BSF, self.shard.operand, self.leaves)

    def contract(self, x_BSC: Tensor) -> Tensor:
        """[b, s, c] -> [b, s, f]: summed over all ranks' parts; this rank's tokens of it."""
        cut_size, full_size = self.shard.storage.shape
        with self.context.recorder.layer(self.name):
            self.context.recorder.product(_tokens(x_BSC), full_size, cut_size)
            return self.context.numerics.contract(x_BSC, self.shard.operand, self.leaves, self.context.tp, self.context.tokens)

    def weight_gradient(self, x_BSC: Tensor, y_BSF: Tensor) -> Contribution:
        """The contribution of one microbatch, in storage orientation."""
        cut_size, full_size = self.shard.storage.shape
        self.context.recorder.product(cut_size, full_size, _tokens(x_BSC))
        return self.context.numerics.weight_gradient(x_BSC, y_BSF, self.leaves)

    def submit(self, ctx: Any, weight: Callable[[], Contribution], bias: Callable[[], Contribution]) -> None:
        """Leaves the gradients of weight and bias to the stage."""
        work = [(self.usage, weight)]
        if self.bias is not None:
            work.append((self.bias_usage, bias))
        self.context.submit(self.name, work, ctx.microbatch)


class ColumnParallelLinear(ParallelLinear):
    """[b, s, f] -> [b, s, c], the same input on every rank, each rank its own output features."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        return _Column.apply(x_BSF, self, self.context.source_of(x_BSF))


class RowParallelLinear(ParallelLinear):
    """[b, s, c] -> [b, s, f], each rank its own input features, the same output on every rank."""

    def forward(self, x_BSC: Tensor) -> Tensor:
        return _Row.apply(x_BSC, self)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSF: Tensor, layer: ColumnParallelLinear, source: Callable[[], Tensor] | None) -> Tensor:
        ctx.layer, ctx.microbatch, ctx.source = layer, layer.context.microbatch, source
        ctx.save_for_backward(*([x_BSF] if source is None else []))
        y_BSC = layer.project(layer.gather(x_BSF))
        return y_BSC if layer.bias is None else y_BSC.add_(layer.bias.operand)

    @staticmethod
    def backward(ctx: Any, dy_BSC: Tensor) -> tuple[Tensor, None, None]:
        x_BSF = ctx.source() if ctx.source is not None else ctx.saved_tensors[0]
        layer, dy_BSC = ctx.layer, dy_BSC.contiguous()
        dx_BSF = layer.contract(dy_BSC)
        layer.submit(ctx, lambda: layer.weight_gradient(dy_BSC, layer.gather(x_BSF)), lambda: layer.context.numerics.token_sums(dy_BSC))
        return dx_BSF, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSC: Tensor, layer: RowParallelLinear) -> Tensor:
        ctx.layer, ctx.microbatch = layer, layer.context.microbatch
        ctx.save_for_backward(x_BSC)
        y_BSF = layer.contract(x_BSC)
        return y_BSF if layer.bias is None else y_BSF.add_(layer.bias.operand)

    @staticmethod
    def backward(ctx: Any, dy_BSF: Tensor) -> tuple[Tensor, None]:
        (x_BSC,) = ctx.saved_tensors
        layer, own_dy_BSF, tokens = ctx.layer, dy_BSF.contiguous(), ctx.layer.context.tokens
        dy_BSF = layer.gather(own_dy_BSF)
        dx_BSC = layer.project(dy_BSF)
        layer.submit(ctx, lambda: layer.weight_gradient(x_BSC, dy_BSF), lambda: layer.context.numerics.token_sums(own_dy_BSF, tokens))
        return dx_BSC, None


def _tokens(x_BSN: Tensor) -> int:
    return x_BSN.shape[0] * x_BSN.shape[1]
