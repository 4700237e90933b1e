"""The feed-forward half of a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..numerics import Numerics
from ..tensor_parallel import ColumnParallelLinear, LayerContext, RowParallelLinear, recomputed, split_fused
from ..tensor_parallel.gated import can_be_gated, gated


class MLP(nn.Module):
    """[b, s, h] -> [b, s, h]: up, activation, down. A gated MLP finds gate and up-projection of a unit
    in neighbouring features.

    What it computes inside is made again for the backward where it is `recomputed`.
    """

    def __init__(self, context: LayerContext, prefix: str, *, recomputed: bool):
        super().__init__()
        self.name = prefix
        self.context = context
        self.recomputed = recomputed
        self.up = ColumnParallelLinear(context, f"{prefix}.up")
        self.down = RowParallelLinear(context, f"{prefix}.down")

    def forward(self, x_BSH: Tensor) -> Tensor:
        if not self.recomputed:
            return self._forward(x_BSH)
        return recomputed(self.context, self._forward, x_BSH, name=self.name)

    def _forward(self, x_BSH: Tensor) -> Tensor:
        if can_be_gated(self.up):
            return self.down(gated(self.up, x_BSH))
        again = f"{self.name}.activation" if "mlp_act" in self.context.recomputed_modules else None
        return self.down(activated(self.context, self.up(x_BSH), again=again))


def activated(context: LayerContext, x: Tensor, *, again: str | None) -> Tensor:
    """The model's activation of a contiguous tensor; with a name `again` only its input stays, and who would keep the
    result makes it again."""
    activation, numerics = context.model.activation, context.numerics
    if again is None:
        return activate(x, activation, numerics)
    saved = context.keep(x)
    return context.can_repeat(
        _Activated.apply(x, activation, numerics), lambda: activate(saved(), activation, numerics), again
    )


class _Activated(torch.autograd.Function):
    """An activation that keeps its input only, whatever it is made of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, numerics: Numerics) -> Tensor:
        ctx.of = activation, numerics
        ctx.save_for_backward(x)
        return activate(x, activation, numerics)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = activate(x, *ctx.of)
        return torch.autograd.grad(y, x, dy)[0], None, None


def activate(x: Tensor, activation: str, numerics: Numerics) -> Tensor:
    """The activation by its name in `ModelSpec`; swiglu and geglu halve the last dimension. `x` is contiguous."""
    match activation:
        case "swiglu" | "geglu":
            gate, up = split_fused(x, (1, 1))
            return numerics.elementwise(F.silu if activation == "swiglu" else F.gelu, gate) * up
        case "gelu":
            return numerics.elementwise(F.gelu, x)
        case "gelu_tanh":
            return numerics.elementwise(lambda part: F.gelu(part, approximate="tanh"), x)
        case _:
            assert activation == "relu_squared", activation
            return F.relu(x).square()
