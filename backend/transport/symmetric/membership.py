"""How the ranks of a group or channel come to map each other's memory, or agree that they do not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..base import TransportError
from .heap import Mapped, Neighbour, Region, SharedMemoryHeap, compiled, why_not_here

ENDS = (
    "",
    "did not come within {timeout_s:g} s",
    "has ended",
    "has closed its transport",
    "came with another number of bytes",
    "has memory that can no longer be read",
)
"""How a call ends besides well, in the order of the C code's `how`, of the peer that follows."""


@dataclass(frozen=True)
class Membership:
    """One rank's end of what the members map. `mapped` are their regions, in member order, this rank's own among
    them; `neighbours` those that have them, None for this rank. `pulls` is true where each may read all memory of
    the others."""

    handle: object
    ranks: tuple[int, ...]
    rank: int
    timeout_s: float
    regions: tuple[Region, ...]
    mapped: tuple[Mapped, ...]
    neighbours: tuple[Neighbour | None, ...]
    heap: SharedMemoryHeap
    pulls: bool

    def check(self, end: tuple[int, int], what: str) -> None:
        """Raises `TransportError` where a call of the C code did not end well. `what` says who called what."""
        how, peer = end
        if how:
            why = ENDS[how].format(timeout_s=self.timeout_s)
            raise TransportError(f"{what} failed: rank {self.ranks[peer]} {why}.")

    def close(self) -> None:
        """Tells the others that no more calls come."""
        compiled.close(self.handle)


class Meetings:
    """Where ranks agree on memberships: `store` is what all of them have in common."""

    def __init__(self, store: dist.Store, global_rank: int, timeout_s: float):
        self._store, self._global_rank, self._timeout_s = store, global_rank, timeout_s
        self._heap: SharedMemoryHeap | None = None
        self._neighbours: dict[int, Neighbour] = {}

    def join(self, name: str, ranks: Sequence[int], slot_bytes: int, board_bytes: int) -> Membership | str:
        """This rank's end of a group, or why its members do not share memory, which is the same on all of them.

        All members call it together. Raises `TransportError` where one does not come.
        """
        rank, timeout_s = ranks.index(self._global_rank), self._timeout_s
        own = self._allocated(len(ranks), slot_bytes, board_bytes)
        answers = self._exchanged(name, ranks, own[0].to_json() if isinstance(own, tuple) else {"why": own})
        if isinstance(own, str) or _why(ranks, answers):
            return _why(ranks, answers)
        regions = tuple(map(Region.from_json, answers))
        seen = self._mapped(regions, rank, own[1])
        what = {"why": seen} if isinstance(seen, str) else {"why": "", "reads": _reads_all(seen[0], regions)}
        answers = self._exchanged(f"{name}/mapped", ranks, what)
        if isinstance(seen, str) or _why(ranks, answers):
            return _why(ranks, answers)
        neighbours, mapped = seen
        pulls = all(each["reads"] for each in answers)
        bases, alive = tuple(each.address for each in mapped), tuple(each.alive if each else 0 for each in neighbours)
        handle = compiled.join(rank, bases, alive, slot_bytes, board_bytes)
        assert self._heap is not None
        return Membership(handle, tuple(ranks), rank, timeout_s, regions, mapped, neighbours, self._heap, pulls)

    def close(self) -> None:
        """Lets go of this rank's memory and of the others."""
        for neighbour in self._neighbours.values():
            neighbour.close()
        if self._heap is not None:
            self._heap.close()

    def _allocated(self, size: int, slot_bytes: int, board_bytes: int) -> tuple[Region, Mapped] | str:
        """Own memory, or why there is none."""
        if why := why_not_here(size):
            return why
        try:
            self._heap = self._heap or SharedMemoryHeap()
            return self._heap.allocate(compiled.region_size(size, slot_bytes, board_bytes))
        except OSError as error:
            return f"no shared memory: {error}"

    def _mapped(
        self, regions: Sequence[Region], rank: int, own: Mapped
    ) -> tuple[tuple[Neighbour | None, ...], tuple[Mapped, ...]] | str:
        """The others and their memory, or why this rank does not see it."""
        if len({region.host for region in regions}) > 1:
            return "the ranks are on several hosts, or of several users"
        neighbours: list[Neighbour | None] = []
        mapped: list[Mapped] = []
        try:
            for member, region in enumerate(regions):
                if member == rank:
                    neighbours.append(None)
                    mapped.append(own)
                    continue
                if region.process not in self._neighbours:
                    self._neighbours[region.process] = Neighbour(region.process)
                neighbours.append(self._neighbours[region.process])
                mapped.append(self._neighbours[region.process].map(region))
        except OSError as error:
            return f"memory of another rank is not seen: {error}"
        return tuple(neighbours), tuple(mapped)

    def _exchanged(self, name: str, ranks: Sequence[int], own: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What all members say, in their order."""
        keys = [f"symmetric/{name}/{rank}" for rank in ranks]
        try:
            self._store.set(keys[ranks.index(self._global_rank)], json.dumps(own))
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
            return [json.loads(self._store.get(key)) for key in keys]
        except RuntimeError as error:  # DistStoreError is one
            first = str(error).splitlines()[0]
            raise TransportError(f"rank {self._global_rank}, opening {name!r} failed: {first}") from error


def _reads_all(neighbours: Sequence[Neighbour | None], regions: Sequence[Region]) -> bool:
    return all(each is None or each.can_read(region) for each, region in zip(neighbours, regions, strict=True))


def _why(ranks: Sequence[int], answers: Sequence[Mapping[str, Any]]) -> str:
    """The first reason that a member has, with its rank; empty where none has."""
    whys = ((rank, each.get("why")) for rank, each in zip(ranks, answers, strict=True))
    return next((f"rank {rank}: {why}" for rank, why in whys if why), "")
