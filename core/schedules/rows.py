"""From the order of forwards and backwards on each rank to a `Schedule`: what all builders share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..action import ActionArray, Kind
from ..schedule import Placement, Schedule


def one_forward_one_backward(num_forwards: int, num_warmup: int) -> np.ndarray:
    """Kinds of one rank: `num_warmup` forwards, then forward and backward in turn, then the backwards that are left."""
    num_steady = num_forwards - num_warmup
    steady = np.tile(np.array([Kind.F, Kind.B], dtype=np.int8), num_steady)
    return np.concatenate([np.full(num_warmup, Kind.F, np.int8), steady, np.full(num_warmup, Kind.B, np.int8)])


def count_within_kind(kinds: np.ndarray) -> np.ndarray:
    """For each action of a row of F and B, how many of the same kind came before it."""
    forward = kinds == Kind.F
    return np.where(forward, np.cumsum(forward), np.cumsum(~forward)) - 1


def assemble(
    name: str, placement: Placement, kinds: Sequence[np.ndarray], stages: Sequence[np.ndarray], microbatches: Sequence[np.ndarray]
) -> Schedule:
    """A compute-only schedule of F and B from one array of each per rank."""
    offsets = np.cumsum([0, *(len(row) for row in kinds)])
    none = np.full(int(offsets[-1]), -1)
    actions = ActionArray(np.concatenate(stages), np.concatenate(kinds), np.concatenate(microbatches), none, none)
    return Schedule(name, placement, actions, offsets)
