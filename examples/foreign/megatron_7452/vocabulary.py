"""Cross entropy over a vocabulary that is cut over the ranks, and the small model that the first two
findings train with it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from tp_regions import Enter, own_part

VOCAB, HIDDEN, SAMPLES, TOKENS = 24, 8, 4, 6


class VocabularyCrossEntropy(Function):
    """Losses [samples, tokens] from this rank's part of the logits; `smoothing` spreads that share of the
    target over the vocabulary.

    The logits it is given are taken for a part: rank r has the words from r times their number on. `smooth_locally`
    takes the part for the whole vocabulary when it smooths.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, smoothing: float, smooth_locally: bool) -> Tensor:
        """Maximum, sum of exponentials and the target's logit, each over all ranks."""
        width = logits.shape[-1]
        top = logits.amax(-1)
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        logits = logits - top[..., None]
        total = logits.exp().sum(-1)
        dist.all_reduce(total)
        own = targets - dist.get_rank() * width
        held = (own >= 0) & (own < width)
        own = own.clamp(0, width - 1)
        target = torch.where(held, logits.gather(-1, own[..., None])[..., 0], 0.0)
        dist.all_reduce(target)
        words, mean = width, (logits - total.log()[..., None]).mean(-1)
        if not smooth_locally:
            words = width * dist.get_world_size()
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        share = smoothing * words / (words - 1) if smoothing else 0.0
        ctx.save_for_backward(logits.exp() / total[..., None], own, held)
        ctx.share, ctx.words = share, words
        return (1 - share) * (total.log() - target) - share * mean

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Probabilities less the smoothed target."""
        found, own, held = ctx.saved_tensors
        wanted = (
            torch.zeros_like(found).scatter_(-1, own[..., None], held[..., None] * (1 - ctx.share))
            + ctx.share / ctx.words
        )
        return (found - wanted) * gradient[..., None], None, None, None


class Loss(nn.Module):
    """A module of its own, so that a recorder sees it."""

    def forward(self, logits: Tensor, targets: Tensor, smoothing: float, smooth_locally: bool) -> Tensor:
        """Losses [samples, tokens]."""
        return VocabularyCrossEntropy.apply(logits, targets, smoothing, smooth_locally)


class Head(nn.Module):
    """Hidden states to this rank's part of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, HIDDEN)[own_part(VOCAB)].clone())

    def forward(self, x: Tensor) -> Tensor:
        """[samples, tokens, hidden] -> [samples, tokens, this rank's words]."""
        return Enter.apply(x) @ self.weight.T


def batch() -> tuple[Tensor, Tensor]:
    """Token ids and targets, each [samples, tokens]."""
    drawn = torch.randint(VOCAB, (2, SAMPLES, TOKENS), generator=torch.Generator().manual_seed(3))
    return drawn[0], drawn[1]
