"""GPipe (Huang et al. 2019): all forwards, then all backwards."""

from __future__ import annotations

import numpy as np

from .action import Kind
from .placement import Placement
from .rows import assemble, count_within_kind
from .schedule import Schedule


def gpipe(pp: int, num_microbatches: int) -> Schedule:
    """Every rank runs F0..F(m-1), then B0..B(m-1). Holds m microbatches in flight; bubble fraction
    (p-1)/(m+p-1) for equal stages."""
    kinds = np.repeat(np.array([Kind.F, Kind.B], dtype=np.int8), num_microbatches)
    microbatches = count_within_kind(kinds)
    stages = [np.full(2 * num_microbatches, rank) for rank in range(pp)]
    return assemble("GPipe", Placement.loop(pp, pp, num_microbatches), [kinds] * pp, stages, [microbatches] * pp)
