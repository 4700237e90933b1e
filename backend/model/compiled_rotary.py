"""Queries, keys and values apart from the features of one product, turned by their positions, in compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..numerics.compiled import compiled


@compiled
def turned_parts(parts: Sequence[Tensor], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [b, s, l, n, d] turned, and values, each contiguous. `cos` has the angles of both halves of d,
    `sin` those of one, fp32."""
    q, k, v = parts
    return _turned(q, cos, sin), _turned(k, cos, sin), v.clone(memory_format=torch.contiguous_format)


@compiled
def joined_turned_back(parts: Sequence[Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    """The gradients of queries, keys and values, the first two turned back, where they belong:
    [b, s, l, q + 2, d]."""
    dq, dk, dv = parts
    return torch.cat([_turned(dq, cos, -sin), _turned(dk, cos, -sin), dv], 3)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, -1)
    low_cos, high_cos = cos.chunk(2, -1)
    return torch.cat([low * low_cos - high * sin, high * high_cos + low * sin], -1).to(x.dtype)
