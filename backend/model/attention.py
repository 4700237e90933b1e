"""Causal self-attention over this rank's heads."""

from __future__ import annotations

from torch import Tensor, nn

from ...core.parameters import layer_prefix
from ..tensor_parallel import ColumnParallelLinear, HeadNorm, LayerContext, RowParallelLinear, recomputed
from .attention_core import AttentionCore
from .rotary import rotary_table, rotate


class Attention(nn.Module):
    """[b, s, h] -> [b, s, h]. Tensor parallelism cuts whole key/value groups: their query heads, key head and value head."""

    def __init__(self, context: LayerContext, layer: int):
        super().__init__()
        prefix = f"{layer_prefix(layer)}.attention"
        self.context = context
        self.qkv = ColumnParallelLinear(context, f"{prefix}.qkv")
        norms = [HeadNorm(context, f"{prefix}.{name}") for name in ("query_norm", "key_norm") if context.model.qk_norm]
        self.norms = nn.ModuleList(norms)
        self.core = AttentionCore(context, f"{prefix}.core")
        self.output = RowParallelLinear(context, f"{prefix}.output")

    def forward(self, x_BSH: Tensor) -> Tensor:
        model = self.context.model
        qkv = self.qkv(x_BSH).unflatten(-1, (-1, model.query_heads_per_group + 2, model.head_dim))
        q, k, v = qkv.split([model.query_heads_per_group, 1, 1], dim=3)
        if self.norms:
            q, k = (norm(part.contiguous()) for norm, part in zip(self.norms, (q, k), strict=True))
        q, k, v = (part.flatten(2, 3).transpose(1, 2).contiguous() for part in (q, k, v))
        if model.position == "rope":
            cos, sin = rotary_table(self.context)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        again = "core_attn" in self.context.recomputed_modules
        attended = recomputed(self.context, self.core, q, k, v) if again else self.core(q, k, v)
        return self.output(attended.transpose(1, 2).flatten(2))
