"""A linear layer that no rank cuts: the down-projections of latent attention, routers, the projection of
multi-token prediction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...core.layout.leaves import Leaves
from ...core.layout.stage_parameters import Usage
from ..base.autograd import Function
from ..gradients.parameter import Shard
from ..numerics import Contribution, OwnedLeaves
from .context import LayerContext


class WholeLinear(nn.Module):
    """[b, s, f] -> [b, s, n] of the tokens that this rank holds; parameters `name.weight` [n, f], and `name.bias`
    where the model has one.

    With `fp32` it computes with the fp32 weights and returns fp32, whatever the precision of the plan.

    Under sequence parallelism fast numerics leave the sum over the ranks' tokens to REDUCE_GRAD. Exact ones gather the
    tokens of input and output gradient, which are narrow, and every rank computes the whole gradient: blocks of tokens
    that weight gradients are made of are longer than those between which sequence parallelism cuts.
    """

    def __init__(self, context: LayerContext, name: str, *, fp32: bool = False):
        super().__init__()
        self.name = name
        self.context = context
        self.fp32 = fp32
        self.shard, self.usage = context.shard(f"{name}.weight", fp32=fp32)
        self.bias: Shard | None
        self.bias_usage: Usage | None
        self.bias, self.bias_usage = (
            context.shard(f"{name}.bias", fp32=fp32) if context.has(f"{name}.bias") else (None, None)
        )
        self.leaves = OwnedLeaves(Leaves(1, 1), len(self.shard.storage), 1, 0)

    @property
    def weight(self) -> Tensor:
        """[n, f], as this layer computes with it."""
        return self.shard.operand

    def forward(self, x_BSF: Tensor) -> Tensor:
        return _Whole.apply(x_BSF, self, self.context.source_of(x_BSF))

    def multiply(self, x_BSK: Tensor, matrix_KN: Tensor) -> Tensor:
        """x times a matrix, row by row, recorded as this layer's."""
        with self.context.recorder.layer(self.name):
            self._record(x_BSK.shape[0] * x_BSK.shape[1], matrix_KN.shape[1], matrix_KN.shape[0])
            return self.context.numerics.multiply(x_BSK.float() if self.fp32 else x_BSK, matrix_KN)

    def weight_gradient(self, dy_BSN: Tensor, x_BSF: Tensor) -> Contribution:
        """The contribution of one microbatch, [n, f]: of all tokens, or of this rank's own where numerics are fast."""
        if self.context.numerics.mode == "exact":
            dy_BSN, x_BSF = self.context.gather(dy_BSN), self.context.gather(x_BSF)
        self._record(dy_BSN.shape[2], x_BSF.shape[2], x_BSF.shape[0] * x_BSF.shape[1])
        return self.context.numerics.weight_gradient(dy_BSN, x_BSF.float() if self.fp32 else x_BSF, self.leaves)

    def _record(self, m: int, n: int, k: int) -> None:
        self.context.recorder.product(m, n, k, dtype="fp32" if self.fp32 else None)


class _Whole(Function):
    @staticmethod
    def forward(ctx: Any, x_BSF: Tensor, layer: WholeLinear, source: Callable[[], Tensor] | None) -> Tensor:
        ctx.layer, ctx.microbatch, ctx.source = layer, layer.context.microbatch, source
        ctx.save_for_backward(*([x_BSF] if source is None else []))
        y_BSN = layer.multiply(x_BSF, layer.weight.t())
        return y_BSN if layer.bias is None else y_BSN.add_(layer.bias.operand)

    @staticmethod
    def backward(ctx: Any, dy_BSN: Tensor) -> tuple[Tensor, None, None]:
        x_BSF = ctx.source() if ctx.source is not None else ctx.saved_tensors[0]
        layer, context, dy_BSN = ctx.layer, ctx.layer.context, dy_BSN.contiguous()
        dx_BSF = layer.multiply(dy_BSN, layer.weight)
        work: list[tuple[Any, Callable[[], Contribution]]] = [
            (layer.usage, lambda: layer.weight_gradient(dy_BSN, x_BSF))
        ]
        if layer.bias is not None:
            work.append((layer.bias_usage, lambda: context.numerics.token_sums(dy_BSN, context.tokens)))
        context.submit(layer.name, work, ctx.microbatch)
        return dx_BSF.to(x_BSF.dtype), None, None
