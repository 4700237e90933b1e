"""What a forward keeps for its backward, in bytes, measured; and what the executor asks of any meter of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from ...core.schedule.action import Action
from ...core.schedule.timeline import MemorySample


class MemoryMeter(Protocol):
    """What the executor reports to a meter. `ActivationMeter` costs nothing and sees what lasts,
    `backend.ranks.live_memory.LiveMeter` sees all."""

    samples: list[MemorySample]

    def watch(self) -> AbstractContextManager[object]:
        """Every thread of the rank works inside."""

    def during(self, action: Action, *, compute: bool) -> AbstractContextManager[None]:
        """The calling thread, or the rank's compute lane, works on `action` inside."""

    def forward(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        """A forward runs inside."""

    def release(self, stage: int, microbatch: int) -> None:
        """The backward of this forward is complete."""

    def sample(self, time_s: float) -> None:
        """Notes what is held from `time_s` on."""


class ActivationMeter:
    """Counts the storages that autograd saves, each once per forward, and samples the total over time.

    Every sample adds `base_bytes` (weights, optimizer state) and what `lasting_bytes()` says then (gradients, gathered
    weights). Storages of `resident` tensors, the weights, are not counted as activations.
    """

    def __init__(self, global_rank: int, resident: Iterable[Tensor], base_bytes: int, lasting_bytes: Callable[[], int]):
        self.samples: list[MemorySample] = []
        self._global_rank = global_rank
        self._resident = {tensor.untyped_storage().data_ptr() for tensor in resident}
        self._base_bytes = base_bytes
        self._lasting_bytes = lasting_bytes
        self._held: dict[tuple[int, int], int] = {}

    def watch(self) -> AbstractContextManager[object]:
        """Nothing to do: autograd reports what it saves."""
        return nullcontext()

    def during(self, action: Action, *, compute: bool) -> AbstractContextManager[None]:
        """Nothing to do: what lasts does not depend on the action."""
        return nullcontext()

    @contextmanager
    def forward(self, stage: int, microbatch: int) -> Iterator[None]:
        """Counts what is saved inside as held by this forward."""
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._resident:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # not the tensor itself: its grad_fn would keep itself alive

        def unpack(saved: Any) -> Any:
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        self._held[stage, microbatch] = sum(storages.values())

    def release(self, stage: int, microbatch: int) -> None:
        """The backward of this forward is complete."""
        self._held.pop((stage, microbatch), None)

    def sample(self, time_s: float) -> None:
        """Notes what is held from `time_s` on."""
        num_bytes = self._base_bytes + self._lasting_bytes() + sum(self._held.values())
        self.samples.append(MemorySample(self._global_rank, time_s, num_bytes))
