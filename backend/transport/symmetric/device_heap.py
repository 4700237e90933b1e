"""`device_memory`: symmetric memory of GPUs, which torch allocates and maps among the ranks of a group.

torch (`torch.distributed._symmetric_memory`) hands descriptors of the driver's memory from process to process, maps
it, and binds it to a multicast address where an NVSwitch has one. Its own signal pads are left alone: the pad of a rank
is the begin of what is allocated here, so that our barriers and torch's never meet.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .view import SymmetricMemory

PAD_BYTES = 1 << 16
"""Of the signal pad of a rank: room for 2,048 blocks of 8 ranks."""


def device_memory(group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> SymmetricMemory:
    """`num_bytes` of buffer on this rank's `device`, all zeros, and the addresses of those of all ranks of `group`.

    All of them call it together with equal numbers of bytes. `group` is one that torch knows by its name, as those of
    `torch.distributed` are. Raises `RuntimeError` where the driver does not share memory between the devices. torch
    refuses several ranks on one device unless TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 is set before it is loaded.
    """
    from torch.distributed import _symmetric_memory as symmetric

    whole = symmetric.empty(PAD_BYTES + num_bytes, dtype=torch.uint8, device=device)
    return _met(group.rank(), whole, symmetric.rendezvous(whole, group=group))


def group_memory(
    name: str, rank: int, size: int, store: dist.Store, device: torch.device, num_bytes: int
) -> SymmetricMemory:
    """The same for ranks that torch knows no group of: `name` is one that no group of this process has, and they find
    each other through `store`."""
    from torch.distributed import _symmetric_memory as symmetric

    symmetric._SymmetricMemory.set_group_info(name, rank, size, store)
    whole = symmetric.empty(PAD_BYTES + num_bytes, dtype=torch.uint8, device=device)
    group: Any = name  # a type of its own in some versions
    return _met(rank, whole, symmetric.rendezvous(whole, group=group))


def _met(rank: int, whole: torch.Tensor, handle: Any) -> SymmetricMemory:
    """The view of memory that all ranks have mapped, all zeros."""
    whole.zero_()
    torch.cuda.current_stream(whole.device).synchronize()
    handle.barrier(channel=0)  # no rank signals in a pad that its owner still makes zero
    return SymmetricMemory.of(rank, whole, handle.buffer_ptrs, PAD_BYTES, handle.multicast_ptr)


def memory_on_one_device(size: int, device: torch.device, num_bytes: int) -> list[SymmetricMemory]:
    """The same of `size` ranks in one process that share a device, each a stream of it, by rank."""
    wholes = [torch.zeros(PAD_BYTES + num_bytes, dtype=torch.uint8, device=device) for _ in range(size)]
    begins = [whole.data_ptr() for whole in wholes]
    return [SymmetricMemory.of(rank, whole, begins, PAD_BYTES) for rank, whole in enumerate(wholes)]
