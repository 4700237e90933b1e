"""Symmetric memory of pretended devices, as torch's: processes of this host map it, each at its own address."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..kernels.ptx_memory import Region

_FILES: dict[int, int] = {}
"""By the address of an allocation: the file that it maps."""


_GROUPS: dict[str, Members] = {}
"""By name, those that torch was given."""


@dataclass(frozen=True)
class Members:
    """One rank's way to the others of a group: a store in which each says what it has."""

    rank: int
    size: int
    store: dist.Store
    turns: Iterator[int] = field(default_factory=itertools.count)

    def said(self, own: Any) -> list[Any]:
        """What all say, by rank."""
        turn = next(self.turns)
        self.store.set(f"pretended/{turn}/{self.rank}", json.dumps(own))
        return [json.loads(self.store.get(f"pretended/{turn}/{rank}")) for rank in range(self.size)]


def know(name: str, rank: int, size: int, store: dist.Store) -> None:
    """Makes a group known, as `_SymmetricMemory.set_group_info` does."""
    _GROUPS[name] = Members(rank, size, store)


@dataclass(frozen=True)
class Handle:
    """What is looked at of torch's: where the memory of every rank begins in this process, and a barrier."""

    buffer_ptrs: list[int]
    members: Members
    multicast_ptr: int = 0

    def barrier(self, channel: int = 0) -> None:
        """All ranks have come."""
        self.members.said(None)


def members_of(group: dist.ProcessGroup | str) -> Members:
    """Of a group that torch knows by its name, or of torch's own."""
    if isinstance(group, str):
        return _GROUPS[group]
    store = dist.distributed_c10d._get_process_group_store(group)
    return Members(group.rank(), group.size(), dist.PrefixStore(f"{group.group_name}/{next(_NUMBERS)}", store))


_NUMBERS = itertools.count()


def empty(*size: Any, dtype: torch.dtype | None, device: Any) -> Tensor:
    """A tensor in memory that other processes may map."""
    file = os.memfd_create("pretended")
    _library().pretended_share(file)
    made = torch.empty(*size, dtype=dtype, device=device)
    _FILES[made.data_ptr()] = file
    return made


def rendezvous(tensor: Tensor, group: dist.ProcessGroup | str) -> Handle:
    """The memory of all ranks of `group`, each of which gives its own tensor. Raises `RuntimeError` as torch does where
    the device is not shared, for a peer whose process may not be looked into."""
    from .triton_driver import PEERS

    members = members_of(group)
    begins = []
    for rank, (process, of_peer, num_bytes) in enumerate(
        members.said((os.getpid(), _FILES[tensor.data_ptr()], tensor.nbytes))
    ):
        if rank == members.rank:
            begins.append(tensor.data_ptr())
            continue
        try:
            descriptor = os.open(f"/proc/{process}/fd/{of_peer}", os.O_RDWR)
        except OSError as error:
            raise RuntimeError(f"rank {members.rank} does not map the memory of rank {rank}: {error}") from error
        mapped = np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)
        os.close(descriptor)
        begin = mapped.__array_interface__["data"][0]
        _MAPPED.append(mapped)
        PEERS.append(Region(f"the memory of rank {rank}", begin, num_bytes))
        begins.append(begin)
    return Handle(begins, members)


_MAPPED: list[Any] = []
"""Memory of peers, for as long as this process lives."""


def _library() -> Any:
    return sys.modules["shardproof_pretended_stubs"].library
