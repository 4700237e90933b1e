"""Whole training steps of one rank as cases of `measure_machine`: what kernels take one after the other, as in no
loop over one of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ...core.commands.probes import PROBE_STEPS, PROBES
from ...core.plan.plan import Plan
from .cases import Call, Case


def steps(device: Any) -> Iterator[Case]:
    """A step of every probe, which every rank takes on its own."""
    for plan in PROBES:
        yield "step", plan.model.name, (), partial(_calls, plan, device), float(PROBE_STEPS)


def _calls(plan: Plan, device: Any) -> Sequence[Call]:
    from ..ranks.training_rank import TrainingRank
    from ..transport.memory import MemoryWorld

    rank, numbers = TrainingRank(MemoryWorld(1, device=device).transport(0), plan), itertools.count()

    def several() -> None:
        for _ in range(PROBE_STEPS):
            rank.step(next(numbers))

    return [several]
