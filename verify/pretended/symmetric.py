"""Symmetric memory of pretended devices, as torch's: processes of this host map it, each at its own address."""

from __future__ import annotations

import mmap
import os
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.ptx_memory import Region

_FILES: dict[int, int] = {}
"""By the address of an allocation: the file that it maps."""


@dataclass(frozen=True)
class Handle:
    """What is looked at of torch's: where the memory of every rank begins in this process, and a barrier."""

    buffer_ptrs: list[int]
    group: dist.ProcessGroup
    multicast_ptr: int = 0

    def barrier(self, channel: int = 0) -> None:
        """All ranks have come."""
        work = self.group.barrier()
        work.wait()


def empty(*size: Any, dtype: torch.dtype | None, device: Any) -> Tensor:
    """A tensor in memory that other processes may map."""
    file = os.memfd_create("pretended")
    _library().pretended_share(file)
    made = torch.empty(*size, dtype=dtype, device=device)
    _FILES[made.data_ptr()] = file
    return made


def rendezvous(tensor: Tensor, group: dist.ProcessGroup) -> Handle:
    """The memory of all ranks of `group`, each of which gives its own tensor. Raises `RuntimeError` as torch does where
    the device is not shared, for a peer whose process may not be looked into."""
    from .triton_driver import PEERS

    file, own = _FILES[tensor.data_ptr()], tensor.nbytes
    told: list[Any] = [None] * group.size()
    dist.all_gather_object(told, (os.getpid(), file, own), group=group)
    begins = []
    for rank, (process, of_peer, num_bytes) in enumerate(told):
        if rank == group.rank():
            begins.append(tensor.data_ptr())
            continue
        try:
            descriptor = os.open(f"/proc/{process}/fd/{of_peer}", os.O_RDWR)
        except OSError as error:
            raise RuntimeError(f"rank {group.rank()} does not map the memory of rank {rank}: {error}") from error
        mapped = np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)
        os.close(descriptor)
        begin = mapped.__array_interface__["data"][0]
        _MAPPED.append(mapped)
        PEERS.append(Region(f"the memory of rank {rank}", begin, num_bytes))
        begins.append(begin)
    return Handle(begins, group)


_MAPPED: list[Any] = []
"""Memory of peers, for as long as this process lives."""


def _library() -> Any:
    return sys.modules["shardproof_pretended_stubs"].library
