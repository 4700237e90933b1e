"""One update of SGD with momentum in fp64, by the algorithm that torch documents (`torch.optim.SGD`), and how far
rounding in fp32 may be from it. numpy only, and no code of the backend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...core.plan.optimizer import Optimizer
from .adamw import LEAST, ROUNDINGS, UNIT, Expected

USUAL_MOMENTUM = 0.9
"""Where a plan says nothing."""


@dataclass(frozen=True)
class Rule:
    """The constants of an update; `decay` is 0 for parameters that do not decay."""

    learning_rate: float
    momentum: float
    nesterov: bool
    decay: float


def momentum_of(optimizer: Optimizer) -> float:
    """The momentum of a plan."""
    return USUAL_MOMENTUM if optimizer.momentum is None else optimizer.momentum


def momentum(before: np.ndarray, gradient: np.ndarray, weight: np.ndarray, rule: Rule) -> Expected:
    """b = mu b + (g + decay w), from zeros."""
    carried, decayed = rule.momentum * before, rule.decay * weight
    sizes = np.abs(carried) + np.abs(gradient) + np.abs(decayed)
    return Expected(carried + gradient + decayed, ROUNDINGS * UNIT * sizes + LEAST, carried)


def weight(before: np.ndarray, gradient: np.ndarray, buffer: np.ndarray | None, rule: Rule) -> Expected:
    """w = w - lr b, Nesterov's w - lr (g + decay w + mu b), without a buffer w - lr (g + decay w); b is that after
    this update."""
    decayed = gradient + rule.decay * before
    if buffer is None:
        buffer = decayed
    direction = decayed + rule.momentum * buffer if rule.nesterov else buffer
    sizes = np.abs(gradient) + np.abs(rule.decay * before) + np.abs(buffer)
    moved = rule.learning_rate * direction
    bound = ROUNDINGS * UNIT * (np.abs(before) + rule.learning_rate * sizes) + LEAST
    return Expected(before - moved, bound, before)
