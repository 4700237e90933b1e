"""What an update of a plan's optimizer leaves in a tensor and its moments, by formulas in fp64."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ...core.model.parameters import Parameter
from ...core.plan.parameter_groups import ParameterGroup
from ...core.plan.plan import Plan
from . import adamw, muon, sgd
from .adamw import Expected

WORDS = {"adamw": "AdamW", "sgd": "SGD", "muon": "Muon"}
"""`kind_of` for people."""


@dataclass(frozen=True)
class Tensors:
    """A parameter at an update: its gradient, clipped, the weight before, and moments before and after by name."""

    gradient: np.ndarray
    weight: np.ndarray
    before: Mapping[str, np.ndarray]
    after: Mapping[str, np.ndarray]


def group_of(plan: Plan, parameter: Parameter) -> ParameterGroup | None:
    """The first group of a plan whose expression is the whole name of a parameter."""
    for group in plan.optimizer.groups:
        if re.compile(group.match).fullmatch(parameter.name):
            return group
    return None


def is_frozen(plan: Plan, parameter: Parameter) -> bool:
    """Whether a parameter stays as it is."""
    group = group_of(plan, parameter)
    return group is not None and group.frozen


def rate_and_decay(plan: Plan, parameter: Parameter, step: int) -> tuple[float, float]:
    """The learning rate and weight decay of a parameter in a step."""
    group, rate = group_of(plan, parameter), plan.rates.learning_rate(step)
    decay = plan.rates.weight_decay(step) if parameter.decay else 0.0
    if group is None:
        return rate, decay
    return rate * group.learning_rate_multiplier, decay if group.weight_decay is None else group.weight_decay


def kind_of(plan: Plan, parameter: Parameter) -> str:
    """Which update a parameter gets: a key of `WORDS`."""
    name = plan.optimizer.name
    return "adamw" if name == "muon" and not muon.is_matrix(parameter) else name


def moments_of(plan: Plan, parameter: Parameter) -> tuple[str, ...]:
    """The moments that the update of a parameter keeps, by torch's names."""
    kind = kind_of(plan, parameter)
    if kind == "adamw":
        return "exp_avg", "exp_avg_sq"
    return ("momentum_buffer",) if kind == "muon" or sgd.momentum_of(plan.optimizer) else ()


def expected_update(
    plan: Plan, parameter: Parameter, tensors: Tensors, learning_rate: float, decay: float, count: int
) -> Iterator[tuple[str, Expected]]:
    """What the update number `count`, from 1, leaves in every moment by name, then in the weight, whose name is empty.
    The weight follows from the moments that are there: what is wrong is named once."""
    optimizer, kind = plan.optimizer, kind_of(plan, parameter)
    gradient, weight = tensors.gradient, tensors.weight
    if kind == "sgd":
        rule = sgd.Rule(learning_rate, sgd.momentum_of(optimizer), bool(optimizer.nesterov), decay)
        for name, before in tensors.before.items():
            yield name, sgd.momentum(before, gradient, weight, rule)
        yield "", sgd.weight(weight, gradient, tensors.after.get("momentum_buffer"), rule)
    elif kind == "muon":
        own = muon.rule_of(optimizer, learning_rate, decay)
        yield "momentum_buffer", muon.momentum(tensors.before["momentum_buffer"], gradient, own)
        rows = muon.matrices(plan.model, parameter)
        yield "", muon.weight(weight, gradient, tensors.after["momentum_buffer"], own, rows)
    else:
        for power, name in enumerate(("exp_avg", "exp_avg_sq"), 1):
            yield name, adamw.moment(tensors.before[name], gradient, optimizer.betas[power - 1], power)
        choice = adamw.Choice(learning_rate, optimizer.betas, optimizer.eps, decay, optimizer.clip_grad_norm)
        yield "", adamw.weight(weight, tensors.after["exp_avg"], tensors.after["exp_avg_sq"], choice, count)
