"""The two ways to one memory, by a rank's own address and by multicast: what a block must put between them.

To a kernel these are two proxies, and nothing but `fence.proxy.alias` orders what is done by the one and by the other
(PTX ISA, "Proxies"). A thread that has used one may use the other only after its fence; so may a thread behind a
barrier of the block; and what was done by multicast is fenced before a signal tells others of it.
"""

from __future__ import annotations

from typing import Literal

from .protocols import UnreadProtocol

Proxy = Literal["address", "multicast"]


Place = tuple[int, int]
"""A rank's buffer, and where in it."""

Used = set[tuple[Place, Proxy]]


class Proxies:
    """Of one block's threads, by which proxies they have used which places since their last fences."""

    def __init__(self, num_threads: int):
        self._own: list[Used] = [set() for _ in range(num_threads)]
        self._seen: list[Used] = [set() for _ in range(num_threads)]

    def use(self, thread: int, place: Place, proxy: Proxy, text: str) -> None:
        """A thread reaches a place so. Raises `UnreadProtocol` where no fence lies before it."""
        other: Proxy = "address" if proxy == "multicast" else "multicast"
        if (place, other) in self._own[thread] or (place, other) in self._seen[thread]:
            raise UnreadProtocol(f"{text}: no fence.proxy.alias lies between it and a use by the other address.")
        self._own[thread].add((place, proxy))

    def fence(self, thread: int) -> None:
        """A thread's `fence.proxy.alias`."""
        self._own[thread].clear()
        self._seen[thread] = set()

    def meet(self) -> None:
        """All threads are at a barrier of the block: each now has what the others did before it."""
        together = set().union(*self._own, *self._seen)
        self._own = [set() for _ in self._own]
        self._seen = [together] * len(self._seen)

    def signal(self, thread: int, text: str) -> None:
        """A thread tells a peer. Raises `UnreadProtocol` where a use of multicast is not fenced."""
        if any(proxy == "multicast" for _, proxy in self._own[thread] | self._seen[thread]):
            raise UnreadProtocol(f"{text}: no fence.proxy.alias lies between a use of multicast and this signal.")
