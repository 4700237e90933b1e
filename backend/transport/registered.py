"""`RegisteredRooms`: memory that NCCL's communicators know before they are called, so that peers and switches read and
write it where it lies (NCCL's user guide, "User Buffer Registration").

A communicator whose calls come again and again has two rooms, one for what it sends and one for what it receives, in
one pool of NCCL's own allocator. What NCCL and torch ask for decides how:

- Source and destination are both registered, and on all members or on none: members agree on it, once, through a store.
- Offsets in the memory are the same on all members: rooms have sizes that members agree on too.
- A segment that a pool takes later is registered when it is taken, which for windows is a call of all members at a time
  that nobody chose. So a pool has everything before it is registered, and takes no more after that.
- Registering windows is a call of all members: ranks register the communicators in the order in which they opened them.
- A pool is deregistered from all communicators before the first of them ends, and let go of after that.

The pool is no memory of torch's other tensors, and no other tensor ever has its memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.base.errors import named


@dataclass
class Rooms:
    """Of one communicator: bytes that its calls need at most, and, once they are registered, the memory."""

    sent_bytes: int = 0
    received_bytes: int = 0
    sent: Tensor | None = None
    received: Tensor | None = None

    def want(self, sent_bytes: int, received_bytes: int) -> None:
        """A call of so many bytes will come."""
        self.sent_bytes = max(self.sent_bytes, sent_bytes)
        self.received_bytes = max(self.received_bytes, received_bytes)

    def to_send(self, num_bytes: int) -> Tensor | None:
        """Memory for what is sent, as bytes; None where there is too little of it."""
        return None if self.sent is None or num_bytes > len(self.sent) else self.sent[:num_bytes]

    def to_receive(self, num_bytes: int, given: Tensor) -> Tensor | None:
        """Memory for what comes back of a call that is given memory of `to_send`; None for any other call."""
        if self.sent is None or self.received is None or num_bytes > len(self.received):
            return None
        is_room = given.untyped_storage().data_ptr() == self.sent.untyped_storage().data_ptr()
        return self.received[:num_bytes] if is_room else None


@dataclass
class RegisteredRooms:
    """The rooms of a rank's communicators, by the name of the group. `reasons` says which have none though the plan
    wants them, and why."""

    device: torch.device
    symmetric: bool
    by_name: dict[str, Rooms] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    _registered: list[tuple[Any, Any]] = field(default_factory=list)

    def of(self, name: str) -> Rooms:
        """The rooms of a group, which has none yet."""
        return self.by_name.setdefault(name, Rooms())

    def open(self, process_groups: Mapping[str, Any], members: Mapping[str, Sequence[int]], store: dist.Store) -> None:
        """Makes and registers what was asked for, in the order of `process_groups`. All members of each call it, when
        no more is asked for. Raises `RuntimeError` where there is not the memory."""
        wanted = {
            name: group
            for name, group in process_groups.items()
            if (rooms := self.by_name.get(name)) is not None and rooms.sent_bytes and rooms.sent is None
        }
        store = dist.PrefixStore("registered", store)
        for name, group in wanted.items():
            store.set(f"{name}/{group.rank()}", json.dumps(self._said(name, group)))
        agreed = [name for name in wanted if self._agreed(name, members[name], store)]
        if not agreed:
            return
        pool = torch.cuda.MemPool(wanted[agreed[0]].mem_allocator)
        with torch.cuda.use_mem_pool(pool, device=self.device):
            for name in agreed:
                rooms = self.by_name[name]
                rooms.sent, rooms.received = (
                    torch.empty(size, dtype=torch.uint8, device=self.device)
                    for size in (rooms.sent_bytes, rooms.received_bytes)
                )
        for name in agreed:
            wanted[name].register_mem_pool(pool, self.symmetric)
            self._registered.append((wanted[name], pool))

    def close(self) -> None:
        """Ends every registration, and then lets go of the memory; before the communicators end. Calling it again does
        nothing."""
        if self._registered:
            torch.cuda.synchronize(self.device)  # no call may go on
        for rooms in self.by_name.values():
            rooms.sent = rooms.received = None
        while self._registered:
            process_group, pool = self._registered.pop()
            process_group.deregister_mem_pool(pool)

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each reason."""
        names: dict[str, list[str]] = {}
        for name, why in self.reasons.items():
            names.setdefault(why, []).append(name)
        return tuple(f"buffers of {named(found)} are not registered: {why}." for why, found in names.items())

    def _said(self, name: str, process_group: Any) -> dict[str, Any]:
        """Why this rank cannot, and the sizes that must be those of all members: with windows, which are of whole
        segments, of all that lies in the pool."""
        rooms = list(self.by_name.values()) if self.symmetric else [self.by_name[name]]
        sizes = [size for each in rooms for size in (each.sent_bytes, each.received_bytes)]
        return {"why": why_not_by(process_group, self.device), "sizes": sizes}

    def _agreed(self, name: str, ranks: Sequence[int], store: dist.Store) -> bool:
        """Whether all members of a group can, with rooms of one size."""
        said = [json.loads(store.get(f"{name}/{member}")) for member in range(len(ranks))]
        whys = (f"rank {rank}: {each['why']}" for rank, each in zip(ranks, said, strict=True) if each["why"])
        differ = any(each["sizes"] != said[0]["sizes"] for each in said)
        why = next(whys, "members need rooms of several sizes" if differ else "")
        if why:
            self.reasons[name] = why
        return not why


def why_not_here() -> str:
    """Why this torch registers no buffers, whatever the GPU; empty where it does."""
    if not hasattr(torch.cuda, "MemPool") or not hasattr(torch.cuda, "use_mem_pool"):
        return f"torch {torch.__version__} has no torch.cuda.MemPool"
    if not dist.is_nccl_available() and not hasattr(dist, "ProcessGroupNCCL"):
        return f"torch {torch.__version__} has no NCCL"
    lacks = [name for name in ("register_mem_pool", "deregister_mem_pool") if not hasattr(dist.ProcessGroupNCCL, name)]
    return f"ProcessGroupNCCL of torch {torch.__version__} has no {lacks[0]}" if lacks else ""


def why_not_by(process_group: Any, device: torch.device) -> str:
    """Why a process group registers no memory of a device; empty where it does."""
    if why := why_not_here():
        return why
    if not process_group.supports_tensor_alloc(device):
        return f"{device} has no multicast (NVLink SHARP), or its NCCL is older than 2.19"
    return ""


def registrations(groups: Iterable[Any]) -> dict[str, Any]:
    """The process groups of groups whose communicators are ours and join several ranks, by name."""
    return {group.name: group.process_group for group in groups if group.size > 1 and not group.is_brought}
