"""Rotary positions on tensors; `core.rotary` says by which angles heads turn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.rotary import rotary_frequencies, rotary_growth
from ..tensor_parallel import LayerContext


def rotary_table(context: LayerContext) -> tuple[Tensor, Tensor]:
    """cos and sin of the running microbatch's tokens, fp32 [1 or b, 1, s, d]."""
    sequence, positions = context.chunks.num_items, context.positions(context.running_microbatch)
    frequencies = rotary_frequencies(context.model, sequence)
    table = rope_table(sequence, frequencies, context.numerics.device, growth=rotary_growth(context.model))
    cos, sin = (part[positions].unsqueeze(1) for part in table)
    return cos, sin


def rope_table(sequence: int, frequencies: Sequence[float], device: torch.device, *, growth: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin [s, d] of position times frequency, times `growth`, rounded from fp64 to fp32; both halves of d hold the same angles."""
    turns = torch.tensor(frequencies, dtype=torch.float64, device=device)
    angles = torch.outer(torch.arange(sequence, dtype=torch.float64, device=device), turns)
    angles = torch.cat([angles, angles], -1)
    return (angles.cos() * growth).float(), (angles.sin() * growth).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (i, i + d/2) of the last dimension by their angles, which are fp32: the result is rounded once.

    The halves lie as in Llama's published weights.
    """
    low, high = x.chunk(2, -1)
    return (x * cos + torch.cat([-high, low], -1) * sin).to(x.dtype)
