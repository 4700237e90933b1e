"""The barriers of symmetric memory, as a table: what each step orders. Kernels, the C code's tests and the model
checker take their steps from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Order = Literal["relaxed", "acquire", "release"]
"""Memory order of an access, as in the PTX memory model and C11."""

SCOPE = "sys"
"""Peers are other devices, so every access to a signal has the scope of the whole system."""


@dataclass(frozen=True)
class Barrier:
    """A meeting of all peers at their signal pads: each puts a signal into every peer's pad, 0 to 1, and takes every
    peer's out of its own, 1 to 0, so that all pads are 0 afterwards.

    `signal` orders what this rank did before, `wait` what it does next.
    """

    name: str
    signal: Order
    wait: Order


ENTRY = Barrier("entry", signal="release", wait="acquire")
"""Before a peer's memory is read: what the peer wrote is there."""

EXIT = Barrier("exit", signal="release", wait="relaxed")
"""Before own memory is written again: all peers have read it."""
