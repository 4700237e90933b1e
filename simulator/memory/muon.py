"""What Muon's step holds besides gradients and state: one whole matrix on its owner. Modelled."""

from __future__ import annotations

from ...core.plan.plan import Plan
from ...core.program.optimizer_state import matrices_of

FP32_BYTES = 4

WHOLE = 3
"""Copies of a whole weight of an owner: what has arrived put together, what is made of it, and that laid out for those
that it goes to."""

ITERATED = 3
"""Of the matrix that is iterated: it, its next one, and the rows that they are made of."""

SQUARES = 2
"""Products of its short side: XX' and the polynomial of it."""


def muon_bytes(plan: Plan, stage: int) -> int:
    """The most that a rank of a stage holds while it makes one matrix orthogonal."""
    most = 0
    for parameter, _, shapes in matrices_of(plan, stage):
        rows, columns = parameter.shape[-2:]
        iterated = max(ITERATED * m * n + SQUARES * min(m, n) ** 2 for m, n in shapes)
        most = max(most, WHOLE * rows * columns + iterated)
    return FP32_BYTES * most
