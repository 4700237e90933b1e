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


Act = Literal["write", "read", "signal", "wait"]
"""write: what peers will read. read: what peers wrote. signal, wait: an access to a signal, with its order."""


@dataclass(frozen=True)
class Step:
    """One step of a protocol. Data is written and read without an order of its own."""

    act: Act
    order: Order = "relaxed"


COLLECTIVE = (
    Step("write"),
    Step("signal", ENTRY.signal),
    Step("wait", ENTRY.wait),
    Step("read"),
    Step("signal", EXIT.signal),
    Step("wait", EXIT.wait),
)
"""A collective with signal pads, also where its own kernel writes what peers read: `backend/kernels`."""

TWO_PHASES = (*COLLECTIVE[:4], Step("write"), *COLLECTIVE[1:])
"""A collective whose ranks read what peers have made of the first phase: another entry, between the two."""

CHUNK_SENDER = (Step("wait", "acquire"), Step("write"), Step("signal", "release"))
"""Of a chunk in the C code: until a slot is free, its bytes, and how many chunks there are."""

CHUNK_RECEIVER = (Step("wait", "acquire"), Step("read"), Step("signal", "release"))
"""Until the chunk is there, its bytes, and how many were taken."""
