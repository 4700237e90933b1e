"""Causal self-attention over this rank's heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...core.model.attention_kinds import layer_turns, rope_is_local
from ...core.model.blocks import layer_prefix
from ..base.autograd import Function
from ..tensor_parallel import ColumnParallelLinear, HeadNorms, LayerContext, RowParallelLinear, WholeNorms, recomputed
from .attention_core import AttentionCore
from .attention_sinks import Sinks
from .compiled_rotary import joined_turned_back, turned_parts
from .rotary import rotary_by_token, rotary_table, rotate, turned


class Attention(nn.Module):
    """[b, s, h] -> [b, s, h]. Tensor parallelism cuts whole key/value groups: their query heads,
    key head and value head."""

    def __init__(self, context: LayerContext, layer: int):
        super().__init__()
        prefix = f"{layer_prefix(layer)}.attention"
        self.context = context
        self.qkv = ColumnParallelLinear(context, f"{prefix}.qkv")
        self.norms: HeadNorms | WholeNorms | None = None
        if context.model.qk_norm or context.model.whole_qk_norm:
            self.norms = (HeadNorms if context.model.qk_norm else WholeNorms)(context, prefix)
        self.turns, self.is_local = layer_turns(context.model, layer), rope_is_local(context.model, layer)
        self.sinks = Sinks(context, f"{prefix}.core") if context.model.attention_sinks else None
        self.core = AttentionCore(context, f"{prefix}.core", layer, scale=context.model.attention_scale)
        self.output = RowParallelLinear(context, f"{prefix}.output")

    def forward(self, x_BSH: Tensor) -> Tensor:
        model, qkv = self.context.model, self.qkv(x_BSH)
        if self.turns and self.norms is None and self.core.takes_strides:
            apart, tables = self._function, rotary_by_token(self.context, local=self.is_local)
            q, k, v = apart.apply(qkv, *tables, model.query_heads_per_group, model.head_dim)
        else:
            q, k, v = self._apart(qkv)
        again = "core_attn" in self.context.recomputed_modules
        attended = recomputed(self.context, self.core, q, k, v, name=self.core.name) if again else self.core(q, k, v)
        return self.output(attended.transpose(1, 2).flatten(2))

    @property
    def _function(self) -> type[Function]:
        """What turns queries and keys and takes them apart at once."""
        return _CompiledTurnedApart if self.context.numerics.compiles else _TurnedApart

    def _apart(self, qkv: Tensor) -> list[Tensor]:
        """[b, s, l (q+2) d] -> queries [b, l q, s, d], keys and values [b, l, s, d], contiguous, with
        their norms and positions, and sinks behind the queries."""
        model = self.context.model
        q, k, v = _GroupsApart.apply(qkv, model.query_heads_per_group, model.head_dim)
        if self.norms is not None:
            q, k = self.norms(q, k)
        q, k, v = (part.permute(0, 2, 3, 1, 4).contiguous().flatten(1, 2) for part in (q, k, v))
        if self.turns:
            cos, sin = rotary_table(self.context, local=self.is_local)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return [q if self.sinks is None else self.sinks(q), k, v]


class _GroupsApart(Function):
    """[b, s, l (q+2) d] -> views of the q query heads, the key head and the value head of every group, [b, s, l, n, d];
    the backward writes their gradients where they belong."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, queries: int, head_dim: int) -> tuple[Tensor, ...]:
        ctx.of = queries, head_dim
        return _groups(qkv, queries, head_dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        queries, head_dim = ctx.of
        (samples, tokens, groups, *_), first = gradients[0].shape, gradients[0]
        dqkv = first.new_empty(samples, tokens, groups * (queries + 2) * head_dim)
        for part, gradient in zip(_groups(dqkv, queries, head_dim), gradients, strict=True):
            part.copy_(gradient)
        return dqkv, None, None


class _CompiledTurnedApart(Function):
    """`_TurnedApart` in one kernel each way."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, queries: int, head_dim: int) -> tuple[Tensor, ...]:
        ctx.of = queries, head_dim
        ctx.save_for_backward(cos, sin)
        heads = turned_parts(_groups(qkv.detach(), queries, head_dim), cos, sin)
        return tuple(part.flatten(2, 3).transpose(1, 2) for part in heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (queries, _), (cos, sin) = ctx.of, ctx.saved_tensors
        groups = gradients[0].shape[1] // queries
        parts = tuple(gradient.transpose(1, 2).unflatten(2, (groups, -1)) for gradient in gradients)
        return joined_turned_back(parts, cos, sin).flatten(2), None, None, None, None


class _TurnedApart(Function):
    """[b, s, l (q+2) d] -> queries [b, l q, s, d], keys and values [b, l, s, d], queries and keys turned by their
    positions: what `_GroupsApart` and `rotate` do, in fewer passes. Heads of a token lie one after the other."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, queries: int, head_dim: int) -> tuple[Tensor, ...]:
        ctx.of = queries, head_dim
        ctx.save_for_backward(cos, sin)
        q, k, v = _groups(qkv, queries, head_dim)
        heads = turned(q, cos, sin), turned(k, cos, sin), v.contiguous()
        return tuple(part.flatten(2, 3).transpose(1, 2) for part in heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (queries, head_dim), (cos, sin) = ctx.of, ctx.saved_tensors
        (samples, heads, tokens, _), first = gradients[0].shape, gradients[0]
        dqkv = first.new_empty(samples, tokens, heads // queries * (queries + 2) * head_dim)
        dq, dk, dv = (gradient.transpose(1, 2).unflatten(2, (heads // queries, -1)) for gradient in gradients)
        parts = _groups(dqkv, queries, head_dim)
        for part, gradient in zip(parts, (dq, dk), strict=False):
            turned(gradient, cos, sin, back=True, out=part)
        parts[2].copy_(dv)
        return dqkv, None, None, None, None


def _groups(qkv: Tensor, queries: int, head_dim: int) -> tuple[Tensor, ...]:
    return qkv.unflatten(-1, (-1, queries + 2, head_dim)).split([queries, 1, 1], dim=3)
