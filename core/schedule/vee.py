"""ZBV: two stages per rank, down the ranks and back (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 6)."""

from __future__ import annotations

import numpy as np

from .action import Kind
from .placement import Placement
from .rows import assemble, count_within_kind
from .schedule import Schedule

F0, F1, I0, I1, W0, W1 = (2 * kind + chunk for kind in (Kind.F, Kind.I, Kind.W) for chunk in (0, 1))
"""Codes of what a rank of a vee does: chunk 0 is its stage on the way down, chunk 1 the one on the way back."""


def zbv(pp: int, num_microbatches: int, vpp: int = 2) -> Schedule:
    """Zero bubble with the memory of 1F1B: loss and first stage share rank 0, so gradients come back as
    soon as forwards run out.

    No bubble between a rank's own first and last action (`Timeline.idle_inside_s`) for F=I=W and m >= 2p-1, and
    2(p-1)(I-W), in times of half a rank's layers, for W <= F <= I; at most 2p activations of half a rank's layers each.
    With fewer microbatches it is the same order without those that are not there.
    """
    num_ordered = max(2 * pp - 1, num_microbatches)
    rows = []
    for rank in range(pp):
        row = _zbv_order(pp, rank, num_ordered)
        rows.append(row if num_ordered == num_microbatches else row[count_within_kind(row) < num_microbatches])
    return vee_schedule("ZBVZeroBubble", num_microbatches, rows)


def _zbv_order(pp: int, rank: int, num_microbatches: int) -> np.ndarray:
    """Codes of one rank: warm-up, steady state in rounds of six, cool-down."""
    left = pp - rank
    warmup = [F0] * (2 * left - 1) + [F1, F0] * rank + [F1, I1, W1] * left
    full, last = num_microbatches - (2 * pp - rank - 1), left - 1
    steady = [F0, I0, W0, F1, I1, W1] * full + [I0, W0, F1, I1, W1] * last
    cooldown = [I0, I1] * rank + [I0, W0] * left + [W1] * rank + [W0] * rank
    return np.array(warmup + steady + cooldown, dtype=np.int8)


def vee_schedule(name: str, num_microbatches: int, rows: list[np.ndarray]) -> Schedule:
    """The schedule of one row of codes per rank; the microbatches of every code ascend."""
    pp = len(rows)
    kinds = [(row >> 1).astype(np.int8) for row in rows]
    stages = [np.where(row & 1, 2 * pp - 1 - rank, rank) for rank, row in enumerate(rows)]
    return assemble(name, Placement.vee(pp, num_microbatches), kinds, stages, [count_within_kind(row) for row in rows])
