"""`Stage`: the part of a decoder that one pipeline stage holds, on one tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...core.layout.stages import StageLayers
from ...core.model.blocks import layer_prefix
from ...core.model.parameters import TOKEN_TABLE
from ...core.plan.plan import Plan
from ..base.microbatch import Microbatch
from ..base.observe import Observer
from ..base.recorder import Recorder
from ..numerics import Numerics
from ..tensor_parallel import (
    ColumnParallelLinear,
    Gradients,
    LayerContext,
    Norm,
    Shard,
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    WeightWork,
    hidden_dropout,
    recomputed_layer,
)
from ..tensor_parallel.exchange import ExpertGroups
from ..transport.base import Group
from .block import BlockFactory, TransformerBlock, make_blocks
from .multi_token import MultiTokenPrediction
from .own_block import check_names
from .router import Router


class Stage(nn.Module):
    """Embedding, transformer layers and head as far as `stage` has them.

    `shards` are this rank's parameters by name. Their gradients never pass through autograd: layers give them to
    `gradients`, at once or when `weight_work` says so. A tied table lies on the first and on the last stage; each end
    sums its own use of it, and `finish_tied` adds the two sums.
    """

    def __init__(
        self,
        plan: Plan,
        stage: StageLayers,
        *,
        tp: Group,
        numerics: Numerics,
        recorder: Recorder,
        observer: Observer | None = None,
        block: BlockFactory | None = None,
        experts: ExpertGroups | None = None,
        cp: Group | None = None,
    ):
        """Makes the initial weights from `plan.train.seed`. `block` makes a user's own transformer layers instead of
        ours; raises `PlanError` for one that cannot be trained (`own_block`)."""
        super().__init__()
        self.stage = stage
        self.context = context = LayerContext(
            plan, tp=tp, numerics=numerics, recorder=recorder, observer=observer, experts=experts, cp=cp
        )
        self.embedding = Embedding(context) if stage.embedding else None
        depths = range(plan.model.num_mtp_layers if stage.head else 0)
        numbers = [*stage.layers, *(plan.model.num_layers + depth for depth in depths)]
        blocks = make_blocks(context, block or TransformerBlock, numbers)
        check_names(plan, stage, self.shards)
        self.blocks, ahead = nn.ModuleList(blocks[: len(stage.layers)]), blocks[len(stage.layers) :]
        self.multi_token = MultiTokenPrediction(context, ahead) if ahead else None
        self.head = Head(context) if stage.head else None

    @property
    def shards(self) -> Mapping[str, Shard]:
        """This rank's part of every parameter the stage uses, by name."""
        return self.context.shards

    @property
    def trained(self) -> Mapping[str, Shard]:
        """The shards that have gradients and are updated: all but those of frozen layers."""
        return {name: shard for name, shard in self.shards.items() if name not in self.context.frozen}

    @property
    def gradients(self) -> Gradients:
        """The sums of this step's weight gradients."""
        return self.context.gradients

    @cached_property
    def routers(self) -> list[Router]:
        """The routers of the layers with experts, in layer order."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def finish_gradients(self, microbatch: Microbatch) -> None:
        """Called when all weight gradients of a microbatch are computed."""
        self.gradients.finish(microbatch.first_sample)

    @property
    def weight_work(self) -> WeightWork:
        """Whether weight gradients are computed at once or later."""
        return self.context.weight_work

    def forward(self, microbatch: Microbatch, hidden_BSH: Tensor | None) -> Tensor:
        """Hidden states [b, s, h] for the next stage, or on the last stage the loss of every token, [b,
        s] fp32, not yet summed.

        With sequence parallelism hidden states are those of this rank's tokens. `hidden_BSH` is the previous stage's
        output, None on the first stage, which reads `microbatch.tokens`.
        """
        with self.context.running(microbatch):
            if self.embedding is not None:
                self.context.comes_to("embedding")
            x_BSH = self._input(microbatch, hidden_BSH)
            for layer, block in zip(self.stage.layers, self.blocks, strict=True):
                self.context.comes_to(layer_prefix(layer))
                x_BSH = recomputed_layer(self.context, layer, block, x_BSH)
                self.context.observe(f"{layer_prefix(layer)}.output", x_BSH)
            self.context.comes_to("head")
            if self.head is None:
                return x_BSH
            x_BSH = self.head.norm(x_BSH)
            losses_BS = self.head.losses(x_BSH, microbatch.targets)
            ahead = self.multi_token if self.training else None
            losses_BS = losses_BS if ahead is None else ahead.add_losses(losses_BS, x_BSH)
            scale = microbatch.loss_scale
            is_one = isinstance(scale, float) and scale == 1.0
            return losses_BS if is_one else _ScaledBackward.apply(losses_BS, scale)

    def _input(self, microbatch: Microbatch, hidden_BSH: Tensor | None) -> Tensor:
        if self.embedding is not None:
            embedded_BSH: Tensor = self.embedding(microbatch.tokens)
            return embedded_BSH
        assert hidden_BSH is not None, "a stage without embedding needs the hidden states of the one before"
        return hidden_BSH

    def logits(self, microbatch: Microbatch, hidden_BSH: Tensor | None) -> Tensor:
        """Last stage: the logits [b, s, v] of this rank's vocabulary instead of the losses."""
        assert self.head is not None
        with self.context.running(microbatch):
            x_BSH = self._input(microbatch, hidden_BSH)
            for block in self.blocks:
                x_BSH = block(x_BSH)
            return self.head.logits(x_BSH)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Takes this rank's part of full tensors by canonical name. Raises KeyError when one of the stage's
        parameters is missing."""
        for name, shard in self.shards.items():
            shard.load(weights[name])


class Embedding(nn.Module):
    """int64 [b, s] -> [b, s, h], of this rank's tokens."""

    def __init__(self, context: LayerContext):
        super().__init__()
        self.context = context
        self.tokens = VocabParallelEmbedding(context)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSH = hidden_dropout(self.context, "embedding", self.tokens(tokens_BS))
        self.context.observe("embedding.output", x_BSH)
        return x_BSH


class Head(nn.Module):
    """Final norm, logits and the loss of every token."""

    def __init__(self, context: LayerContext):
        super().__init__()
        self.context = context
        self.norm = Norm(context, "head.norm")
        if context.model.tied_embeddings:
            self.output = ColumnParallelLinear(context, "head.output", weight=TOKEN_TABLE, role="output")
        else:
            self.output = ColumnParallelLinear(context, "head.output")
        self.loss = VocabParallelCrossEntropy(context, self.output.leaves)

    def logits(self, x_BSH: Tensor) -> Tensor:
        """[b, s, v] for this rank's vocabulary."""
        return self.output(self.norm(x_BSH))

    def losses(self, normed_BSH: Tensor, targets_BS: Tensor) -> Tensor:
        """[b, s] fp32, from the output of the final norm."""
        losses_BS = self.loss(self.output(normed_BSH), targets_BS)
        self.context.observe("head.losses", losses_BS)
        return losses_BS


class _ScaledBackward(torch.autograd.Function):
    """x as it is, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float | Tensor) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None
