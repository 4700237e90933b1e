"""What `offload.optimizer` and `offload.masters` move: constants that the backend performs and the simulator prices."""

from __future__ import annotations

from ..plan.optimizer import STATES, Optimizer

PIECE_ELEMENTS = 2**22
"""Of each moment in a piece that comes to the device: 32 MiB of both, long enough for a link between host and device to
reach its rate; and of the fp32 weights that come with them."""

NUM_PIECES = 3
"""Of them on the device at once: one comes, one is updated, one leaves."""

MOMENT_BYTES = 4
"""An fp32 moment of an element."""

MASTER_BYTES = 4
"""An fp32 copy of a weight of 16 bits."""


def piece_bytes(optimizer: Optimizer, *, masters: bool) -> int:
    """Bytes of a whole piece, of the optimizer's moments or with `masters` of fp32 weights too."""
    return PIECE_ELEMENTS * (MOMENT_BYTES * len(STATES[optimizer.name]) + MASTER_BYTES * masters)


def staged_bytes(offloaded_bytes: int, optimizer: Optimizer, *, masters: bool) -> int:
    """The most of so many bytes in host memory that an update has on the device."""
    return min(offloaded_bytes, NUM_PIECES * piece_bytes(optimizer, masters=masters))
