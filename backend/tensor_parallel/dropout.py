"""Dropout of hidden states, and the attention core with dropout of its probabilities. Masks are functions of global positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..numerics.dropout import dropout_mask
from .context import LayerContext, Microbatch


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
        return (x_BSH * _hidden_mask(*ctx.of, x_BSH)).to(x_BSH.dtype)

    @staticmethod
    def backward(ctx: Any, dy_BSH: Tensor) -> tuple[Tensor, None, None, None]:
        return (dy_BSH * _hidden_mask(*ctx.of, dy_BSH)).to(dy_BSH.dtype), None, None, None


def _hidden_mask(context: LayerContext, operation: str, microbatch: Microbatch, x_BSH: Tensor) -> Tensor:
    """Elements are numbered by (sample of the global batch, token, feature)."""
    samples, length, hidden = x_BSH.shape
    first = 0 if context.tokens is None else context.tokens.own[0]
    sample, token, feature = (torch.arange(size, device=x_BSH.device) for size in (samples, length, hidden))
    rows = (microbatch.first_sample + sample[:, None]) * context.plan.batch.sequence + first + token
    return _mask(context, operation, microbatch, rows[..., None] * hidden + feature, context.model.hidden_dropout)


def _mask(context: LayerContext, operation: str, microbatch: Microbatch, index: Tensor, probability: float) -> Tensor:
    assert microbatch.step is not None
    return dropout_mask(context.plan.train.seed, operation, microbatch.step, index, probability)


def attention_with_dropout(context: LayerContext, operation: str, q: Tensor, k: Tensor, v: Tensor, first_head: int) -> Tensor:
    """dropout(softmax(q k^T / sqrt(d))) v, causal; all [b, heads, s, d], of which the first head is `first_head` of the model.

    One head of one sample at a time, so that neither the cut of the heads nor the microbatch changes a bit; in fp32, rounded once.
    """
    microbatch = context.microbatch
    assert microbatch is not None
    return _Attention.apply(q, k, v, context, operation, microbatch, first_head)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, context: LayerContext, operation: str, microbatch: Microbatch, first_head: int
    ) -> Tensor:
        dtype, (samples, heads, s, d) = q.dtype, q.shape
        q, k, v = (x.float() for x in (q, k, v))
        ctx.of = context, operation, microbatch, first_head
        probabilities, y = q.new_empty(samples, heads, s, s), torch.empty_like(q)
        future = torch.ones(s, s, dtype=torch.bool, device=q.device).triu_(1)
        for i, j in _places(q):
            scores = torch.mm(q[i, j], k[i, j].t()).mul_(1 / math.sqrt(d)).masked_fill_(future, -math.inf)
            torch.softmax(scores, -1, out=probabilities[i, j])
            torch.mm(probabilities[i, j] * _head_mask(ctx.of, i, j, s), v[i, j], out=y[i, j])
        ctx.save_for_backward(*(x.to(dtype) for x in (q, k, v)), probabilities)
        return y.to(dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, dy, probabilities = (x.float() for x in (*ctx.saved_tensors[:3], dy.contiguous(), ctx.saved_tensors[3]))
        scale, dtype = 1 / math.sqrt(q.shape[-1]), ctx.saved_tensors[0].dtype
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for i, j in _places(q):
            p, mask = probabilities[i, j], _head_mask(ctx.of, i, j, q.shape[2])
            torch.mm((p * mask).t(), dy[i, j], out=dv[i, j])
            dp = torch.mm(dy[i, j], v[i, j].t()).mul_(mask)
            dscores = dp.sub_((dp * p).sum(-1, keepdim=True)).mul_(p).mul_(scale)
            torch.mm(dscores, k[i, j], out=dq[i, j])
            torch.mm(dscores.t(), q[i, j], out=dk[i, j])
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), None, None, None, None


def _places(q: Tensor) -> list[tuple[int, int]]:
    return [(i, j) for i in range(q.shape[0]) for j in range(q.shape[1])]


def _head_mask(of: tuple[LayerContext, str, Microbatch, int], sample: int, head: int, s: int) -> Tensor:
    """Elements are numbered by (sample of the global batch, head of the model, query, key)."""
    context, operation, microbatch, first_head = of
    first = ((microbatch.first_sample + sample) * context.model.num_heads + first_head + head) * s * s
    index = torch.arange(first, first + s * s, device=context.numerics.device).view(s, s)
    return _mask(context, operation, microbatch, index, context.model.attention_dropout)
