"""`Held`: what of a parameter a rank updates, and the factor by which gradients are clipped."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.model.parameters import Parameter

CLIP_EPS = 1e-6
"""Added to the norm before dividing by it, as `torch.nn.utils.clip_grad_norm_` does."""


@dataclass(frozen=True)
class Held:
    """A parameter of one stage as this rank holds it. `counts` is true on the one rank (per replica) whose
    elements enter the norm. Where `tensor` rests in host memory an update leaves its values in `rounded` too, which is
    on the device, laid out as the tensor."""

    parameter: Parameter
    slices: tuple[slice, ...]
    tensor: Tensor
    counts: bool
    rounded: Tensor | None = None
    stage: int = 0

    @property
    def name(self) -> str:
        """The canonical name of the parameter."""
        return self.parameter.name


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """The factor, fp64 [], that brings a norm down to `max_norm`: min(1, max_norm / (norm + 1e-6)); 1 when
    `max_norm` is 0 (no clipping)."""
    return (max_norm / (norm + CLIP_EPS)).clamp(max=1.0) if max_norm > 0 else torch.ones_like(norm)
