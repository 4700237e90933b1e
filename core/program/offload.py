"""What `offload.optimizer` moves: constants that the backend performs and the simulator prices."""

from __future__ import annotations

PIECE_ELEMENTS = 2**22
"""Of each moment in a piece that comes to the device: 32 MiB of both, long enough for a link between host and device to
reach its rate."""

NUM_PIECES = 3
"""Of them on the device at once: one comes, one is updated, one leaves."""

MOMENT_BYTES = 8
"""Two fp32 moments of an element."""

PIECE_BYTES = PIECE_ELEMENTS * MOMENT_BYTES


def staged_bytes(offloaded_bytes: int) -> int:
    """The most of so many bytes of moments in host memory that an update has on the device."""
    return min(offloaded_bytes, NUM_PIECES * PIECE_BYTES)
