"""Token table cut by vocabulary rows, and the table of learned positions, which every rank holds whole."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.model.parameters import TOKEN_TABLE
from ..base.autograd import Function
from ..numerics import Contribution
from .context import LayerContext


class PositionEmbedding(nn.Module):
    """The table of learned positions, added to the rows of `VocabParallelEmbedding`, whose backward knows the
    gradient of all tokens."""

    def __init__(self, context: LayerContext):
        super().__init__()
        self.name = "embedding.positions"
        self.context = context
        self.shard, self.usage = context.shard(f"{self.name}.weight")

    def add(self, x_BSH: Tensor, positions: Tensor) -> Tensor:
        """Adds the row of its position, int64 [b or 1, s], to every token."""
        return x_BSH + self.shard.operand[positions]

    def gradient(self, positions: Tensor, dy_BSH: Tensor) -> Contribution:
        """The contribution of all tokens of one microbatch."""
        return self.context.numerics.embedding_gradient(positions, dy_BSH, len(self.shard.storage))


class VocabParallelEmbedding(nn.Module):
    """int64 [b, s] -> [b, s, h]: each rank looks up the ids it owns, and the sum over ranks is the
    row of the one that has it.

    Rows are multiplied by the model's factor, and those of positions are added, where it learns them. With sequence
    parallelism each rank gets its own tokens, and the backward gathers the gradients of all.
    """

    def __init__(
        self,
        context: LayerContext,
        name: str = "embedding.tokens",
        *,
        role: Literal["embedding", "output"] = "embedding",
        positions: bool = True,
    ):
        """`role` is the end of the model at which a shared table is used; without `positions` only rows of
        tokens are looked up."""
        super().__init__()
        self.name = name
        self.context = context
        self.leaves = context.owned_leaves(TOKEN_TABLE)
        self.shard, self.usage = context.shard(TOKEN_TABLE, role if context.model.shares_table else "")
        self.positions = PositionEmbedding(context) if positions and context.model.position == "learned" else None

    def multiplied(self, x_BSH: Tensor) -> Tensor:
        """Rows of the table as they enter the model, or their gradients."""
        times = self.context.model.embedding_multiplier
        return x_BSH if times == 1 else x_BSH * times

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return _Lookup.apply(self.context.anchor(), tokens_BS, self)


class _Lookup(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tokens_BS: Tensor, layer: VocabParallelEmbedding) -> Tensor:
        lo, hi = layer.leaves.items
        context = layer.context
        ctx.layer, ctx.microbatch = layer, context.microbatch
        if context.tp.size == 1:
            ctx.save_for_backward(tokens_BS.clone())  # of its own, so that it does not keep the whole batch
            rows = F.embedding(tokens_BS, layer.shard.operand)
        else:
            elsewhere = (tokens_BS < lo) | (tokens_BS >= hi)
            ctx.save_for_backward(torch.where(elsewhere, hi - lo, tokens_BS - lo))
            rows = layer.shard.operand[torch.where(elsewhere, 0, tokens_BS - lo)].masked_fill_(
                elsewhere.unsqueeze(-1), 0.0
            )
        with context.recorder.layer(layer.name):
            x_BSH = context.numerics.sum_lookups(rows, context.tp, context.tokens)
        x_BSH = layer.multiplied(x_BSH)
        if layer.positions is None:
            return x_BSH
        positions = context.positions(context.running_microbatch)
        return layer.positions.add(
            x_BSH, positions if context.tokens is None else positions[:, slice(*context.tokens.own)]
        )

    @staticmethod
    def backward(ctx: Any, dy_BSH: Tensor) -> tuple[None, None, None]:
        (ids_BS,) = ctx.saved_tensors
        layer, context = ctx.layer, ctx.layer.context
        num_rows, finishes_sequences = (
            len(layer.shard.storage),
            context.numerics.mode == "exact" and context.cp.size > 1,
        )
        if layer.positions is not None or finishes_sequences:
            positions_BS = context.positions(ctx.microbatch).expand(ids_BS.shape)
        with context.recorder.layer(layer.name):
            whole_BSH = context.gather(dy_BSH.contiguous())
            if finishes_sequences:  # rows add in the order of the whole sequence
                whole_BSH = context.gather_sequence(whole_BSH)
                ids_BS, positions_BS = context.gather_sequence(torch.stack([ids_BS, positions_BS], 2)).unbind(2)

        def rows() -> Contribution:
            return context.numerics.embedding_gradient(ids_BS, layer.multiplied(whole_BSH), num_rows)

        work = [(layer.usage, rows)]
        if layer.positions is not None:
            work.append((layer.positions.usage, lambda: layer.positions.gradient(positions_BS, whole_BSH)))
        context.submit(layer.name, work, ctx.microbatch)
        return None, None, None
