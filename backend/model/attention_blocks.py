"""Blocks of queries, and what computes the attention of one: the library's fused kernel, or ours where
it drops probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ..base.microbatch import Microbatch
from ..numerics.dropout import dropout_mask
from ..tensor_parallel import LayerContext


@dataclass(frozen=True)
class Block:
    """`size` queries: block `index` of the sequence, from token `start` of it, which is token `first` of this rank."""

    index: int
    first: int
    size: int
    start: int

    @property
    def end(self) -> int:
        """The token of the sequence behind the last query."""
        return self.start + self.size

    @property
    def rows(self) -> slice:
        """The queries among this rank's tokens."""
        return slice(self.first, self.first + self.size)

    def of(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """The block's tokens of [b, heads, s, d], contiguous."""
        return x[:, :, self.rows].to(dtype).contiguous()

    def mask(self, documents: Tensor | None, dtype: torch.dtype, device: torch.device, *, window: int = 0) -> Tensor:
        """What is added to the scores, 0 or -inf: [size, end], or [b, 1, size, end] where documents are packed,
        which begin at the tokens `documents` [b, s] of this rank's queries. With a `window` a query sees so many
        keys, its own the last."""
        queries, keys = torch.arange(self.start, self.end, device=device), torch.arange(self.end, device=device)
        hidden = keys > queries.unsqueeze(-1)
        if window:
            hidden |= keys <= queries.unsqueeze(-1) - window
        if documents is not None:
            hidden = (hidden | (keys < documents[:, self.rows].unsqueeze(-1))).unsqueeze(1)
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


class Kernel(Protocol):
    """Attention of a block of queries q [b, heads, l, d] to the keys k [b, heads, keys, d] up to its end,
    values v [b, heads, keys, w]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, start: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The result [b, heads, l, w], and what the backward needs besides it and its arguments. `start` is
        the block's first token."""

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
        """The gradients of q, k and v."""


@dataclass(frozen=True)
class FusedKernel:
    """The library's kernel for the CPU, which hands out its statistics."""

    scale: float | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, start: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        y, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=mask, scale=self.scale
        )
        return y, (log_sums,)

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
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = run(dy, q, k, v, y, for_backward[0], 0.0, False, attn_mask=mask, scale=self.scale)
        return dq, dk, dv


@dataclass(frozen=True)
class PaddedKernel:
    """The same for values narrower or wider than keys (latent attention): zeros fill up whichever is narrower."""

    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, start: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        width = max(q.shape[-1], v.shape[-1])
        y, for_backward = FusedKernel(self.scale).forward(
            _padded(q, width), _padded(k, width), _padded(v, width), mask, start
        )
        return y[..., : v.shape[-1]], for_backward

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
        d, w = q.shape[-1], v.shape[-1]
        dy, q, k, v, y = (_padded(x, max(d, w)) for x in (dy, q, k, v, y))
        dq, dk, dv = FusedKernel(self.scale).backward(dy, q, k, v, mask, y=y, for_backward=for_backward, start=start)
        return dq[..., :d], dk[..., :d], dv[..., :w]


def _padded(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1]))


@dataclass(frozen=True)
class RepeatedKernel:
    """Whatever the library chooses; its backward computes the block again."""

    scale: float | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, start: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale), ()

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
        q, k, v = (part.detach().requires_grad_() for part in (q, k, v))
        with torch.enable_grad():
            again = F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale)
        dq, dk, dv = torch.autograd.grad(again, (q, k, v), dy)
        return dq, dk, dv


@dataclass(frozen=True)
class DropoutKernel:
    """dropout(softmax(q k^T * scale)) v in fp32, of as many heads of a sample at a time as numerics multiply together.
    The probabilities are kept, masks made again.

    Elements are numbered by (sample of the global batch, head of the model, query, key).
    """

    context: LayerContext
    operation: str
    microbatch: Microbatch
    scale: float | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, start: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        q, k, v, scale = q.float(), k.float(), v.float(), self._scale(q)
        probabilities = q.new_empty(*q.shape[:3], k.shape[2])
        y = q.new_empty(*q.shape[:3], v.shape[3])
        multiply = self.context.numerics.multiply_heads
        for here in self._parts(q):
            scores = multiply(q[here], k[here].transpose(2, 3)).mul_(scale)
            torch.softmax(scores.add_(mask if mask.dim() == 2 else mask[here[0]]), -1, out=probabilities[here])
            y[here] = multiply(probabilities[here] * self._masks(here, start, scores), v[here])
        return y, (probabilities,)

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
        q, k, v, dy, scale = q.float(), k.float(), v.float(), dy.float(), self._scale(q)
        dq, dk, dv = torch.empty_like(q), torch.empty(k.shape, device=k.device), torch.empty(v.shape, device=v.device)
        multiply = self.context.numerics.multiply_heads
        for here in self._parts(q):
            p = for_backward[0][here]
            dropped = self._masks(here, start, p)
            dv[here] = multiply((p * dropped).transpose(2, 3), dy[here])
            dp = multiply(dy[here], v[here].transpose(2, 3)).mul_(dropped)
            dscores = dp.sub_((dp * p).sum(-1, keepdim=True)).mul_(p).mul_(scale)
            dq[here] = multiply(dscores, k[here])
            dk[here] = multiply(dscores.transpose(2, 3), q[here])
        return dq, dk, dv

    def _parts(self, q: Tensor) -> list[tuple[slice, slice]]:
        """Samples and heads that are multiplied together."""
        samples, heads = q.shape[:2]
        step = self.context.numerics.heads_at_once or heads
        return [
            (slice(i, i + 1), slice(j, min(j + step, heads))) for i in range(samples) for j in range(0, heads, step)
        ]

    def _masks(self, here: tuple[slice, slice], start: int, scores: Tensor) -> Tensor:
        """Those of one sample and some heads, as `scores` [1, heads, l, keys]."""
        (sample, heads), like = here, scores[0, 0]
        masks = [self._dropped(sample.start, head, start, like) for head in range(heads.start, heads.stop)]
        return torch.stack(masks).unsqueeze(0) if len(masks) > 1 else masks[0].view(scores.shape)

    def _scale(self, q: Tensor) -> float:
        return 1 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale

    def _dropped(self, sample: int, head: int, start: int, scores: Tensor) -> Tensor:
        """The mask of a block's scores [l, keys]."""
        context, model, sequence = self.context, self.context.model, self.context.chunks.num_items
        lo, hi = context.plan.leaf_sizes.heads.owned_items(context.tp.size, context.tp.rank)
        inner = context.cp_inner
        first_head = (lo + (hi - lo) // inner.size * inner.rank) * model.query_heads_per_group
        row = ((self.microbatch.first_drawn + sample) * model.num_heads + first_head + head) * sequence + start
        queries, keys = (torch.arange(size, device=scores.device) for size in scores.shape)
        index = (row + queries.unsqueeze(-1)) * sequence + keys
        assert self.microbatch.step is not None
        seed, operation = context.plan.train.seed, context.plan.name_in_run(self.operation)
        return dropout_mask(seed, operation, self.microbatch.step, index, model.attention_dropout)
