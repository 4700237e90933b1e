"""Blocks of queries, and the library's kernels that compute the attention of one (`written_attention` has ours)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


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
        return F.scaled_dot_product_attention(q, k, v, mask.to(q.dtype), scale=self.scale), ()

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
