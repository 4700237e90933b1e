"""Interleaved zero bubble: ZB-H1 over several chunks per rank (torch.distributed.pipelining,
ScheduleInterleavedZeroBubble)."""

from __future__ import annotations

import numpy as np

from ..base.errors import ScheduleError
from .action import Kind
from .interleaved import schedule_table
from .placement import Placement
from .rows import assemble, count_within_kind, one_forward_one_backward, with_weights
from .schedule import Schedule


def interleaved_zero_bubble(pp: int, num_microbatches: int, vpp: int) -> Schedule:
    """Interleaved 1F1B with split backwards: rank r warms up with (v-1)N + p-1-r chunk forwards and puts W off by r.

    N = m / max(1, m // p) microbatches make a round; it has to be a whole number (torch's condition). A rank
    holds at most (v-1)N + p chunk activations from F to W. Raises `ScheduleError` with the nearest legal
    numbers of microbatches.
    """
    if problem := uneven_rounds(pp, num_microbatches):
        raise ScheduleError(problem)
    group = num_microbatches // max(1, num_microbatches // pp)
    table = np.array(schedule_table(num_microbatches, vpp, group))
    total = num_microbatches * vpp
    kinds, stages, microbatches = [], [], []
    for rank in range(pp):
        warmup = min((vpp - 1) * group + pp - 1 - rank, total)
        row = with_weights(one_forward_one_backward(total, warmup, Kind.I), rank)
        microbatch, chunk = table[count_within_kind(row)].T
        kinds.append(row)
        stages.append(np.where(row == Kind.F, chunk, vpp - 1 - chunk) * pp + rank)
        microbatches.append(microbatch)
    return assemble(
        "InterleavedZeroBubble", Placement.loop(pp, pp * vpp, num_microbatches), kinds, stages, microbatches
    )


def uneven_rounds(pp: int, num_microbatches: int) -> str | None:
    """Why the microbatches do not form rounds of equal size, with the nearest numbers that do; None when they do."""
    num_rounds = max(1, num_microbatches // pp)
    if num_microbatches % num_rounds == 0:
        return None
    legal = [m for m in range(1, 2 * num_microbatches + pp) if m % max(1, m // pp) == 0]
    below, above = max(m for m in legal if m < num_microbatches), min(m for m in legal if m > num_microbatches)
    return (
        f"schedule InterleavedZeroBubble runs rounds of equal size: {num_microbatches} microbatches over pp={pp} are "
        f"{num_rounds} rounds, "
        f"which do not divide them. Use {below} or {above} microbatches."
    )
