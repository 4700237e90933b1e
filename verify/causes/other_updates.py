"""A weight that is wrong after right moments: what the update would have left with the count or the learning rate of
another step."""

from __future__ import annotations

import numpy as np

from ...core.model.parameters import Parameter
from ...core.plan.plan import Plan
from ..ledger.relations import Class
from ..run.updates import Tensors, expected_update, kind_of, rate_and_decay

MOST_STEPS = 64
"""Steps whose learning rates are tried."""
MOST_COUNTS, FEW = 250, 64
"""Counts of updates that are tried, first on a few elements."""
NO_CORRECTION = 10**6
"""A count of updates from which on corrections of moments change nothing."""


def explained_by_update(
    plan: Plan, parameter: Parameter, step: int, tensors: Tensors, found: np.ndarray, box: tuple[slice, ...]
) -> tuple[Class, str] | None:
    """Kind and words of `found`, the part `box` of a weight, by the update of a step that makes it, counted from 0.
    None where none does, and where the right one does but for rounding."""
    rate, decay = rate_and_decay(plan, parameter, step)

    def makes(learning_rate: float, count: int) -> bool:
        *_, (_, expected) = expected_update(plan, parameter, tensors, learning_rate, decay, count)
        return bool((np.abs(found - expected.values[box]) <= expected.bound[box]).all())

    if makes(rate, step + 1):
        return None
    if kind_of(plan, parameter) == "adamw":
        few, own = _few(tensors, found, box)
        for count in (NO_CORRECTION, *range(1, MOST_COUNTS)):
            *_, (_, expected) = expected_update(plan, parameter, few, rate, decay, count)
            if (np.abs(own - expected.values) <= expected.bound).all() and makes(rate, count):
                many = "that are not corrected" if count == NO_CORRECTION else f"corrected as in update {count}"
                return "scaled", f"with moments {many}"
    for other, its_rate in _rates(plan, parameter).items():
        if its_rate != rate and makes(its_rate, step + 1):
            return "scaled", f"with the learning rate of step {other + 1}"
    return None


def _few(tensors: Tensors, found: np.ndarray, box: tuple[slice, ...]) -> tuple[Tensors, np.ndarray]:
    """Some elements whose moments are not zero, as an elementwise update has them."""
    at = np.flatnonzero(tensors.after["exp_avg"][box])[:FEW]
    moments = {name: each[box].reshape(-1)[at] for name, each in tensors.after.items()}
    return Tensors(np.zeros(len(at)), tensors.weight[box].reshape(-1)[at], moments, moments), found.reshape(-1)[at]


def _rates(plan: Plan, parameter: Parameter) -> dict[int, float]:
    """By step, the first with each learning rate."""
    steps = reversed(range(min(plan.train.steps, MOST_STEPS)))
    first = {rate_and_decay(plan, parameter, step)[0]: step for step in steps}
    return {step: rate for rate, step in sorted(first.items(), key=lambda each: each[1])}
