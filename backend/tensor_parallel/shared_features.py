"""A column-parallel layer with features that are gathered with its input: the rotary key of latent attention,
which all heads share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .context import LayerContext
from .linear import ColumnParallelLinear, column_backward


class SharedFeaturesLinear(ColumnParallelLinear):
    """[b, s, f] and [b, s, r] of own tokens -> [b, s, c] and [b, s, l, r] of all: the second once for each
    of this rank's l leaves.

    One gather brings both to every rank. The gradients of the copies are summed over the leaves of all ranks, with
    the input's, in one exchange.
    """

    def __init__(self, context: LayerContext, name: str):
        super().__init__(context, name)
        self.num_own = len(self.leaves.bounds)

    def spread(self, x_BSF: Tensor, shared_BSR: Tensor) -> tuple[Tensor, Tensor]:
        """What `forward` is for a layer without company."""
        return _SharedFeatures.apply(x_BSF, shared_BSR, self)


class _SharedFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSF: Tensor, shared_BSR: Tensor, layer: SharedFeaturesLinear) -> tuple[Tensor, Tensor]:
        ctx.layer, ctx.microbatch, ctx.add_bias = layer, layer.context.microbatch, True
        ctx.source = layer.context.source_of(x_BSF)
        ctx.save_for_backward(*([x_BSF] if ctx.source is None else []))
        widths = [x_BSF.shape[-1], shared_BSR.shape[-1]]
        if layer.context.tokens is not None:
            x_BSF, shared_BSR = (
                part.contiguous() for part in layer.gather(torch.cat([x_BSF, shared_BSR], -1)).split(widths, -1)
            )
        y_BSC = layer.project(x_BSF)
        if layer.bias is not None:
            y_BSC.add_(layer.bias.operand)
        return y_BSC, shared_BSR.unsqueeze(2).repeat(1, 1, layer.num_own, 1)

    @staticmethod
    def backward(ctx: Any, dy_BSC: Tensor, dshared_BSLR: Tensor) -> tuple[Tensor, Tensor, None]:
        layer, dy_BSC = ctx.layer, dy_BSC.contiguous()

        def product() -> Tensor:
            return torch.cat(
                [layer.partial_contract(dy_BSC), layer.context.numerics.partial_sum(dshared_BSLR, layer.leaves)], -1
            )

        widths = [layer.shard.storage.shape[1], dshared_BSLR.shape[-1]]
        dx_BSF, dbeside_BSR = (part.contiguous() for part in column_backward(ctx, dy_BSC, product).split(widths, -1))
        return dx_BSF, dbeside_BSR, None
