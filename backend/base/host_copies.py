"""`HostCopies`: copies between a rank's device and the memory of its host, which go on while the device computes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .streams import Moment, now, wait_for

Copy = tuple[Tensor, Tensor]
"""What is written, and what it is copied from."""


class HostCopies:
    """A stream of a GPU for each direction, and buffers of the host that microbatches and steps use again. On a CPU
    what is given is done at once: the host's memory is then other memory of the same kind.

    Both directions begin after what the current stream was given, and give it a moment to come after. So a buffer needs
    no event of its own: whoever gives one back has let the current stream come after its copies.

    `sent_bytes` and `brought_bytes` count what has gone each way.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.sent_bytes = self.brought_bytes = 0
        self._out, self._back = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))
        # By bytes the buffers that nobody holds, and the storages of all memory of the host.
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._storages: set[int] = set()

    def take(self, num_bytes: int) -> Tensor:
        """A buffer of at least so many bytes: a power of two, so that microbatches of other lengths use the same ones
        (torch's own allocator of page-locked memory rounds in the same way)."""
        size = 1 << max(0, num_bytes - 1).bit_length()
        free = self._free[size]
        return free.pop() if free else self.empty(size, torch.uint8)

    def give_back(self, buffer: Tensor) -> None:
        """Others may have a buffer that was taken."""
        self._free[len(buffer)].append(buffer)

    def empty(self, length: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host that copies go to while the device computes, [length]."""
        made = torch.empty(length, dtype=dtype, pin_memory=self.device.type == "cuda")
        self._storages.add(made.untyped_storage()._cdata)
        return made

    def copied(self, tensor: Tensor) -> Tensor:
        """Memory of the host, as `empty` makes it, with what a contiguous tensor has now."""
        return self.empty(tensor.numel(), tensor.dtype).view(tensor.shape).copy_(tensor)

    def owns(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage is memory of the host that was made here."""
        return storage._cdata in self._storages

    def send(self, copies: Iterable[Copy]) -> Moment:
        """Begins to copy tensors of the device, which the current stream makes, to those of the host; the moment at
        which they are there. Until the current stream comes after it, somebody has to hold them."""
        moment, num_bytes = self._begin(self._out, copies)
        self.sent_bytes += num_bytes
        return moment

    def bring(self, copies: Iterable[Copy]) -> Moment:
        """Begins to copy tensors of the host, which the current stream knows to be there, to those of the device, which
        it has allocated; the moment from which it may read them."""
        moment, num_bytes = self._begin(self._back, copies)
        self.brought_bytes += num_bytes
        return moment

    @torch.no_grad()
    def _begin(self, stream: torch.cuda.Stream | None, copies: Iterable[Copy]) -> tuple[Moment, int]:
        given, num_bytes = now(self.device), 0
        with _current(stream):
            wait_for(given, self.device)
            for target, source in copies:
                target.copy_(source, non_blocking=True)
                num_bytes += target.nbytes
            return now(self.device), num_bytes


def _current(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
