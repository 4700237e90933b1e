"""The feed-forward half of a layer."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from ...core.parameters import layer_prefix
from ..numerics import Numerics
from ..tensor_parallel import ColumnParallelLinear, LayerContext, RowParallelLinear, recomputed


class MLP(nn.Module):
    """[b, s, h] -> [b, s, h]: up, activation, down. A gated MLP finds gate and up-projection of a unit in neighbouring features."""

    def __init__(self, context: LayerContext, layer: int):
        super().__init__()
        prefix = f"{layer_prefix(layer)}.mlp"
        self.context = context
        self.up = ColumnParallelLinear(context, f"{prefix}.up")
        self.down = RowParallelLinear(context, f"{prefix}.down")

    def forward(self, x_BSH: Tensor) -> Tensor:
        return recomputed(self.context, self._forward, x_BSH) if "mlp" in self.context.recomputed_modules else self._forward(x_BSH)

    def _forward(self, x_BSH: Tensor) -> Tensor:
        return self.down(activate(self.up(x_BSH), self.context.model.activation, self.context.numerics))


def activate(x: Tensor, activation: str, numerics: Numerics) -> Tensor:
    """The activation by its name in `ModelSpec`; swiglu and geglu halve the last dimension. `x` is contiguous."""
    match activation:
        case "swiglu" | "geglu":
            gate, up = (part.contiguous() for part in x.unflatten(-1, (-1, 2)).unbind(-1))
            return numerics.elementwise(F.silu if activation == "swiglu" else F.gelu, gate) * up
        case "gelu":
            return numerics.elementwise(F.gelu, x)
        case "gelu_tanh":
            return numerics.elementwise(lambda part: F.gelu(part, approximate="tanh"), x)
        case _:
            assert activation == "relu_squared", activation
            return F.relu(x).square()
