"""`MeasuredPeak`: what a rank held at most. Whoever only reads results needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MeasuredPeak:
    """The most bytes of tensor storages that a rank held at once, and the action of its compute lane then."""

    global_rank: int
    num_bytes: int
    action: str
