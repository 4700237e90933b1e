"""`meet`: all peers wait for each other inside a kernel, at signal pads in memory that all of them map.

The pad of a rank holds one int32 for each block and peer, `pad[block * world + peer]`, 0 between meetings: peer's
signal makes it 1, and the rank that takes the signal makes it 0 again. So a captured graph may replay a kernel that
meets, and every block that meets must run at the same time as the same block of every peer (`grid`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..transport.symmetric.barrier import ENTRY, EXIT, SCOPE
from .peers import buffer_of

ENTRY_SIGNAL = tl.constexpr(ENTRY.signal)
ENTRY_WAIT = tl.constexpr(ENTRY.wait)
EXIT_SIGNAL = tl.constexpr(EXIT.signal)
EXIT_WAIT = tl.constexpr(EXIT.wait)
SYSTEM = tl.constexpr(SCOPE)


@triton.jit
def meet_at_entry(pads, rank, WORLD: tl.constexpr):
    """Afterwards this block may read what its peers had written before they came."""
    meet(pads, rank, WORLD, ENTRY_SIGNAL, ENTRY_WAIT)


@triton.jit
def meet_at_exit(pads, rank, WORLD: tl.constexpr):
    """Afterwards this rank may write again what the same block of its peers has read."""
    meet(pads, rank, WORLD, EXIT_SIGNAL, EXIT_WAIT)


@triton.jit
def meet(pads, rank, WORLD: tl.constexpr, SIGNAL: tl.constexpr, WAIT: tl.constexpr):
    """Puts a signal into every peer's pad, then takes every peer's out of the own one.

    One thread of the block does it: the block's barriers on both sides hand the order to the others.
    """
    first = tl.program_id(0) * WORLD
    tl.debug_barrier()
    for peer in tl.static_range(WORLD):
        theirs = buffer_of(pads, peer, tl.int32) + first + rank
        while tl.atomic_cas(theirs, 0, 1, sem=SIGNAL, scope=SYSTEM) != 0:
            pass
    own = buffer_of(pads, rank, tl.int32) + first
    for peer in tl.static_range(WORLD):
        while tl.atomic_cas(own + peer, 1, 0, sem=WAIT, scope=SYSTEM) != 1:
            pass
    tl.debug_barrier()
