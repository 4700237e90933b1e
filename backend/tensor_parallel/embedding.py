"""Token table cut by vocabulary rows, and the table of learned positions, which every rank holds whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.parameters import TOKEN_TABLE
from .context import LayerContext


class VocabParallelEmbedding(nn.Module):
    """int64 [b, s] -> [b, s, h]: each rank looks up the ids it owns, and the sum over ranks is the row of the one that has it."""

    def __init__(self, context: LayerContext):
        super().__init__()
        self.name = "embedding.tokens"
        self.context = context
        self.leaves = context.owned_leaves(TOKEN_TABLE)
        self.shard, self.usage = context.shard(TOKEN_TABLE, "embedding" if context.model.tied_embeddings else "")

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return _Lookup.apply(self.context.anchor(), tokens_BS, self)


class PositionEmbedding(nn.Module):
    """[b, s, h] -> [b, s, h]: adds the row of its position to every token."""

    def __init__(self, context: LayerContext):
        super().__init__()
        self.name = "embedding.positions"
        self.context = context
        self.shard, self.usage = context.shard(f"{self.name}.weight")

    def forward(self, x_BSH: Tensor) -> Tensor:
        return _AddPositions.apply(x_BSH, self)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tokens_BS: Tensor, layer: VocabParallelEmbedding) -> Tensor:
        lo, hi = layer.leaves.items
        elsewhere = (tokens_BS < lo) | (tokens_BS >= hi)
        ctx.layer, ctx.microbatch = layer, layer.context.microbatch
        ctx.save_for_backward(torch.where(elsewhere, hi - lo, tokens_BS - lo))
        rows = layer.shard.storage[torch.where(elsewhere, 0, tokens_BS - lo)]
        with layer.context.recorder.layer(layer.name):
            return layer.context.numerics.sum_lookups(rows.masked_fill_(elsewhere.unsqueeze(-1), 0.0), layer.context.tp)

    @staticmethod
    def backward(ctx: Any, dy_BSH: Tensor) -> tuple[None, None, None]:
        (ids_BS,) = ctx.saved_tensors
        layer, dy_BSH = ctx.layer, dy_BSH.contiguous()
        num_rows = layer.shard.storage.shape[0]

        def gradient():
            return layer.context.numerics.embedding_gradient(ids_BS, dy_BSH, num_rows)

        layer.context.submit(layer.name, [(layer.usage, gradient)], ctx.microbatch)
        return None, None, None


class _AddPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSH: Tensor, layer: PositionEmbedding) -> Tensor:
        ctx.layer, ctx.microbatch = layer, layer.context.microbatch
        return x_BSH + layer.shard.storage[: x_BSH.shape[1]]

    @staticmethod
    def backward(ctx: Any, dy_BSH: Tensor) -> tuple[Tensor, None]:
        layer = ctx.layer
        unused = layer.shard.storage.shape[0] - dy_BSH.shape[1]

        def gradient():
            return layer.context.numerics.sample_sums(F.pad(dy_BSH, (0, 0, 0, unused)))

        layer.context.submit(layer.name, [(layer.usage, gradient)], ctx.microbatch)
        return dy_BSH, None
