"""`SymmetricMemory`: what a kernel needs of memory that all ranks of a group map, wherever it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class SymmetricMemory:
    """One rank's view. `own` is its buffer as bytes, `own_pad` its signal pad as int32; `tables` [2, world size] has
    where each rank's buffer and signal pad begin, all multiples of 16, in memory that kernels read.

    `multicast` is the address that reaches all buffers at once, 0 where the hardware has none.
    """

    rank: int
    world_size: int
    own: Tensor
    own_pad: Tensor
    tables: Tensor
    multicast: int = 0

    @classmethod
    def of(cls, rank: int, whole: Tensor, begins: Sequence[int], pad_bytes: int, multicast: int = 0) -> Self:
        """From `whole`, this rank's bytes with the pad at their begin, where those of all ranks begin, and the address
        that reaches all of them."""
        addresses = [[begin + pad_bytes for begin in begins], list(begins)]
        return cls(
            rank=rank,
            world_size=len(begins),
            own=whole[pad_bytes:],
            own_pad=whole[:pad_bytes].view(torch.int32),
            tables=torch.tensor(addresses, dtype=torch.int64, device=whole.device),
            multicast=multicast and multicast + pad_bytes,
        )

    @property
    def table(self) -> int:
        """The address of where the buffers begin."""
        return self.tables[0].data_ptr()

    @property
    def pads(self) -> int:
        """The address of where the signal pads begin."""
        return self.tables[1].data_ptr()

    @property
    def pad_bytes(self) -> int:
        """Of one pad."""
        return self.own_pad.nbytes

    def most_blocks(self) -> int:
        """How many blocks can meet at pads of this size."""
        return self.pad_bytes // (4 * self.world_size)
