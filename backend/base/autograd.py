"""`Function`: what layers with a gradient of their own derive from."""

from __future__ import annotations

from typing import Any

import torch


class Function(torch.autograd.Function):
    """torch's `Function` for tensors that no transform of `torch.func` (vmap, grad) has wrapped, without looking at
    each argument for such: 3 of the 10 microseconds that a call takes."""

    @classmethod
    def apply(cls, *inputs: Any) -> Any:
        """`forward(ctx, *inputs)`, with `backward` in the graph."""
        return super(torch.autograd.Function, cls).apply(*inputs)  # type: ignore[misc]  # made by C, which torch's types leave out
