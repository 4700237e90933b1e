"""The orthogonal matrix next to a whole matrix, by Newton-Schulz iterations (Jordan 2024, "Muon: An optimizer for
hidden layers in neural networks"), in fp32.

Products are the library's on whole contiguous matrices, so their bits follow from shape and values alone where exact
numerics hold (`base.mkl`, `base.determinism`), and the norm before them is a sum that the caller makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...core.model.matrices import Split
from ...core.plan.optimizer import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of X, XX'X and XX'XX'X: singular values from 0 to 1 come to between about 0.7 and 1.2 in five iterations
(Jordan 2024)."""

LEAST_NORM = 1e-7
"""What a norm is at least taken for, as in `torch.optim.Muon`."""

Squares = Callable[[Tensor], Tensor]
"""The sum of the squares of a tensor, fp64 [], in an order that nothing but its shape decides."""


def orthogonal_parts(whole: Tensor, split: Split, choice: Optimizer, squares: Squares) -> Tensor:
    """Every matrix of a weight [rows, columns] made orthogonal and scaled, in its place."""
    runs = whole.view(-1, split.unit, whole.shape[1])
    result = torch.empty_like(runs)
    for lo, hi in split.parts:
        matrix = runs[:, lo:hi].reshape(-1, whole.shape[1])
        made = newton_schulz(matrix, choice.muon_steps, squares).mul_(scale_of(choice, *matrix.shape))
        result[:, lo:hi] = made.view(-1, hi - lo, whole.shape[1])
    return result.view(whole.shape)


def newton_schulz(matrix: Tensor, steps: int, squares: Squares) -> Tensor:
    """A new matrix with the singular vectors of `matrix` and singular values near 1; zero for zero."""
    first, third, fifth = COEFFICIENTS
    norm = squares(matrix).sqrt().float().clamp(min=LEAST_NORM)
    turned = matrix.shape[0] > matrix.shape[1]
    x = (matrix.mT if turned else matrix).contiguous() / norm
    for _ in range(steps):
        gram = torch.mm(x, x.mT)
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x.mT.contiguous() if turned else x


def scale_of(choice: Optimizer, rows: int, columns: int) -> float:
    """`optimizer.muon_scale` of a matrix."""
    if choice.muon_scale == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))
