"""`Stage`: the part of a decoder that one pipeline stage holds, on one tensor-parallel rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ...core.layout.stages import StageLayers
from ...core.model.blocks import layer_prefix
from ...core.model.parameters import TOKEN_TABLE
from ...core.plan.plan import Plan
from ..base.host_copies import HostCopies
from ..base.microbatch import Microbatch
from ..base.observe import Observer
from ..base.offload import StageOffload
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
)
from ..tensor_parallel.exchange import ExpertGroups
from ..transport.base import Group
from .block import BlockFactory, TransformerBlock, make_blocks, run_layer
from .experts import Experts
from .multi_token import MultiTokenPrediction, multiplied
from .own_block import check_names
from .router import Router
from .soft_cap import soft_capped


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
        cp_levels: tuple[Group, Group] | None = None,
        copies: HostCopies | None = None,
    ):
        """Makes the initial weights from `plan.train.seed`. With `copies` the first `plan.offload.activations` layers
        keep what their backward needs in host memory. `block` makes a user's own transformer layers instead of
        ours; raises `PlanError` for one that cannot be trained (`own_block`)."""
        super().__init__()
        self.stage = stage
        self._copies = copies if plan.offload.activations and stage.layers else None
        self.context = context = LayerContext(
            plan,
            tp=tp,
            numerics=numerics,
            recorder=recorder,
            observer=observer,
            experts=experts,
            cp=cp,
            cp_levels=cp_levels,
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

    def begin_batches_of(self, plan: Plan) -> None:
        """From here on global batches are those of `plan`, which is this stage's but for that."""
        self.context.plan = plan
        self.gradients.begin_batches_of(plan.batch.global_size)
        for module in self.modules():
            if isinstance(module, Experts):
                module.begin_batches_of(plan)

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
            offload, x_BSH = self._offload(), self._input(microbatch, hidden_BSH)
            for layer, block in zip(self.stage.layers, self.blocks, strict=True):
                self.context.comes_to(layer_prefix(layer))
                run = functools.partial(run_layer, self.context, layer, block)
                x_BSH = run(x_BSH) if offload is None else offload.layer(run, x_BSH, self.context.keeping)
                self.context.observe(f"{layer_prefix(layer)}.output", x_BSH)
            output = self._output(microbatch, x_BSH)
            output = output if self.context.parts is None or self.head is not None else self.context.parts.leave(output)
            if offload is not None:
                offload.finish(output)
                if hidden_BSH is not None:  # the first layer has it in host memory; its gradient is all that is asked
                    hidden_BSH.data = _nothing_like(hidden_BSH)
            return output

    def _output(self, microbatch: Microbatch, x_BSH: Tensor) -> Tensor:
        """What comes behind the layers."""
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

    def _offload(self) -> StageOffload | None:
        """What takes this forward's tensors to the host; None where none go, or nobody asks for them again."""
        if self._copies is None or not torch.is_grad_enabled():
            return None
        weights = {
            each.untyped_storage().data_ptr() for own in self.shards.values() for each in (own.storage, own.operand)
        }
        context = self.context

        def stays(address: int) -> bool:  # tables may be made by the first layer that needs them
            return address in weights or any(address == each.untyped_storage().data_ptr() for each in context.constants)

        return StageOffload(self._copies, context.plan.offload.activations, stays)

    def _input(self, microbatch: Microbatch, hidden_BSH: Tensor | None) -> Tensor:
        if self.embedding is not None:
            embedded_BSH: Tensor = self.embedding(microbatch.tokens)
            return embedded_BSH
        assert hidden_BSH is not None, "a stage without embedding needs the hidden states of the one before"
        return hidden_BSH if self.context.parts is None else self.context.parts.enter(hidden_BSH)

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
        self.norm = Norm(context, "embedding.norm") if context.model.embedding_norm else None

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSH = self.tokens(tokens_BS)
        if self.norm is not None:
            x_BSH = self.norm(x_BSH)
        x_BSH = hidden_dropout(self.context, "embedding", x_BSH)
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
        self.reader: Callable[[Tensor], None] | None = None
        """Who sees the logits [b, s, v] of this rank's vocabulary, of every forward that comes to them."""

    def logits(self, x_BSH: Tensor) -> Tensor:
        """[b, s, v] for this rank's vocabulary."""
        return self._logits(self.norm(x_BSH))

    def _logits(self, normed_BSH: Tensor) -> Tensor:
        context = self.context
        logits_BSV = self.output(multiplied(context, normed_BSH))
        return soft_capped(logits_BSV, context.model.logit_softcap, context.numerics)

    def losses(self, normed_BSH: Tensor, targets_BS: Tensor) -> Tensor:
        """[b, s] fp32, from the output of the final norm."""
        logits_BSV = self._logits(normed_BSH)
        if self.reader is not None:
            self.reader(logits_BSV)
        losses_BS = self.loss(logits_BSV, targets_BS)
        self.context.observe("head.losses", losses_BS)
        return losses_BS


def _nothing_like(x: Tensor) -> Tensor:
    """Of the shape of `x`, and without memory of its own: no numbers, so that whoever computes with them is found
    out."""
    return torch.full((1,), torch.nan, dtype=x.dtype, device=x.device).expand(x.shape)


class _ScaledBackward(torch.autograd.Function):
    """x as it is, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float | Tensor) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None
