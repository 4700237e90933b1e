"""The gated half of an MLP in one step: activation(gate(x)) * up(x), gate and up-projection computed apart
into tensors of their own.

Their rows alternate in the fused weight, and a matrix product takes rows at any distance as fast as neighbouring ones,
so nothing is copied to bring the parts of the features together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..base.autograd import Function
from ..numerics.fast import FastNumerics
from ..numerics.token_product import InterleavedProduct
from .compiled_gate import gated_backward, gated_forward
from .linear import ColumnParallelLinear, Source, column_backward

NUM_PARTS = 2
"""Gate and up-projection."""

ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Any]] = {
    "swiglu": (F.silu, torch.ops.aten.silu_backward.grad_input),
    "geglu": (F.gelu, torch.ops.aten.gelu_backward.grad_input),
    "geglu_tanh": (
        partial(F.gelu, approximate="tanh"),
        partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh"),
    ),
}
"""`ModelSpec.activation` -> what is done to the gate, and its gradient from that of the result and its input."""


def can_be_gated(layer: ColumnParallelLinear) -> bool:
    """Whether `gated` does the activation behind a layer: where bits do not matter and two
    products cost as much as one."""
    context, model = layer.context, layer.context.model
    fast = isinstance(context.numerics, FastNumerics) and context.numerics.device.type == "cpu"
    plain = model.activation in ACTIVATIONS and model.gate_limit is None and not model.gate_offset
    return fast and layer.bias is None and not layer.frozen and plain


def gated(layer: ColumnParallelLinear, x_BSF: Tensor) -> Tensor:
    """[b, s, f] -> [b, s, c/2]: the model's activation of the layer's even features, times its odd ones. Where the plan
    recomputes activations only these features stay."""
    context = layer.context
    for_backward: list[Tensor] = []
    y_BSC = _Gated.apply(x_BSF, layer, context.source_of(x_BSF), for_backward)
    if not _is_repeated(layer):
        return y_BSC
    (gate, up), activation = map(context.keep, for_backward), context.model.activation
    activate, _ = ACTIVATIONS[activation]
    is_compiled = layer.context.numerics.compiles
    return context.can_repeat(
        y_BSC,
        lambda: gated_forward(gate(), up(), activation) if is_compiled else activate(gate()) * up(),
        f"{layer.name}.activation",
    )


def _is_repeated(layer: ColumnParallelLinear) -> bool:
    return "mlp_act" in layer.context.recomputed_modules


class _Gated(Function):
    @staticmethod
    def forward(
        ctx: Any, x_BSF: Tensor, layer: ColumnParallelLinear, source: Source | None, for_backward: list[Tensor]
    ) -> Tensor:
        """Leaves gate and up-projection in `for_backward` for who makes the result again."""
        ctx.layer, ctx.microbatch, ctx.source, ctx.add_bias = layer, layer.context.microbatch, source, False
        activate, _ = ACTIVATIONS[layer.context.model.activation]
        gate, up = _project(layer, layer.gather(x_BSF))
        inputs = [] if source is not None else [x_BSF]
        if layer.context.numerics.compiles:
            for_backward += gate, up
            ctx.save_for_backward(*inputs, gate, up)
            return gated_forward(gate, up, layer.context.model.activation)
        activated, again = activate(gate), _is_repeated(layer)
        if again:
            for_backward += gate, up
        ctx.save_for_backward(*inputs, gate, up, *([] if again else [activated]))
        return activated * up

    @staticmethod
    def backward(ctx: Any, dy_BSC: Tensor) -> tuple[Tensor, None, None, None]:
        layer, (gate, up, *activated) = ctx.layer, ctx.saved_tensors[ctx.source is None :]
        activate, gradient = ACTIVATIONS[layer.context.model.activation]
        if layer.context.numerics.compiles:
            d_NBSC = gated_backward(dy_BSC, gate, up, layer.context.model.activation)
        else:
            d_NBSC = gate.new_empty(NUM_PARTS, *gate.shape)
            gradient(dy_BSC * up, gate, grad_input=d_NBSC[0])
            torch.mul(dy_BSC, activated[0] if activated else activate(gate), out=d_NBSC[1])

        def weight_gradient(d_NBSC: Tensor, x_BSF: Tensor) -> InterleavedProduct:
            layer.context.recorder.product(*layer.shard.storage.shape, x_BSF.shape[0] * x_BSF.shape[1])
            return InterleavedProduct(d_NBSC.flatten(1, 2), x_BSF.flatten(0, 1))

        return column_backward(ctx, d_NBSC, lambda: _partial_contract(layer, d_NBSC), weight_gradient), None, None, None


def _parts(weight_CF: Tensor) -> list[Tensor]:
    return [weight_CF[number::NUM_PARTS] for number in range(NUM_PARTS)]


def _project(layer: ColumnParallelLinear, x_BSF: Tensor) -> list[Tensor]:
    """`ParallelLinear.project` of both parts."""
    cut_size, full_size = layer.shard.storage.shape
    layer.record_product(x_BSF.shape[0] * x_BSF.shape[1], cut_size, full_size)
    return [F.linear(x_BSF, part) for part in _parts(layer.shard.operand)]


def _partial_contract(layer: ColumnParallelLinear, d_NBSC: Tensor) -> Tensor:
    """`ParallelLinear.partial_contract` of both parts, added up."""
    (_, samples, tokens, _), (cut_size, full_size) = d_NBSC.shape, layer.shard.storage.shape
    layer.record_product(samples * tokens, full_size, cut_size)
    (first, second), weights = d_NBSC.flatten(1, 2), _parts(layer.shard.operand)
    return (first @ weights[0]).addmm_(second, weights[1]).view(1, samples, tokens, full_size)
