"""`Copies`: the ranks that hold copies of a stage, and which of them keep parts of one copy together
(ZeRO, hybrid sharding)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..transport.base import Group

Samples = tuple[int, int]
"""An interval `[lo, hi)` of the global batch."""


@dataclass(frozen=True)
class Copies:
    """`whole` joins all copies, in the order of the samples they see. `shard` are consecutive ones of them,
    which keep a part each: all of them, and `replicate` is None, but with hybrid sharding. There `replicate`
    joins those that keep equal parts.

    `gathers` and `backwards` have the members of `shard`: communicators for weights that come together, and for
    gradients that are reduced inside a backward, besides what else the ranks exchange.
    """

    whole: Group
    shard: Group
    replicate: Group | None
    gathers: Group
    backwards: Group

    @property
    def is_first(self) -> bool:
        """Whether this rank keeps a part of the first copy: of equal parts one counts."""
        return self.replicate is None or self.replicate.rank == 0

    def of_shard(self, samples_of: Callable[[int], Samples]) -> Callable[[int], Samples]:
        """What the members of `shard` have seen, from what those of `whole` have."""
        first = self.whole.rank - self.shard.rank
        return lambda member: samples_of(first + member)

    def of_replicate(self, samples_of: Callable[[int], Samples]) -> list[Samples]:
        """What the members of `replicate` have seen, each together with those that it keeps one copy with."""
        firsts = range(0, self.whole.size, self.shard.size)
        return [(samples_of(first)[0], samples_of(first + self.shard.size - 1)[1]) for first in firsts]
