"""`device_memory`: symmetric memory of GPUs, which torch allocates and maps among the ranks of a group.

torch (`torch.distributed._symmetric_memory`) hands descriptors of the driver's memory from process to process, maps
it, and binds it to a multicast address where an NVSwitch has one. Its own signal pads are left alone: the pad of a rank
is the begin of what is allocated here, so that our barriers and torch's never meet.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .view import SymmetricMemory

PAD_BYTES = 1 << 16
"""Of the signal pad of a rank: room for 2,048 blocks of 8 ranks."""


def device_memory(
    store: dist.Store, name: str, rank: int, size: int, device: torch.device, num_bytes: int
) -> SymmetricMemory:
    """`num_bytes` of buffer on this rank's `device`, all zeros, and the addresses of those of all `size` ranks.

    All ranks call it together, with a store that they share, a name used once in this process and equal numbers of
    bytes. Raises `RuntimeError` where the driver does not share memory between the devices. torch refuses several ranks
    on one device unless TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 is set before it is loaded.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    _SymmetricMemory.set_group_info(name, rank, size, store)
    whole = _SymmetricMemory.empty_strided_p2p((PAD_BYTES + num_bytes,), (1,), torch.uint8, device, name)
    whole.zero_()
    handle = _SymmetricMemory.rendezvous(whole, name)
    handle.barrier(channel=0)  # no rank signals in a pad that its owner still makes zero
    return SymmetricMemory.of(rank, whole, handle.buffer_ptrs, PAD_BYTES, handle.multicast_ptr)
