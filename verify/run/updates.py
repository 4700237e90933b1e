"""What an update of a plan's optimizer leaves in a tensor and its moments, by formulas in fp64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ...core.plan.optimizer import Optimizer
from ...core.plan.plan import Plan
from . import adamw, sgd
from .adamw import Expected

OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}
"""`optimizer.name` in words."""


@dataclass(frozen=True)
class Tensors:
    """A parameter at an update: its gradient, clipped, the weight before, and moments before and after by name."""

    gradient: np.ndarray
    weight: np.ndarray
    before: Mapping[str, np.ndarray]
    after: Mapping[str, np.ndarray]


def moments_of(plan: Plan) -> tuple[str, ...]:
    """The moments that a plan's optimizer keeps of a parameter, by torch's names."""
    if plan.optimizer.name == "adamw":
        return "exp_avg", "exp_avg_sq"
    return ("momentum_buffer",) if sgd.momentum_of(plan.optimizer) else ()


def expected_update(
    optimizer: Optimizer, tensors: Tensors, learning_rate: float, decay: float, count: int
) -> Iterator[tuple[str, Expected]]:
    """What the update number `count`, from 1, leaves in every moment by name, then in the weight, whose name is empty.
    The weight follows from the moments that are there: what is wrong is named once."""
    if optimizer.name == "sgd":
        rule = sgd.Rule(learning_rate, sgd.momentum_of(optimizer), bool(optimizer.nesterov), decay)
        for name, before in tensors.before.items():
            yield name, sgd.momentum(before, tensors.gradient, tensors.weight, rule)
        yield "", sgd.weight(tensors.weight, tensors.gradient, tensors.after.get("momentum_buffer"), rule)
        return
    for power, name in enumerate(("exp_avg", "exp_avg_sq"), 1):
        yield name, adamw.moment(tensors.before[name], tensors.gradient, optimizer.betas[power - 1], power)
    choice = adamw.Choice(learning_rate, optimizer.betas, optimizer.eps, decay, optimizer.clip_grad_norm)
    yield "", adamw.weight(tensors.weight, tensors.after["exp_avg"], tensors.after["exp_avg_sq"], choice, count)
