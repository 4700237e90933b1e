"""Rotary positions on tensors; `core.model.rotary` says by which angles heads turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.model.rotary import rotary_frequencies, rotary_growth
from ..base.streams import to_device
from ..tensor_parallel import LayerContext


def rotary_table(context: LayerContext, *, local: bool = False) -> tuple[Tensor, Tensor]:
    """cos and sin of the running microbatch's tokens, fp32 [1 or b, 1, s, d]; `local` in layers with a window whose
    base is their own (`core.model.attention_kinds`)."""
    microbatch = context.running_microbatch
    if microbatch.documents is not None:
        return _rows(context, context.positions(microbatch), local)
    cos, sin = context.constant(_name(local), lambda: _rows(context, context.places().unsqueeze(0), local))
    own = context.chunks_of(microbatch).num_own
    return cos[:, :, :own], sin[:, :, :own]


def rotary_by_token(context: LayerContext, *, local: bool = False) -> tuple[Tensor, Tensor]:
    """`rotary_table` for heads that lie behind their token: cos [1 or b, s, 1, 1, d], and sin of the first half of d,
    which the second repeats, [1 or b, s, 1, 1, d/2]."""

    def by_token() -> tuple[Tensor, Tensor]:
        cos, sin = (table.squeeze(1)[:, :, None, None] for table in rotary_table(context, local=local))
        return cos, sin.chunk(2, -1)[0]

    microbatch = context.running_microbatch
    if microbatch.documents is not None:
        return by_token()
    return context.constant(f"{_name(local)} of {context.chunks_of(microbatch).num_own} tokens", by_token)


def _name(local: bool) -> str:
    return "local rotary" if local else "rotary"


def _rows(context: LayerContext, positions: Tensor, local: bool) -> tuple[Tensor, Tensor]:
    sequence, device, model = context.chunks.num_items, context.numerics.device, context.model
    frequencies, growth = rotary_frequencies(model, sequence, local=local), rotary_growth(model, local=local)
    table = rope_table(sequence, frequencies, device, growth=growth)
    cos, sin = (part[positions].unsqueeze(1) for part in table)
    return cos, sin


def rope_table(
    sequence: int, frequencies: Sequence[float], device: torch.device, *, growth: float = 1.0
) -> tuple[Tensor, Tensor]:
    """cos and sin [s, d] of position times frequency, times `growth`, rounded from fp64 to fp32; both halves of d
    hold the same angles."""
    turns = to_device(torch.tensor(frequencies, dtype=torch.float64), device)
    angles = torch.outer(torch.arange(sequence, dtype=torch.float64, device=device), turns)
    angles = torch.cat([angles, angles], -1)
    return (angles.cos() * growth).float(), (angles.sin() * growth).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (i, i + d/2) of the last dimension by their angles, which are fp32: the result is rounded once.

    The halves lie as in Llama's published weights.
    """
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    """Its backward turns back: the transpose of y = x cos + (-high, low) sin."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        low, high = x.chunk(2, -1)
        return (x * cos).add_(torch.cat([-high, low], -1) * sin).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        low, high = (dy * sin).chunk(2, -1)
        return (dy * cos).add_(torch.cat([high, -low], -1)).to(dy.dtype), None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False, out: Tensor | None = None) -> Tensor:
    """`rotate` outside of autograd, in two passes, or `back` by the same angles; written to `out` where that is given.
    `sin` has the angles of one half of the last dimension.

    Products and sums may be rounded together, so bits depend on the machine.
    """
    low, high = x.chunk(2, -1)
    y = torch.mul(x, cos, out=out if out is not None and out.dtype == cos.dtype else None)
    y_low, y_high = y.chunk(2, -1)
    sign = 1 if back else -1
    y_low.addcmul_(high, sin, value=sign)
    y_high.addcmul_(low, sin, value=-sign)
    if out is None or out is y:
        return y.to(x.dtype)
    return out.copy_(y)
