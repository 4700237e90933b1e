"""What may be wrong with registered buffers, as changes of our own code in a rank's process: each a fault that
`registered` must find, with its rank."""

from __future__ import annotations

from typing import Any

from ...backend.transport.base import Group
from ...backend.transport.process_group import ProcessGroup, ProcessGroupTransport
from ...backend.transport.registered import RegisteredRooms, Rooms
from .order_changes import CHANGED_RANK, ORDER_CHANGES, OrderChange

PLAN = "dp2-registered"


def _outside(global_rank: int) -> None:
    """A bucket is put together in everybody's memory."""
    if global_rank == CHANGED_RANK:
        ProcessGroup.room = Group.room  # type: ignore[method-assign]


def _received_outside(global_rank: int) -> None:
    """What comes back has memory that nobody registered."""

    def nowhere(self: Rooms, num_bytes: int, given: Any) -> None:
        return None

    if global_rank == CHANGED_RANK:
        Rooms.to_receive = nowhere  # type: ignore[method-assign]


def _other_order(global_rank: int) -> None:
    """A rank registers its communicators from the last to the first."""
    opens = RegisteredRooms.open

    def backwards(self: Any, process_groups: Any, members: Any, store: Any) -> None:
        opens(self, dict(reversed(process_groups.items())), members, store)

    if global_rank == CHANGED_RANK:
        RegisteredRooms.open = backwards  # type: ignore[method-assign]


def _one_by_one(global_rank: int) -> None:
    """Rooms are made after the pool is registered."""
    import torch

    opens = RegisteredRooms.open

    def grows(self: Any, process_groups: Any, members: Any, store: Any) -> None:
        opens(self, process_groups, members, store)
        for _, pool in self._registered[:1]:
            with torch.cuda.use_mem_pool(pool):
                self.more = torch.empty(64, dtype=torch.uint8, device=self.device)

    if global_rank == CHANGED_RANK:
        RegisteredRooms.open = grows  # type: ignore[method-assign]


def _too_late(global_rank: int) -> None:
    """Communicators end before their memory is deregistered."""
    closes = RegisteredRooms.close

    def late(self: ProcessGroupTransport) -> None:
        for opened in reversed(self.opened):
            opened.release()
        if self._rooms is not None:
            closes(self._rooms)

    if global_rank == CHANGED_RANK:
        ProcessGroupTransport.close = late  # type: ignore[method-assign]


def _too_early(global_rank: int) -> None:
    """A rank deregisters its memory when it has registered it, and goes on to use it."""
    opens = RegisteredRooms.open

    def ends(self: Any, process_groups: Any, members: Any, store: Any) -> None:
        opens(self, process_groups, members, store)
        while self._registered:
            process_group, pool = self._registered.pop()
            process_group.deregister_mem_pool(pool)

    if global_rank == CHANGED_RANK:
        RegisteredRooms.open = ends  # type: ignore[method-assign]


REGISTERED_CHANGES = {
    what: OrderChange(make, rule, rank, named, PLAN)
    for what, make, rule, rank, named in (
        ("a bucket lies outside of the pool", _outside, "registration-differs", None, "communicator"),
        ("results lie outside of the pool", _received_outside, "outside-of-pool", CHANGED_RANK, "communicator"),
        ("a rank registers in another order", _other_order, "registered-in-another-order", None, "communicator"),
        ("a pool grows when it is registered", _one_by_one, "grown-after-registration", CHANGED_RANK, "64 bytes"),
        ("a pool is deregistered too late", _too_late, "deregistered-late", CHANGED_RANK, "communicator"),
        ("a pool is deregistered too early", _too_early, "used-after-deregistration", CHANGED_RANK, "communicator"),
    )
}

CALL_CHANGES = {**ORDER_CHANGES, **REGISTERED_CHANGES}
"""All changes of what NCCL is given."""
