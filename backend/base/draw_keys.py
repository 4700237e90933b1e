"""The keys of random draws: of a step that the host knows, or in the memory of a device, where a captured step finds
those of the step that it is replayed for."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from .streams import to_device

MOST_OPERATIONS = 4096
"""Operations of one rank that draw: each has a key of 8 bytes."""


def draw_key(seed: int, operation: str, step: int) -> int:
    """A signed integer of 64 bits for what an operation draws in a step."""
    text = f"{seed}:{operation}:{step}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


class DrawKeys:
    """In place of the number of a step: a key for every operation that asks, in memory that stays where it is."""

    def __init__(self, device: torch.device):
        self._keys = torch.zeros(MOST_OPERATIONS, dtype=torch.int64, device=device)
        self._places: dict[tuple[int, str], int] = {}

    def of(self, seed: int, operation: str) -> Tensor:
        """Where the key of an operation is, int64 []: that of the step of the last `fill`."""
        place = self._places.setdefault((seed, operation), len(self._places))
        assert place < MOST_OPERATIONS, f"{operation} is the {place}th operation that draws"
        return self._keys[place]

    def __len__(self) -> int:
        return len(self._places)

    def fill(self, step: int) -> None:
        """From here on the current stream finds the keys of `step`."""
        if self._places:
            keys = [draw_key(seed, operation, step) for seed, operation in self._places]
            self._keys[: len(keys)].copy_(to_device(torch.tensor(keys, dtype=torch.int64), self._keys.device))


def key_of(seed: int, operation: str, step: int | DrawKeys) -> int | Tensor:
    """The key of an operation, wherever it is."""
    return step.of(seed, operation) if isinstance(step, DrawKeys) else draw_key(seed, operation, step)
