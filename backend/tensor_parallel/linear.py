"""Linear layers cut over tensor parallelism: `ColumnParallelLinear` cuts its output features, `RowParallelLinear` its input features."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..numerics import Contribution
from .context import LayerContext


class ParallelLinear(nn.Module):
    """What both kinds share: the three products (see `numerics.base`), recorded under the layer's name.

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

    def project(self, x_BSF: Tensor) -> Tensor:
        """[b, s, f] -> [b, s, c]: whole features to this rank's part of the cut ones."""
        cut_size, full_size = self.shard.storage.shape
        with self.context.recorder.layer(self.name):
            self.context.recorder.product(_tokens(x_BSF), cut_size, full_size)
            return self.context.numerics.project(x_BSF, self.shard.storage, self.leaves)

    def contract(self, x_BSC: Tensor) -> Tensor:
        """[b, s, c] -> [b, s, f]: summed over all ranks' parts."""
        cut_size, full_size = self.shard.storage.shape
        with self.context.recorder.layer(self.name):
            self.context.recorder.product(_tokens(x_BSC), full_size, cut_size)
            return self.context.numerics.contract(x_BSC, self.shard.storage, self.leaves, self.context.tp)

    def weight_gradient(self, x_BSC: Tensor, y_BSF: Tensor) -> Contribution:
        """The contribution of one microbatch, in storage orientation."""
        cut_size, full_size = self.shard.storage.shape
        self.context.recorder.product(cut_size, full_size, _tokens(x_BSC))
        return self.context.numerics.weight_gradient(x_BSC, y_BSF, self.leaves)

    def submit(self, ctx: Any, x_BSC: Tensor, y_BSF: Tensor, output_gradient: Tensor) -> None:
        """Leaves the gradients of weight and bias to the stage."""
        work = [(self.usage, lambda: self.weight_gradient(x_BSC, y_BSF))]
        if self.bias is not None:
            work.append((self.bias_usage, lambda: self.context.numerics.token_sums(output_gradient)))
        self.context.submit(self.name, work, ctx.microbatch)


class ColumnParallelLinear(ParallelLinear):
    """[b, s, f] -> [b, s, c], the same input on every rank, each rank its own output features."""

    def forward(self, x_BSF: Tensor) -> Tensor:
        return _Column.apply(x_BSF, self)


class RowParallelLinear(ParallelLinear):
    """[b, s, c] -> [b, s, f], each rank its own input features, the same output on every rank."""

    def forward(self, x_BSC: Tensor) -> Tensor:
        return _Row.apply(x_BSC, self)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSF: Tensor, layer: ColumnParallelLinear) -> Tensor:
        ctx.layer, ctx.microbatch = layer, layer.context.microbatch
        ctx.save_for_backward(x_BSF)
        y_BSC = layer.project(x_BSF)
        return y_BSC if layer.bias is None else y_BSC.add_(layer.bias.storage)

    @staticmethod
    def backward(ctx: Any, dy_BSC: Tensor) -> tuple[Tensor, None]:
        (x_BSF,) = ctx.saved_tensors
        dy_BSC = dy_BSC.contiguous()
        dx_BSF = ctx.layer.contract(dy_BSC)
        ctx.layer.submit(ctx, dy_BSC, x_BSF, dy_BSC)
        return dx_BSF, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSC: Tensor, layer: RowParallelLinear) -> Tensor:
        ctx.layer, ctx.microbatch = layer, layer.context.microbatch
        ctx.save_for_backward(x_BSC)
        y_BSF = layer.contract(x_BSC)
        return y_BSF if layer.bias is None else y_BSF.add_(layer.bias.storage)

    @staticmethod
    def backward(ctx: Any, dy_BSF: Tensor) -> tuple[Tensor, None]:
        (x_BSC,) = ctx.saved_tensors
        dy_BSF = dy_BSF.contiguous()
        dx_BSC = ctx.layer.project(dy_BSF)
        ctx.layer.submit(ctx, x_BSC, dy_BSF, dy_BSF)
        return dx_BSC, None


def _tokens(x_BSN: Tensor) -> int:
    return x_BSN.shape[0] * x_BSN.shape[1]
