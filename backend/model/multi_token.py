"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): modules behind the last layer that
predict tokens further ahead.

Module k (from 0) joins the hidden state of token i with the embedding of token i + k + 1, and predicts token i + k + 2.
The hidden state is that of the final norm, or of the module's before its own, which is what the published weights were
trained with (transformers' `MtpModel`, vLLM's `deepseek_mtp`; the paper does not say). Where a sequence or a document
ends before that, nothing is predicted. Token table and output head are the model's own; their gradients are sums over
all uses. In training the modules' losses are minimised with the model's, with weight `train.mtp_loss_weight` divided
by their number; the loss that is reported is the model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.model.blocks import layer_prefix, mtp_prefix
from ...core.model.parameters import TOKEN_TABLE
from ..numerics import Scalar
from ..tensor_parallel import (
    ColumnParallelLinear,
    LayerContext,
    Norm,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    WholeLinear,
    hidden_dropout,
)
from .block import run_layer
from .soft_cap import soft_capped


class MultiTokenPrediction(nn.Module):
    """The modules of a model. `blocks` are their transformer layers, one each.

    `losses` keeps the sum of every microbatch's losses until `take_losses`.
    """

    def __init__(self, context: LayerContext, blocks: Sequence[nn.Module]):
        super().__init__()
        self.context = context
        self.steps = nn.ModuleList([_Module(context, depth, block) for depth, block in enumerate(blocks)])
        self.losses: dict[int, Scalar] = {}

    def add_losses(self, losses_BS: Tensor, normed_BSH: Tensor) -> Tensor:
        """The model's losses [b, s] as they are; their backward starts those of the modules too, from the
        output of the final norm."""
        microbatch = self.context.running_microbatch
        assert microbatch.later is not None, "multi-token prediction needs Microbatch.later"
        found = []
        for depth, step in enumerate(self.steps):
            tokens_BS = microbatch.targets if depth == 0 else microbatch.later[..., depth - 1]
            normed_BSH, own_BS = step(normed_BSH, tokens_BS.clamp(min=0), microbatch.later[..., depth])
            found.append(own_BS)
        if microbatch.step is not None:
            self.losses[microbatch.index] = self.context.numerics.sum([own_BS.detach() for own_BS in found])
        weight = self.context.plan.train.mtp_loss_weight / len(found)
        return _AddsGradients.apply(losses_BS, weight, *found)

    def take_losses(self) -> list[Scalar]:
        """The sums of the modules' losses since the last call, one per microbatch."""
        losses, self.losses = list(self.losses.values()), {}
        return losses


class _Module(nn.Module):
    """Normed hidden states [b, s, h] and ids int64 [b, s] -> normed hidden states for the next
    module and losses [b, s]."""

    def __init__(self, context: LayerContext, depth: int, block: nn.Module):
        super().__init__()
        self.prefix, self.layer = mtp_prefix(depth), context.model.num_layers + depth
        self.context = context
        self.embedding = VocabParallelEmbedding(
            context, f"{self.prefix}.embedding.tokens", role="output", positions=False
        )
        self.embedding_norm = Norm(context, f"{self.prefix}.embedding_norm")
        self.hidden_norm = Norm(context, f"{self.prefix}.hidden_norm")
        self.projection = WholeLinear(context, f"{self.prefix}.projection")
        self.block = block
        self.norm = Norm(context, f"{self.prefix}.norm")
        tied = context.model.tied_embeddings
        table: dict[str, Any] = {"weight": TOKEN_TABLE, "role": "output"} if tied else {"weight": "head.output.weight"}
        self.output = ColumnParallelLinear(context, f"{self.prefix}.head.output", **table)
        self.loss = VocabParallelCrossEntropy(context, self.output.leaves, f"{self.prefix}.head.loss")

    def forward(self, normed_BSH: Tensor, tokens_BS: Tensor, targets_BS: Tensor) -> tuple[Tensor, Tensor]:
        context = self.context
        embedded_BSH = hidden_dropout(context, f"{self.prefix}.embedding", self.embedding(tokens_BS))
        joined = torch.cat([self.embedding_norm(embedded_BSH), self.hidden_norm(normed_BSH)], -1)
        x_BSH = self.projection(joined)
        context.observe(f"{self.prefix}.projection", x_BSH)
        x_BSH = run_layer(context, self.layer, self.block, x_BSH)
        context.observe(f"{layer_prefix(self.layer)}.output", x_BSH)
        normed_BSH = self.norm(x_BSH)
        logits_BSV = self.output(multiplied(context, normed_BSH))
        losses_BS = self.loss(soft_capped(logits_BSV, context.model.logit_softcap, context.numerics), targets_BS)
        context.observe(f"{self.prefix}.losses", losses_BS)
        return normed_BSH, losses_BS


def multiplied(context: LayerContext, normed_BSH: Tensor) -> Tensor:
    """What an output head takes: hidden states times the model's factor of logits, which is a cheaper product than
    that of the logits themselves."""
    times = context.model.logit_multiplier
    return normed_BSH if times == 1 else normed_BSH * times


def later_targets(targets_BS: Tensor, num_modules: int, ignored: int, documents_BS: Tensor | None = None) -> Tensor:
    """int64 [b, s, k]: what module k predicts at each token of whole sequences, `ignored` behind the last token of a
    sequence, or of a document: `documents_BS` says where each token's begins.

    >>> later_targets(torch.tensor([[1, 2, 3]]), 2, -100).tolist()
    [[[2, 3], [3, -100], [-100, -100]]]
    """
    later = torch.full((*targets_BS.shape, num_modules), ignored, dtype=targets_BS.dtype)
    for depth in range(num_modules):
        ahead = depth + 1
        later[:, :-ahead, depth] = targets_BS[:, ahead:]
        if documents_BS is not None:
            later[:, :-ahead, depth].masked_fill_(documents_BS[:, ahead:] != documents_BS[:, :-ahead], ignored)
    return later


class _AddsGradients(torch.autograd.Function):
    """The first losses; the backward gives the others their gradient times `weight`."""

    @staticmethod
    def forward(ctx: Any, losses_BS: Tensor, weight: float, *others_BS: Tensor) -> Tensor:
        ctx.weight, ctx.num_others = weight, len(others_BS)
        return losses_BS.view_as(losses_BS)

    @staticmethod
    def backward(ctx: Any, dlosses_BS: Tensor) -> tuple[Tensor | None, ...]:
        return dlosses_BS, None, *[dlosses_BS * ctx.weight] * ctx.num_others
