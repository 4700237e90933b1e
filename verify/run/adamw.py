"""One update of AdamW in fp64 by its paper, and how far rounding in fp32 may be from it. numpy only,
and no code of the backend."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

UNIT = 2.0**-24
"""Half the distance from 1 to the next number of fp32."""

ROUNDINGS = 8
"""More operations than a term of a moment or of a weight goes through in one update, each of which is
off by one unit at most."""

LEAST = 2.0**-126
"""What may be lost of a number below the normal range of fp32."""

CLIP_EPS = 1e-6
"""Added to the norm before dividing by it (PyTorch's `clip_grad_norm_`)."""


@dataclass(frozen=True)
class Choice:
    """The constants of an update; `decay` is 0 for parameters that do not decay, `max_norm` 0 for no clipping."""

    learning_rate: float
    betas: tuple[float, float]
    eps: float
    decay: float
    max_norm: float


@dataclass(frozen=True)
class Expected:
    """What an update leaves in a tensor, how far rounding may be from it, and what was `carried` of the tensor
    before: the rest was added."""

    values: np.ndarray
    bound: np.ndarray
    carried: np.ndarray


def clipping(norm: float, max_norm: float) -> float:
    """min(1, max_norm / (norm + 1e-6)); 1 for no clipping.

    >>> clipping(4.0, 1.0) < 0.25, clipping(0.5, 1.0), clipping(4.0, 0.0)
    (True, 1.0, 1.0)
    """
    return min(1.0, max_norm / (norm + CLIP_EPS)) if max_norm > 0 else 1.0


def moment(before: np.ndarray, gradient: np.ndarray, beta: float, power: int) -> Expected:
    """m = beta m + (1 - beta) g, of squares with `power` 2 (Kingma & Ba 2015, algorithm 1)."""
    carried, added = beta * before, (1 - beta) * gradient**power
    return Expected(carried + added, ROUNDINGS * UNIT * (np.abs(before) + np.abs(added)) + LEAST, carried)


def weight(before: np.ndarray, first: np.ndarray, second: np.ndarray, choice: Choice, count: int) -> Expected:
    """w = w - lr (m' / (sqrt(v') + eps) + decay w) with m' = m / (1 - beta1^t), v' = v / (1 - beta2^t), t the `count`
    of updates from 1 and m, v those after this one (Loshchilov & Hutter 2019, algorithm 2, whose schedule multiplier is
    1 and whose decay is lr times ours)."""
    corrected = second / (1 - choice.betas[1] ** count)
    update = choice.learning_rate * first / (1 - choice.betas[0] ** count) / (np.sqrt(corrected) + choice.eps)
    values = before - update - choice.learning_rate * choice.decay * before
    return Expected(values, ROUNDINGS * UNIT * (np.abs(before) + np.abs(update)) + LEAST, before)


def ratio_added(expected: Expected, found: np.ndarray) -> float:
    """How many times what had to be added was added, in the mean square."""
    due = expected.values - expected.carried
    squares = float((due * due).sum())
    return float(((found - expected.carried) * due).sum()) / squares if squares else math.nan
