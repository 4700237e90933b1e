"""The feed-forward half of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.model.model import ModelSpec
from ...core.model.model_fields import QUICK_GELU
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
    model, numerics = context.model, context.numerics
    if again is None:
        return activate(x, model, numerics)
    saved = context.keep(x)
    return context.can_repeat(_Activated.apply(x, model, numerics), lambda: activate(saved(), model, numerics), again)


class _Activated(torch.autograd.Function):
    """An activation that keeps its input only, whatever it is made of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: ModelSpec, numerics: Numerics) -> Tensor:
        ctx.of = model, numerics
        ctx.save_for_backward(x)
        return activate(x, model, numerics)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = activate(x, *ctx.of)
        return torch.autograd.grad(y, x, dy)[0], None, None


def activate(x: Tensor, model: ModelSpec, numerics: Numerics) -> Tensor:
    """The model's activation; a gated one halves the last dimension. `x` is contiguous."""
    if model.gated:
        gate, up = split_fused(x, (1, 1))
        if (limit := model.gate_limit) is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        up = up + model.gate_offset if model.gate_offset else up
        return numerics.elementwise(_FUNCTIONS[model.activation], gate) * up
    if model.activation == "relu_squared":
        return F.relu(x).square()
    return numerics.elementwise(_FUNCTIONS[model.activation], x)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    """The approximation by a sigmoid of Hendrycks & Gimpel 2016, arXiv 1606.08415, section 2."""
    return x * torch.sigmoid(x * QUICK_GELU)


_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": _gelu_tanh,
    "quick_geglu": _quick_gelu,
}
"""`ModelSpec.activation` -> what is done to the gate, or to all of a plain MLP's units."""
