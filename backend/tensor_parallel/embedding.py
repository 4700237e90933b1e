"""Token table cut by vocabulary rows, and the table of learned positions, which every rank holds whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.parameters import TOKEN_TABLE
from ..numerics import Contribution
from .context import LayerContext


class PositionEmbedding(nn.Module):
    """The table of learned positions, added to the rows of `VocabParallelEmbedding`, whose backward knows the gradient of all tokens."""

    def __init__(self, context: LayerContext):
        super().__init__()
        self.name = "embedding.positions"
        self.context = context
        self.shard, self.usage = context.shard(f"{self.name}.weight")

    def add(self, x_BSH: Tensor, first: int) -> Tensor:
        """Adds the row of its position to every token; the first one's position is `first`."""
        return x_BSH + self.shard.operand[first : first + x_BSH.shape[1]]

    def gradient(self, dy_BSH: Tensor) -> Contribution:
        """The contribution of all tokens of one microbatch."""
        unused = self.shard.storage.shape[0] - dy_BSH.shape[1]
        return self.context.numerics.sample_sums(F.pad(dy_BSH, (0, 0, 0, unused)))


class VocabParallelEmbedding(nn.Module):
    """int64 [b, s] -> [b, s, h]: each rank looks up the ids it owns, and the sum over ranks is the row of the one that has it.

    Rows of positions are added, where the model learns them. With sequence parallelism each rank gets its own tokens, and the backward
    gathers the gradients of all.
    """

    def __init__(self, context: LayerContext):
        super().__init__()
        self.name = "embedding.tokens"
        self.context = context
        self.leaves = context.owned_leaves(TOKEN_TABLE)
        self.shard, self.usage = context.shard(TOKEN_TABLE, "embedding" if context.model.tied_embeddings else "")
        self.positions = PositionEmbedding(context) if context.model.position == "learned" else None

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return _Lookup.apply(self.context.anchor(), tokens_BS, self)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tokens_BS: Tensor, layer: VocabParallelEmbedding) -> Tensor:
        lo, hi = layer.leaves.items
        context = layer.context
        elsewhere = (tokens_BS < lo) | (tokens_BS >= hi)
        ctx.layer, ctx.microbatch = layer, context.microbatch
        ctx.save_for_backward(torch.where(elsewhere, hi - lo, tokens_BS - lo))
        rows = layer.shard.operand[torch.where(elsewhere, 0, tokens_BS - lo)].masked_fill_(elsewhere.unsqueeze(-1), 0.0)
        with context.recorder.layer(layer.name):
            x_BSH = context.numerics.sum_lookups(rows, context.tp, context.tokens)
        first = 0 if context.tokens is None else context.tokens.own[0]
        return x_BSH if layer.positions is None else layer.positions.add(x_BSH, first)

    @staticmethod
    def backward(ctx: Any, dy_BSH: Tensor) -> tuple[None, None, None]:
        (ids_BS,) = ctx.saved_tensors
        layer, context = ctx.layer, ctx.layer.context
        num_rows = layer.shard.storage.shape[0]
        with context.recorder.layer(layer.name):
            whole_BSH = context.gather(dy_BSH.contiguous())
        work = [(layer.usage, lambda: context.numerics.embedding_gradient(ids_BS, whole_BSH, num_rows))]
        if layer.positions is not None:
            work.append((layer.positions.usage, lambda: layer.positions.gradient(whole_BSH)))
        context.submit(layer.name, work, ctx.microbatch)
        return None, None, None
