"""1F1B, also called PipeDream-Flush (Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training")."""

from __future__ import annotations

import numpy as np

from .placement import Placement
from .rows import assemble, count_within_kind, one_forward_one_backward
from .schedule import Schedule


def one_f_one_b(pp: int, num_microbatches: int) -> Schedule:
    """After min(p-1-rank, m) warm-up forwards each rank alternates F and B.

    Holds min(p-rank, m) microbatches in flight; bubble fraction (p-1)/(m+p-1) for equal stages, as GPipe.
    """
    kinds = [one_forward_one_backward(num_microbatches, num_warmup(pp, rank, num_microbatches)) for rank in range(pp)]
    microbatches = [count_within_kind(row) for row in kinds]
    stages = [np.full(2 * num_microbatches, rank) for rank in range(pp)]
    return assemble("1F1B", Placement.loop(pp, pp, num_microbatches), kinds, stages, microbatches)


def num_warmup(pp: int, pp_rank: int, num_microbatches: int) -> int:
    """Forwards a rank runs before its first forward-backward pair."""
    return min(pp - 1 - pp_rank, num_microbatches)
