"""One update of Muon in fp64 by its papers (Jordan 2024; Liu et al. 2025, arXiv 2502.16982), and how far fp32 may be
from it. numpy only, and no code of the backend."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...core.model.model import ModelSpec
from ...core.model.parameters import Parameter
from ...core.plan.optimizer import Optimizer
from .adamw import LEAST, ROUNDINGS, UNIT, Expected

USUAL_MOMENTUM = 0.95
"""Where a plan says nothing (Jordan 2024)."""

OFF = 1e-4
"""How far an element of an orthogonal matrix may be off, as a share of the largest there can be: five iterations
multiply the smallest singular values, and what rounding has done to them, by up to 485."""


@dataclass(frozen=True)
class Rule:
    """The constants of an update; `decay` is 0 for parameters that do not decay, `original` the scale of Jordan."""

    learning_rate: float
    momentum: float
    nesterov: bool
    decay: float
    steps: int
    original: bool


def rule_of(optimizer: Optimizer, learning_rate: float, decay: float) -> Rule:
    """The rule of a plan."""
    momentum = USUAL_MOMENTUM if optimizer.momentum is None else optimizer.momentum
    nesterov = optimizer.nesterov is not False
    return Rule(learning_rate, momentum, nesterov, decay, optimizer.muon_steps, optimizer.muon_scale == "original")


def is_matrix(parameter: Parameter) -> bool:
    """Whether it is a matrix of a layer, or one for each expert; tables and the output head are none."""
    inside = parameter.name.partition(".")[0] in ("layers", "mtp")
    return inside and len(parameter.shape) - parameter.expert == 2


def momentum(before: np.ndarray, gradient: np.ndarray, rule: Rule) -> Expected:
    """b = mu b + g, from zeros."""
    carried = rule.momentum * before
    return Expected(carried + gradient, ROUNDINGS * UNIT * (np.abs(carried) + np.abs(gradient)) + LEAST, carried)


def weight(
    before: np.ndarray, gradient: np.ndarray, buffer: np.ndarray, rule: Rule, rows: list[np.ndarray]
) -> Expected:
    """w = w - lr (s O + decay w) with O the orthogonal matrix next to Nesterov's g + mu b, or b; b is that after this
    update. Of the last two dimensions `rows` are those of each matrix."""
    direction = gradient + rule.momentum * buffer if rule.nesterov else buffer
    moved, allowed = np.zeros_like(before), np.zeros_like(before)
    for place in np.ndindex(before.shape[:-2]):
        for own in rows:
            scale = _scale(len(own), before.shape[-1], rule)
            moved[place][own] = scale * orthogonal(direction[place][own], rule.steps)
            allowed[place][own] = OFF * scale
    decayed = rule.learning_rate * rule.decay * before
    values = before - decayed - rule.learning_rate * moved
    bound = (
        ROUNDINGS * UNIT * np.abs(before) + rule.learning_rate * (allowed + ROUNDINGS * UNIT * np.abs(moved)) + LEAST
    )
    return Expected(values, bound, before)


def orthogonal(matrix: np.ndarray, steps: int) -> np.ndarray:
    """X = 3.4445 X - 4.7750 XX'X + 2.0315 (XX')^2 X, so often, from G / max(|G|, 1e-7).

    >>> [round(float(each), 2) for each in np.linalg.svd(orthogonal(np.diag([3.0, 1.0, 0.1]), 5))[1]]
    [1.13, 1.13, 0.75]
    """
    x = matrix / max(float(np.linalg.norm(matrix)), 1e-7)
    for _ in range(steps):
        squared = x.T @ x if x.shape[0] > x.shape[1] else x @ x.T
        polynomial = -4.7750 * squared + 2.0315 * squared @ squared
        x = 3.4445 * x + (x @ polynomial if x.shape[0] > x.shape[1] else polynomial @ x)
    return x


def matrices(model: ModelSpec, parameter: Parameter) -> list[np.ndarray]:
    """The rows of each matrix in a weight: queries, keys and values of every group in turn; gates and units in
    turn."""
    numbers = np.arange(parameter.shape[-2])
    match parameter.name.split(".")[-3:]:
        case [*_, "qkv", "weight"]:
            heads = numbers.reshape(model.num_kv_heads, -1, model.head_dim)
            return [heads[:, :-2].reshape(-1), heads[:, -2].reshape(-1), heads[:, -1].reshape(-1)]
        case [*_, "up", "weight"] if model.gated:
            return [numbers[0::2], numbers[1::2]]
    return [numbers]


def _scale(rows: int, columns: int, rule: Rule) -> float:
    return math.sqrt(max(1.0, rows / columns)) if rule.original else 0.2 * math.sqrt(max(rows, columns))
