"""Dropout of hidden states. Masks are functions of global positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..base.microbatch import Microbatch
from ..numerics.dropout import dropout_mask
from .context import LayerContext


def hidden_dropout(context: LayerContext, operation: str, x_BSH: Tensor) -> Tensor:
    """`x` with the model's share of elements dropped; `x` itself where nothing is, or outside of training."""
    microbatch = context.microbatch
    assert microbatch is not None
    if not context.model.hidden_dropout or microbatch.step is None:
        return x_BSH
    return _HiddenDropout.apply(x_BSH, context, operation, microbatch)


class _HiddenDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, context: LayerContext, operation: str, microbatch: Microbatch) -> Tensor:
        ctx.of = context, operation, microbatch
        return (x_BSH * _hidden_mask(x_BSH, *ctx.of)).to(x_BSH.dtype)

    @staticmethod
    def backward(ctx: Any, dy_BSH: Tensor) -> tuple[Tensor, None, None, None]:
        return (dy_BSH * _hidden_mask(dy_BSH, *ctx.of)).to(dy_BSH.dtype), None, None, None


def _hidden_mask(x_BSH: Tensor, context: LayerContext, operation: str, microbatch: Microbatch) -> Tensor:
    """Elements are numbered by (sample of the global batch, token, feature)."""
    samples, _, hidden = x_BSH.shape
    sample, feature = (torch.arange(size, device=x_BSH.device) for size in (samples, hidden))
    rows = (microbatch.first_drawn + sample[:, None]) * context.plan.batch.sequence + context.own_places()
    assert microbatch.step is not None
    index = rows[..., None] * hidden + feature
    return dropout_mask(
        context.plan.train.seed,
        context.plan.name_in_run(operation),
        microbatch.step,
        index,
        context.model.hidden_dropout,
    )
