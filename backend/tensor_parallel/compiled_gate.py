"""activation(gate) * up and its gradients in compiled kernels, which keep no activated gate."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..numerics.compiled import compiled

SQRT_HALF = math.sqrt(0.5)
ROOT_2_OVER_PI, CUBE = math.sqrt(2 / math.pi), 0.044715
"""Of the approximation by tanh (Hendrycks & Gimpel 2016, arXiv 1606.08415)."""
DENSITY = 1 / math.sqrt(2 * math.pi)
"""Of the normal distribution at 0."""


@compiled
def gated_forward(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The product, in the format of both."""
    wide = gate.float()
    if activation == "swiglu":
        activated = F.silu(wide)
    else:
        activated = F.gelu(wide, approximate="tanh" if activation == "geglu_tanh" else "none")
    return (activated * up).to(gate.dtype)


@compiled
def gated_backward(dy: Tensor, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The gradients of gate and up [2, ...]."""
    wide, dy_wide = gate.float(), dy.float()
    if activation == "swiglu":
        share = torch.sigmoid(wide)
        slope = share * (1 + wide * (1 - share))
    elif activation == "geglu_tanh":
        share = 0.5 * (1 + torch.tanh(ROOT_2_OVER_PI * (wide + CUBE * wide**3)))
        slope = share + wide * 2 * share * (1 - share) * ROOT_2_OVER_PI * (1 + 3 * CUBE * wide * wide)
    else:
        share = 0.5 * (1 + torch.erf(wide * SQRT_HALF))
        slope = share + wide * DENSITY * torch.exp(-0.5 * wide * wide)
    return torch.stack([dy_wide * up * slope, dy_wide * wide * share]).to(gate.dtype)
