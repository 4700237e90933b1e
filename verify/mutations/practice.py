"""What the usual practice says of a mutant: the loss of the first step as logs print it, and `allclose` of what
the first step computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...core.plan.plan import Plan
from ..ledger.ledger import GRADIENT, SCALAR, WEIGHT, Key, RunLedger

LOSS_RTOL = 1e-3
"""What is left of a loss in a log of four digits."""
ALLCLOSE = 1e-2
"""rtol and atol of tests of distributed training."""


@dataclass(frozen=True)
class Practice:
    """Whether either habit would have noticed. A run that stops is noticed by both; of one that nobody could
    judge that is not known."""

    loss: bool
    allclose: bool


NOTICED = Practice(loss=True, allclose=True)
UNNOTICED = Practice(loss=False, allclose=False)


def first_step_keys(plan: Plan) -> frozenset[Key]:
    """The tensors whose values `judge_by_habit` needs. Of a run that goes on from a checkpoint the
    first step is the second."""
    return frozenset(
        Key(step, phase, name) for step in (0, 1) for name in plan.named_shapes for phase in (GRADIENT, WEIGHT)
    )


def judge_by_habit(reference: RunLedger, run: RunLedger) -> Practice:
    """The first step of a run against one device. Both kept the values of `first_step_keys`.

    `allclose` is asked of losses, gradients and weights on every rank: more than is usual, where one rank is looked at.
    """
    loss = any(abs(found - right) > LOSS_RTOL * abs(right) for right, found in _losses(reference, run))
    far = any(not np.allclose(found, right, rtol=ALLCLOSE, atol=ALLCLOSE) for right, found in _losses(reference, run))
    first = _first_step(reference)
    keys = [key for key in reference.pieces if key.step == first and key.phase in (GRADIENT, WEIGHT)]
    return Practice(loss, far or any(_is_far(key, reference, run) for key in keys))


def _first_step(reference: RunLedger) -> int:
    return min(key.step for key in reference.pieces if key.phase == SCALAR)


def _losses(reference: RunLedger, run: RunLedger) -> Iterator[tuple[float, float]]:
    key = Key(_first_step(reference), SCALAR, "loss")
    right = float(reference.pieces[key][0].load())
    return ((right, float(piece.load())) for piece in run.pieces[key])


def _is_far(key: Key, reference: RunLedger, run: RunLedger) -> bool:
    right = reference.pieces[key][0].load()
    parts = (
        (right[tuple(slice(lo, hi) for lo, hi in piece.region)], piece.load()) for piece in run.pieces.get(key, ())
    )
    return any(not np.allclose(found, part, rtol=ALLCLOSE, atol=ALLCLOSE) for part, found in parts)
