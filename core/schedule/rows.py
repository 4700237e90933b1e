"""From the order of kinds on each rank to a `Schedule`: what all builders share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .action import ActionArray, Kind
from .placement import Placement
from .schedule import Schedule


def one_forward_one_backward(num_forwards: int, num_warmup: int, backward: Kind = Kind.B) -> np.ndarray:
    """Kinds of one rank: `num_warmup` forwards, then forward and backward in turn, then the backwards that are left."""
    num_steady = num_forwards - num_warmup
    steady = np.tile(np.array([Kind.F, backward], dtype=np.int8), num_steady)
    return np.concatenate([np.full(num_warmup, Kind.F, np.int8), steady, np.full(num_warmup, backward, np.int8)])


def with_weights(kinds: np.ndarray, delay: int) -> np.ndarray:
    """A row of F and I with a W after every I but the first `delay`; the W that are left come last.

    The j-th W belongs to the j-th I, so at most `delay + 1` of them wait for their W.

    >>> with_weights(np.array([0, 2, 0, 2, 0, 2]), 1).tolist()
    [0, 2, 0, 2, 3, 0, 2, 3, 3]
    """
    inputs = np.flatnonzero(kinds == Kind.I)
    after = inputs[np.minimum(np.arange(len(inputs)) + delay, len(inputs) - 1)]
    return np.insert(kinds, after + 1, np.int8(Kind.W))


def count_within_kind(kinds: np.ndarray) -> np.ndarray:
    """For each action of a row, how many of the same kind came before it."""
    count = np.empty(len(kinds), dtype=np.int64)
    for kind in np.unique(kinds):
        same = kinds == kind
        count[same] = np.arange(np.count_nonzero(same))
    return count


def assemble(
    name: str,
    placement: Placement,
    kinds: Sequence[np.ndarray],
    stages: Sequence[np.ndarray],
    microbatches: Sequence[np.ndarray],
) -> Schedule:
    """A compute-only schedule of F, B, I and W from one array of each per rank."""
    offsets = np.cumsum([0, *(len(row) for row in kinds)])
    none = np.full(int(offsets[-1]), -1)
    actions = ActionArray(np.concatenate(stages), np.concatenate(kinds), np.concatenate(microbatches), none, none)
    return Schedule(name, placement, actions, offsets)
