"""ZB-H1 and ZB-H2 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2).

The backward is split: I, the input gradient, goes up the pipeline at once; W, the weight gradient, waits until there is
time for it. Bubbles are those of `Timeline.idle_inside_s`: of each rank between its own first and last compute action,
because the paper lets every rank step as soon as it is done and validates the step afterwards (section 4). All ranks
starting and ending together (gradient clipping that waits for a global norm) adds up to (p-1)F.
"""

from __future__ import annotations

import numpy as np

from .action import Kind
from .placement import Placement
from .rows import assemble, count_within_kind, one_forward_one_backward, with_weights
from .schedule import Schedule


def zb_h1(pp: int, num_microbatches: int) -> Schedule:
    """1F1B with W put off by one microbatch per rank: the memory of 1F1B, a third of its bubble for F=I=W.

    Bubble (p-1)(F+I-W); at most p activations per rank from F to W. For m >= p and W <= F.
    """
    return staggered("ZBH1", num_microbatches, [pp - 1 - rank for rank in range(pp)], limit=pp)


def zb_h2(pp: int, num_microbatches: int) -> Schedule:
    """Twice the warm-up forwards and W put off twice as long: no bubble for F=I=W, nearly twice the memory.

    Bubble (p-1)(F+I-2W); at most 2p-1 activations per rank from F to W. For m >= 2p-1, W <= F and 2W <= F+I.
    """
    return staggered("ZBH2", num_microbatches, [2 * (pp - 1 - rank) for rank in range(pp)], limit=2 * pp - 1)


def staggered(name: str, num_microbatches: int, warmups: list[int], *, limit: int) -> Schedule:
    """Per rank `warmups` forwards, then F and I in turn, with a W after each once `limit` activations are held."""
    kinds = []
    for warmup in warmups:
        row = one_forward_one_backward(num_microbatches, min(warmup, num_microbatches), Kind.I)
        kinds.append(with_weights(row, limit - 1 - warmup))
    pp = len(warmups)
    microbatches = [count_within_kind(row) for row in kinds]
    stages = [np.full(3 * num_microbatches, rank) for rank in range(pp)]
    return assemble(name, Placement.loop(pp, pp, num_microbatches), kinds, stages, microbatches)
