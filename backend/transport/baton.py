"""`Baton` and `PairedGroup`: two threads of a rank that compute in turns, each while the other waits for a collective.

Forward and backward of an OVERLAP_F_B pair run in threads of their own, and a `Baton` says which of them computes.
Whoever comes to a collective (tokens on their way to experts and back, tensor- or context-parallel sums) gives the
baton up, and asks for it when the data is there. Nothing waits for another rank with the baton in hand, and
forwards and backwards have communicators of their own (`PairedGroup`): so calls come in one order on every
communicator whoever computes when, and no rank's forward waits for another rank's backward. Bits do not depend on
the turns, because the parts share no sum.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from ...core.schedule.action import Action, Kind
from .base import Group, ReduceOp, Shape

_BACKWARDS = (Kind.B, Kind.I, Kind.W)


class _Own(threading.local):
    """Whether the current thread has the baton."""

    holds: bool = False


@dataclass(frozen=True)
class Wait:
    """A collective over `axis` that one part of a pair waited for, in seconds of `time.perf_counter`."""

    part: Action
    axis: str
    start_s: float
    end_s: float


class Baton:
    """Lets one thread compute at a time, in the order in which they ask. After `fail` whoever asks gets the failure.

    `waits` are the collectives for which it was lent, `idle_s` the seconds in which nobody had it between two who did:
    what of the collectives nothing has hidden.
    """

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self.idle_s = 0.0
        # When the last holder gave it back, None while somebody holds it.
        self._free_since_s: float | None = None
        # Guards everything below; the queue has whoever asks, in order, the first of them being next.
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._is_held = False
        self._failure: BaseException | None = None
        # Per thread whether it has the baton.
        self._own = _Own()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, the calling thread computes."""
        self._take()
        try:
            yield
        finally:
            if self._own.holds:
                self._give()

    @contextmanager
    def lent(self, part: Action | None = None, axis: str = "") -> Iterator[None]:
        """Inside, the calling thread waits, of a `part` for a collective over `axis` if they are given, and another one
        may compute. Does nothing in a thread that has no baton."""
        if not self._own.holds:
            yield
            return
        self._give()
        start_s = perf_counter()
        yield  # what is raised here ends the part, which needs no baton for that
        if part is not None:
            self.waits.append(Wait(part, axis, start_s, perf_counter()))
        self._take()

    def begin(self) -> None:
        """A pair begins: until somebody has the baton nobody is idle."""
        self._free_since_s = None

    def fail(self, error: BaseException) -> None:
        """One part has failed; the first failure counts."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _take(self) -> None:
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            self._changed.wait_for(
                lambda: self._failure is not None or (not self._is_held and self._queue[0] is ticket)
            )
            if self._failure is not None:
                raise self._failure
            self._queue.popleft()
            self._is_held = self._own.holds = True
            if self._free_since_s is not None:
                self.idle_s += perf_counter() - self._free_since_s

    def _give(self) -> None:
        with self._changed:
            self._is_held = self._own.holds = False
            self._free_since_s = perf_counter()
            self._changed.notify_all()


class PairedGroup(Group):
    """A group of two communicators over the same ranks, one for forwards and one for backwards: which is meant
    follows from the action that the recorder knows for the calling thread. A call of one part of a pair lends
    the baton to the other."""

    def __init__(self, forward: Group, backward: Group, baton: Baton):
        super().__init__(forward.name, forward.axis, forward.ranks, forward.ranks[forward.rank], forward.recorder)
        self._forward, self._backward, self._baton = forward, backward, baton

    @property
    def _meant(self) -> Group:
        action, _ = self.recorder.scope
        return self._backward if action is not None and action.kind in _BACKWARDS else self._forward

    @contextmanager
    def _line(self) -> Iterator[Group]:
        action, _ = self.recorder.scope
        with self._baton.lent(action, self.axis):
            yield self._meant

    def waiting(self) -> AbstractContextManager[None]:
        return self._baton.lent()

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        with self._line() as group:
            return group.all_to_all(parts, shapes)

    def tree_sum(self, parts: Sequence[Tensor], rows: Sequence[int], merges: Sequence[int]) -> Tensor:
        with self._line() as group:
            return group.tree_sum(parts, rows, merges)

    def tree_all_reduce(self, values: Tensor, rows: Sequence[int], merges: Sequence[int], dtype: torch.dtype) -> Tensor:
        with self._line() as group:
            return group.tree_all_reduce(values, rows, merges, dtype)

    def all_gather(self, tensor: Tensor, shapes: Sequence[Shape] | None = None) -> list[Tensor]:
        with self._line() as group:
            return group.all_gather(tensor, shapes)

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, wide: bool = False, used_up: bool = False) -> Tensor:
        with self._line() as group:
            return group.all_reduce(tensor, op, wide=wide, used_up=used_up)

    def reduce_scatter(self, parts: Sequence[Tensor], *, wide: bool = False) -> Tensor:
        with self._line() as group:
            return group.reduce_scatter(parts, wide=wide)

    def want_room(self, sent_bytes: int, received_bytes: int) -> None:
        for group in (self._forward, self._backward):
            group.want_room(sent_bytes, received_bytes)

    def room(self, like: Tensor, *shape: int) -> Tensor:
        return self._meant.room(like, *shape)  # which waits for nobody

    def barrier(self) -> None:
        with self._line() as group:
            group.barrier()

    def _all_to_all(self, parts: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        raise AssertionError("its communicators make the calls")

    def _all_gather(self, tensor: Tensor, shapes: list[Shape]) -> list[Tensor]:
        raise AssertionError("its communicators make the calls")

    def _all_reduce(self, tensor: Tensor, op: ReduceOp, used_up: bool) -> Tensor:
        raise AssertionError("its communicators make the calls")

    def _reduce_scatter(self, parts: list[Tensor]) -> Tensor:
        raise AssertionError("its communicators make the calls")

    def _barrier(self) -> None:
        raise AssertionError("its communicators make the calls")

    def _end(self) -> None:
        """Its communicators end with the transport that opened them."""
