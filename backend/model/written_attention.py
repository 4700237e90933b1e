"""Attention written out: what the library's fused kernels do not compute, which is dropped probabilities, scores that
are held below a cap, and sinks, which are scores without a key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.microbatch import Microbatch
from ..numerics.dropout import dropout_mask
from ..tensor_parallel import LayerContext
from .alibi import first_query_head, penalties


@dataclass(frozen=True)
class WrittenKernel:
    """dropout(softmax(cap(q k^T * scale))) v in fp32, of as many heads of a sample at a time as numerics multiply
    together, with cap(x) = c tanh(x / c) where the model has one (Gemma 2, arXiv 2408.00118, section 2). The
    probabilities are retained, and the capped scores; masks are made again.

    Penalties of ALiBi, by the `slopes` of the heads, are added behind the cap. Where queries are one feature wider than
    keys, that feature is a score among those of the keys in the softmax (`attention_sinks`).

    Elements are numbered by (sample of the global batch, head of the model, query, key).
    """

    context: LayerContext
    operation: str
    microbatch: Microbatch
    scale: float | None
    slopes: tuple[float, ...] = ()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, start: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        q, sinks = _without_sinks(q, k)
        k, v, scale, keys = k.float(), v.float(), self._scale(k), k.shape[2]
        probabilities = q.new_empty(*q.shape[:3], keys)
        capped = q.new_empty(*q.shape[:3], keys) if self._cap else q.new_empty(0)
        shares, y = torch.empty_like(sinks), q.new_empty(*q.shape[:3], v.shape[3])
        numerics = self.context.numerics
        for here in self._parts(q):
            scores = numerics.multiply_heads(q[here], k[here].transpose(2, 3)).mul_(scale)
            if self._cap:
                capped[here] = numerics.elementwise(torch.tanh, scores.div_(self._cap))
                scores = capped[here] * self._cap
            scores.add_(mask if mask.dim() == 2 else mask[here[0]])
            if slopes := self.slopes[here[1]]:
                scores.add_(penalties(slopes, start, scores))
            if sinks.shape[-1]:
                every = torch.softmax(torch.cat([scores, sinks[here]], -1), -1)
                probabilities[here], shares[here] = every[..., :keys], every[..., keys:]
            else:
                torch.softmax(scores, -1, out=probabilities[here])
            factors = self._masks(here, start, scores)
            shown = probabilities[here] if factors is None else probabilities[here] * factors
            y[here] = numerics.multiply_heads(shown, v[here])
        return y, (probabilities, *([capped] if self._cap else []), *([shares] if sinks.shape[-1] else []))

    def backward(
        self,
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor,
        *,
        y: Tensor,
        for_backward: Sequence[Tensor],
        start: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, sinks = _without_sinks(q, k)
        k, v, dy, scale = k.float(), v.float(), dy.float(), self._scale(k)
        dq, dk, dv = torch.empty_like(q), torch.empty(k.shape, device=k.device), torch.empty(v.shape, device=v.device)
        dsinks, multiply = torch.empty_like(sinks), self.context.numerics.multiply_heads
        for here in self._parts(q):
            p = for_backward[0][here]
            factors = self._masks(here, start, p)
            dp = multiply(dy[here], v[here].transpose(2, 3))
            dv[here] = multiply((p if factors is None else p * factors).transpose(2, 3), dy[here])
            if factors is not None:
                dp.mul_(factors)
            mean = (dp * p).sum(-1, keepdim=True)
            if sinks.shape[-1]:
                dsinks[here] = -for_backward[-1][here] * mean
            dscores = dp.sub_(mean).mul_(p)
            if self._cap:
                dscores.mul_(1 - for_backward[1][here].square())
            dscores.mul_(scale)
            dq[here] = multiply(dscores, k[here])
            dk[here] = multiply(dscores.transpose(2, 3), q[here])
        return torch.cat([dq, dsinks], -1) if sinks.shape[-1] else dq, dk, dv

    @property
    def _cap(self) -> float:
        return self.context.model.attention_softcap

    def _parts(self, q: Tensor) -> list[tuple[slice, slice]]:
        """Samples and heads that are multiplied together."""
        samples, heads = q.shape[:2]
        step = self.context.numerics.heads_at_once or heads
        return [
            (slice(i, i + 1), slice(j, min(j + step, heads))) for i in range(samples) for j in range(0, heads, step)
        ]

    def _masks(self, here: tuple[slice, slice], start: int, scores: Tensor) -> Tensor | None:
        """What dropout multiplies the probabilities of one sample and some heads by, as `scores` [1, heads, l, keys];
        None where it drops nothing."""
        if not self.context.model.attention_dropout or self.microbatch.step is None:
            return None
        (sample, heads), like = here, scores[0, 0]
        masks = [self._dropped(sample.start, head, start, like) for head in range(heads.start, heads.stop)]
        return torch.stack(masks).unsqueeze(0) if len(masks) > 1 else masks[0].view(scores.shape)

    def _scale(self, k: Tensor) -> float:
        return 1 / math.sqrt(k.shape[-1]) if self.scale is None else self.scale

    def _dropped(self, sample: int, head: int, start: int, scores: Tensor) -> Tensor:
        """The mask of a block's scores [l, keys]."""
        context, model, sequence = self.context, self.context.model, self.context.chunks.num_items
        number = first_query_head(context) + head
        row = ((self.microbatch.first_drawn + sample) * model.num_heads + number) * sequence + start
        queries, keys = (torch.arange(size, device=scores.device) for size in scores.shape)
        index = (row + queries.unsqueeze(-1)) * sequence + keys
        assert self.microbatch.step is not None
        seed, operation = context.plan.train.seed, context.plan.name_in_run(self.operation)
        return dropout_mask(seed, operation, self.microbatch.step, index, model.attention_dropout)


def _without_sinks(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries as wide as keys, fp32 and contiguous, and what they are wider, [b, heads, l, 0 or 1]."""
    return q[..., : k.shape[3]].float().contiguous(), q[..., k.shape[3] :].float()
