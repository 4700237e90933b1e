"""Cross-entropy over a vocabulary that is cut over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..numerics import OwnedLeaves
from .context import LayerContext


class VocabParallelCrossEntropy(nn.Module):
    """Logits [b, s, v] of this rank's vocabulary and targets [b, s] -> losses [b, s], the same on every rank.

    loss = log(sum exp(l - m)) - (l_target - m) with m the largest logit over all ranks.
    """

    def __init__(self, context: LayerContext, leaves: OwnedLeaves):
        super().__init__()
        self.name = "head.loss"
        self.context = context
        self.leaves = leaves

    def forward(self, logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
        return _CrossEntropy.apply(logits_BSV, targets_BS, self)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_BSV: Tensor, targets_BS: Tensor, layer: VocabParallelCrossEntropy) -> Tensor:
        numerics, tp = layer.context.numerics, layer.context.tp
        lo, hi = layer.leaves.items
        elsewhere = (targets_BS < lo) | (targets_BS >= hi)
        local_target = torch.where(elsewhere, 0, targets_BS - lo).unsqueeze(-1)
        with layer.context.recorder.layer(layer.name):
            maximum = numerics.row_maximum(logits_BSV.amax(-1), tp)
            shifted = logits_BSV - maximum.unsqueeze(-1)
            target = shifted.gather(-1, local_target).squeeze(-1).masked_fill_(elsewhere, 0.0)
            exponentials = numerics.elementwise(torch.exp_, shifted)
            sums, target = numerics.softmax_sums(exponentials, target, layer.leaves, tp)
        ctx.save_for_backward(exponentials, sums, local_target, elsewhere)
        return numerics.elementwise(torch.log, sums) - target

    @staticmethod
    def backward(ctx: Any, dloss_BS: Tensor) -> tuple[Tensor, None, None]:
        exponentials, sums, local_target, elsewhere = ctx.saved_tensors
        gradient = exponentials * (dloss_BS / sums).unsqueeze(-1)
        at_target = dloss_BS.masked_fill(elsewhere, 0.0).unsqueeze(-1)
        gradient.scatter_add_(-1, local_target, -at_target)
        return gradient, None, None
