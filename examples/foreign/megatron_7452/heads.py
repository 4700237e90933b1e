"""Attention whose heads are cut over the ranks, with a learnable sink for each head and a norm that all heads share."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from tp_regions import Enter, Leave, cut, own_part

from shardproof.verify.foreign import Slice

HIDDEN, HEADS, WIDTH, SAMPLES, TOKENS = 12, 6, 4, 4, 6
"""Width is that of a head."""


class Norm(nn.Module):
    """RMSNorm over the width of a head, one weight for all heads: every rank has it, and a part of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[samples, heads, tokens, width] -> the same."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """[samples, tokens, hidden] -> the same, from this rank's heads. `sink` is a logit that every softmax has
    next to those of the keys.

    A norm behind it would undo what it does but for rounding, and its gradient with it.
    """

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        own = own_part(HEADS)
        self.inputs = nn.Parameter(torch.randn(HEADS, 3 * WIDTH, HIDDEN)[own].clone() / math.sqrt(HIDDEN))
        self.output = nn.Parameter(torch.randn(HEADS, HIDDEN, WIDTH)[own].clone() / math.sqrt(HIDDEN))
        self.sink = nn.Parameter(torch.randn(HEADS)[own].clone())
        self.norm = Norm() if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Each rank's heads give a term of the output."""
        query, key, value = torch.einsum("bsh,nwh->bnsw", Enter.apply(x), self.inputs).chunk(3, dim=-1)
        scores = query @ key.transpose(2, 3) / math.sqrt(WIDTH)
        sinks = self.sink[None, :, None, None].expand(*scores.shape[:3], 1)
        found = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1] @ value
        return Leave.apply(torch.einsum("bnsw,nhw->bsh", self.norm(found), self.output))


def cuts() -> dict[str, list[Slice]]:
    """What a rank holds: its heads."""
    return {name: cut(0, HEADS) for name in ("inputs", "output", "sink")} | {"norm": cut(1, HEADS)}


def batch() -> tuple[Tensor, Tensor]:
    """Hidden states and what they are to become, each [samples, tokens, hidden]."""
    drawn = torch.randn(2, SAMPLES, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3))
    return drawn[0], drawn[1]
