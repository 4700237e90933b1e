"""What each action computes and sends on one rank: the one description that the simulator prices and the backend is held to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Product:
    """`count` matrix products [m, k] x [k, n] of one layer."""

    layer: str
    m: int
    n: int
    k: int
    count: int = 1

    @property
    def flops(self) -> int:
        """Multiply-adds counted as two."""
        return 2 * self.m * self.n * self.k * self.count


@dataclass(frozen=True)
class Collective:
    """One collective call of one rank: `sent_bytes` leave this rank for the others of its group over `axis`."""

    layer: str
    op: Literal["all_to_all", "all_gather", "all_reduce", "reduce_scatter"]
    axis: str
    group_size: int
    sent_bytes: int


@dataclass(frozen=True)
class Message:
    """One point-to-point message between neighbouring stages."""

    layer: str
    num_bytes: int


Operation = Product | Collective | Message
