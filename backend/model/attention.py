"""Causal self-attention over this rank's heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.parameters import layer_prefix
from ..tensor_parallel import ColumnParallelLinear, LayerContext, RowParallelLinear, attention_with_dropout, recomputed


class Attention(nn.Module):
    """[b, s, h] -> [b, s, h]. Tensor parallelism cuts whole key/value groups: their query heads, key head and value head."""

    def __init__(self, context: LayerContext, layer: int):
        super().__init__()
        prefix = f"{layer_prefix(layer)}.attention"
        self.context = context
        self.qkv = ColumnParallelLinear(context, f"{prefix}.qkv")
        self.core = AttentionCore(context, f"{prefix}.core")
        self.output = RowParallelLinear(context, f"{prefix}.output")

    def forward(self, x_BSH: Tensor) -> Tensor:
        model = self.context.model
        qkv = self.qkv(x_BSH).unflatten(-1, (-1, model.query_heads_per_group + 2, model.head_dim))
        q, k, v = qkv.split([model.query_heads_per_group, 1, 1], dim=3)
        q, k, v = (part.flatten(2, 3).transpose(1, 2).contiguous() for part in (q, k, v))
        if model.position == "rope":
            cos, sin = rope_table(qkv.shape[1], model.head_dim, model.rope_theta, q.device)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if model.query_heads_per_group > 1:
            k, v = (_RepeatHeads.apply(part, model.query_heads_per_group) for part in (k, v))
        again = "core_attn" in self.context.recomputed_modules
        attended = recomputed(self.context, self.core, q, k, v) if again else self.core(q, k, v)
        return self.output(attended.transpose(1, 2).flatten(2))


class AttentionCore(nn.Module):
    """softmax(q k^T / sqrt(d)) v, causal. All arguments and the result are [b, heads, s, d], contiguous.

    The library's kernel works per sample and head, so cutting heads or samples does not change its bits (`numerics.probe` measures it).
    In training with `attention_dropout` it is ours, which keeps the probabilities.
    """

    def __init__(self, context: LayerContext, name: str):
        super().__init__()
        self.name = name
        self.context = context

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        samples, heads, s, d = q.shape
        with self.context.recorder.layer(self.name):
            self.context.recorder.product(s, s, d, samples * heads)
            self.context.recorder.product(s, d, s, samples * heads)
        return _RecordBackward.apply(self._attend(q, k, v), self)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context = self.context
        if not context.model.attention_dropout or context.microbatch is None or context.microbatch.step is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        first_head = context.plan.leaf_sizes.heads.owned_items(context.tp.size, context.tp.rank)[0] * context.model.query_heads_per_group
        return attention_with_dropout(context, self.name, q, k, v, first_head)


class _RecordBackward(torch.autograd.Function):
    """The identity; its backward records the four products of the attention's backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, layer: AttentionCore) -> Tensor:
        ctx.layer = layer
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        samples, heads, s, d = dy.shape
        recorder = ctx.layer.context.recorder
        with recorder.layer(ctx.layer.name):
            recorder.product(s, s, d, samples * heads)
            recorder.product(s, d, s, 3 * samples * heads)
        return dy.contiguous(), None


class _RepeatHeads(torch.autograd.Function):
    """[b, groups, s, d] -> [b, groups * times, s, d]; the backward adds a group's query heads in their order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: int) -> Tensor:
        ctx.times = times
        return x.repeat_interleave(times, dim=1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        first, *rest = dy.unflatten(1, (-1, ctx.times)).unbind(2)
        total = first.to(torch.float32, copy=True)
        for head in rest:
            total.add_(head)
        return total.to(dy.dtype), None


def rope_table(sequence: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin [s, d] of position * theta^(-2i/d), rounded from fp64 to fp32; both halves of d hold the same angles.

    Su et al. 2021 (RoFormer), equation 15, with the halves laid out as in Llama's published weights.
    """
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    angles = torch.outer(torch.arange(sequence, dtype=torch.float64, device=device), frequencies)
    angles = torch.cat([angles, angles], -1)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (i, i + d/2) of the last dimension by their angles, which are fp32: the result is rounded once."""
    low, high = x.chunk(2, -1)
    return (x * cos + torch.cat([-high, low], -1) * sin).to(x.dtype)
