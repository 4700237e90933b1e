"""`SymmetricMemory`: what a kernel needs of memory that all ranks of a group map, wherever it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SymmetricMemory:
    """One rank's view. `own` is its buffer as bytes, `table` and `pads` the addresses of uint64[world_size] with where
    each rank's buffer and signal pad begin, all multiples of 16; `pad_bytes` is the size of one pad.

    `multicast` is the address that reaches all buffers at once, 0 where the hardware has none.
    """

    rank: int
    world_size: int
    own: Tensor
    table: int
    pads: int
    pad_bytes: int
    multicast: int = 0

    def most_blocks(self) -> int:
        """How many blocks can meet at pads of this size."""
        return self.pad_bytes // (4 * self.world_size)
