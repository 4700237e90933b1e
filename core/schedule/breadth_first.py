"""Looped breadth-first (Lamy-Poirier 2023, "Breadth-First Pipeline Parallelism", section 4)."""

from __future__ import annotations

import numpy as np

from .action import Kind
from .placement import Placement
from .rows import assemble
from .schedule import Schedule


def looped_bfs(pp: int, num_microbatches: int, vpp: int) -> Schedule:
    """`vpp` chunks per rank, each run for all microbatches before the next one; backwards the
    chunks the other way round.

    Chunk c of rank r is stage c*p+r. The bubble is that of interleaved 1F1B, (p-1)(F+B)/v for m >= p, and all m*v
    activations of a rank are held at once. In exchange a stage's weights are gathered once per direction and its
    gradients are reduced while the next chunk runs. Microbatches ascend in both directions (torch's ScheduleLoopedBFS
    takes them descending in the backward; bubble and memory are the same).
    """
    chunk = np.repeat(np.arange(vpp), num_microbatches)
    kinds = np.repeat(np.array([Kind.F, Kind.B], dtype=np.int8), vpp * num_microbatches)
    chunks = np.concatenate([chunk, vpp - 1 - chunk])
    microbatches = np.tile(np.arange(num_microbatches), 2 * vpp)
    stages = [chunks * pp + rank for rank in range(pp)]
    return assemble(
        "LoopedBFS", Placement.loop(pp, pp * vpp, num_microbatches), [kinds] * pp, stages, [microbatches] * pp
    )
