"""`asked`: what all ranks must know of each other after every step: whether one was asked to stop, and how their parts
of a checkpoint are getting on.

A host that read it by itself would wait for its device once more in every step. So it is a number that the device
makes, and the host reads it with the loss (`TrainingRank.asks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..base.streams import to_device
from ..transport.base import Group

UNDER_WAY, DONE, LATE = 0, 1, 2
"""How a rank's part of a checkpoint is getting on; also of one that has none on its way."""


@dataclass(frozen=True)
class Answer:
    """`signal` is the largest that a rank was sent, 0 for none; `all_done` says whether every rank has done its part of
    what is on its way, `any_late` whether one takes longer than it may."""

    signal: int
    all_done: bool
    any_late: bool

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Answer:
        """What the numbers that `asked` makes say."""
        signal, unfinished, late = map(int, numbers)
        return cls(signal, not unfinished, bool(late))


def asked(world: Group, device: torch.device, signal: int, state: int) -> Tensor:
    """The answer of all ranks of `world`, which call this together, fp64 [3] on the device; nobody waits for it."""
    own = torch.tensor([signal, state != DONE, state == LATE], dtype=torch.float64)
    return world.all_reduce(to_device(own, device), "max")
