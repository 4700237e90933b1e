"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1 and equations 37-47)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...core.model.blocks import layer_prefix
from ...core.model.rotary import attention_scale
from ..tensor_parallel import (
    ColumnParallelLinear,
    LayerContext,
    Norm,
    RowParallelLinear,
    SharedFeaturesLinear,
    WholeLinear,
    recomputed,
)
from .attention_core import AttentionCore
from .rotary import rotary_table, rotate


class LatentAttention(nn.Module):
    """[b, s, h] -> [b, s, h]. Keys and values of all heads come from one low-rank vector a token, and so may the
    queries; a part of every query and one key that all heads share carry rotary positions.

    The down-projections are held whole and multiply a rank's own tokens; tensor parallelism cuts the
    heads of the up-projections.
    """

    def __init__(self, context: LayerContext, layer: int):
        super().__init__()
        self.context = context
        self.prefix = f"{layer_prefix(layer)}.attention"
        if context.model.q_lora_rank:
            self.q_down: WholeLinear | None = WholeLinear(context, f"{self.prefix}.q_down")
            self.q_norm = Norm(context, f"{self.prefix}.q_norm")
            self.q_up = ColumnParallelLinear(context, f"{self.prefix}.q_up")
        else:
            self.q_down = None
            self.q_up = ColumnParallelLinear(context, f"{self.prefix}.q")
        self.kv_down = WholeLinear(context, f"{self.prefix}.kv_down")
        self.kv_norm = Norm(context, f"{self.prefix}.kv_norm")
        self.kv_up = SharedFeaturesLinear(context, f"{self.prefix}.kv_up")
        self.core = AttentionCore(context, f"{self.prefix}.core", layer, scale=attention_scale(context.model))
        self.output = RowParallelLinear(context, f"{self.prefix}.output")

    def forward(self, x_BSH: Tensor) -> Tensor:
        context, model = self.context, self.context.model
        q_BSR = x_BSH if self.q_down is None else self.q_norm(self.q_down(x_BSH))
        latent, rotary_key = self.kv_down(x_BSH).split([model.kv_lora_rank, model.qk_rope_head_dim], -1)
        inputs = q_BSR, self.kv_norm(latent.contiguous()), rotary_key.contiguous()
        again = context.recomputed_modules
        q, k, v = (
            recomputed(context, self._heads, *inputs, name=f"{self.prefix}.heads")
            if "mla_up_proj" in again
            else self._heads(*inputs)
        )
        attended = (
            recomputed(context, self.core, q, k, v, name=self.core.name) if "core_attn" in again else self.core(q, k, v)
        )
        return self.output(attended.transpose(1, 2).flatten(2))

    def _heads(self, q_BSR: Tensor, latent_BSR: Tensor, rotary_key_BSR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of this rank's heads, each [b, heads, s, d], contiguous."""
        model = self.context.model
        plain, turned = model.qk_nope_head_dim, model.qk_rope_head_dim
        q_plain, q_turned = self.q_up(q_BSR).unflatten(-1, (-1, model.head_dim)).split([plain, turned], -1)
        pairs, k_turned = self.kv_up.spread(latent_BSR, rotary_key_BSR)
        k_plain, v = pairs.unflatten(-1, (-1, plain + model.v_head_dim)).split([plain, model.v_head_dim], -1)
        q_plain, q_turned, k_plain, k_turned, v = (
            x.transpose(1, 2).contiguous() for x in (q_plain, q_turned, k_plain, k_turned, v)
        )
        cos, sin = rotary_table(self.context)
        q = torch.cat([q_plain, rotate(q_turned, cos, sin)], -1)
        return q, torch.cat([k_plain, rotate(k_turned, cos, sin)], -1), v
