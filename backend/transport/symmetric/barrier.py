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


Act = Literal["write", "read", "signal", "wait", "ring"]
"""write: what peers will read. read: what peers wrote. signal, wait: an access to a signal, with its order. ring: the
doorbell of whoever may wait for the signal."""


@dataclass(frozen=True)
class Step:
    """One step of a protocol. Data is written and read without an order of its own.

    `of` is the C code's name of a signal that counts chunks, empty for pads. A wait for chunk n is until n - `ahead` of
    them were counted.
    """

    act: Act
    order: Order = "relaxed"
    of: str = ""
    ahead: int = 0


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

BROADCAST = TWO_PHASES[:-2]
"""A collective whose ranks put into all buffers what they have made of the first phase, by multicast. What a rank reads
at the end lies in its own buffer, where nobody writes before it comes to the entry of another kernel."""

PLAIN_BROADCAST = (*COLLECTIVE[:3], *BROADCAST[4:])
"""The same without reads of what peers have written before."""

COLLECTIVES = {
    "all_gather": COLLECTIVE,
    "reduce_scatter": COLLECTIVE,
    "all_reduce_one_shot": COLLECTIVE,
    "all_reduce_two_shot": TWO_PHASES,
    "gather_rows": COLLECTIVE,
    "reduce_scatter_rows": COLLECTIVE,
    "add_norm_gather": TWO_PHASES,
    "all_gather_multicast": PLAIN_BROADCAST,
    "all_reduce_multicast": BROADCAST,
    "reduce_scatter_multicast": COLLECTIVE,
    "exact_all_reduce_multicast": BROADCAST,
    "add_norm_gather_multicast": BROADCAST,
}
"""Of each kernel. Its first write is before the kernel begins, by an earlier one or a copy: the end of a kernel orders
it, as all memory of a device. Every other write is in the kernel itself, and its barriers alone order it."""

NUM_SLOTS = 2
"""Chunks for one peer, or of the board, that lie in memory at once in the C code."""

CHUNK_SENDER = (
    Step("wait", "acquire", "TAKEN", NUM_SLOTS),
    Step("write"),
    Step("signal", "release", "FILLED"),
    Step("ring"),
)
"""Of a chunk in the C code: until a slot is free, its bytes, and how many chunks there are."""

CHUNK_RECEIVER = (Step("wait", "acquire", "FILLED"), Step("read"), Step("signal", "release", "TAKEN"), Step("ring"))
"""Until the chunk is there, its bytes, and how many were taken."""

BOARD_SENDER = (
    Step("wait", "acquire", "SEEN", NUM_SLOTS),
    Step("write"),
    Step("signal", "release", "SHOWN"),
    Step("ring"),
)
"""Of a chunk for all peers: it waits for each of them, and signals once."""

BOARD_RECEIVER = (Step("wait", "acquire", "SHOWN"), Step("read"), Step("signal", "release", "SEEN"), Step("ring"))
"""Of each peer."""

BellAct = Literal["add", "subtract", "look", "wake", "sleep"]
"""add, subtract: 1, atomically. look: go on only if it is not 0. wake: all who sleep. sleep: if it is what it was."""


@dataclass(frozen=True)
class BellStep:
    """A step at a doorbell, which has a value and a number of sleepers."""

    act: BellAct
    of: Literal["value", "sleepers"]
    order: Literal["relaxed", "acquire", "release", "seq_cst"] = "seq_cst"


RING = (BellStep("add", "value"), BellStep("look", "sleepers"), BellStep("wake", "value"))
"""After a signal: whoever sleeps is woken. All accesses have one order (seq_cst), so that either the ringer sees that
somebody will sleep, or that one sees the new value."""

SLEEP = (BellStep("add", "sleepers"), BellStep("sleep", "value"), BellStep("subtract", "sleepers"))
"""After a look at the value and then at the signals awaited, in vain. The kernel of Linux compares the value again
before it lets anybody sleep, after a full barrier."""
