"""Attention sinks: a learned score for every query head that takes part in the softmax and has no value (Xiao et al.
2023, arXiv 2309.17453, section 3.3; gpt-oss)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..base.autograd import Function
from ..tensor_parallel import LayerContext


class Sinks(nn.Module):
    """Queries [b, heads, s, d] of this rank's heads -> [b, heads, s, d + 1], the score of its head behind each. So it
    goes where queries go, and its gradient comes back token by token."""

    def __init__(self, context: LayerContext, name: str):
        super().__init__()
        self.name = name
        self.context = context
        self.scores, self.usage = context.shard(f"{name}.sinks")

    def forward(self, q: Tensor) -> Tensor:
        return torch.cat([q, _Scores.apply(self.context.anchor(), self, q.shape[:3])], -1)


class _Scores(Function):
    """[b, heads, s, 1]; the backward leaves the sum over tokens to the stage."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, sinks: Sinks, shape: torch.Size) -> Tensor:
        ctx.sinks, ctx.microbatch = sinks, sinks.context.microbatch
        return sinks.scores.operand.view(1, -1, 1, 1).expand(*shape, 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None]:
        sinks, by_token = ctx.sinks, dy.squeeze(-1).transpose(1, 2).contiguous()
        work = [(sinks.usage, lambda: sinks.context.numerics.token_sums(by_token))]
        sinks.context.submit(sinks.name, work, ctx.microbatch)
        return None, None, None
