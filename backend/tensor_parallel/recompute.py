"""Recomputation: a forward that keeps its inputs only, and runs again when its backward comes (Chen et al. 2016, arXiv 1604.06174).

The second forward repeats the first, collectives included, on equal inputs, so its bits are equal too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .context import LayerContext


def recomputed(context: LayerContext, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """`function(*tensors)`; of what it computes only the result stays, and of the inputs what nobody can make again."""
    return _Recomputed.apply(context, function, [context.source_of(tensor) for tensor in tensors], *tensors)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, context: LayerContext, function: Callable[..., Tensor], sources: list[Callable[[], Tensor] | None], *tensors: Tensor
    ) -> Tensor:
        ctx.context, ctx.function, ctx.sources, ctx.microbatch = context, function, sources, context.microbatch
        ctx.save_for_backward(*(tensor for tensor, source in zip(tensors, sources, strict=True) if source is None))
        return function(*tensors)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        inputs = [(next(saved) if source is None else source()).detach().requires_grad_() for source in ctx.sources]
        with torch.enable_grad(), ctx.context.running(ctx.microbatch):
            y = ctx.function(*inputs)
        torch.autograd.backward(y, dy)
        return None, None, None, *(tensor.grad for tensor in inputs)
