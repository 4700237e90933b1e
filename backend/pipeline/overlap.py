"""The two parts of an OVERLAP_F_B pair in turns: each computes while the other waits for a collective (DeepSeek-V3, arXiv 2412.19437,
section 3.2.1; Megatron-Core, `combined_1f1b.py`).

Forward and backward run in threads of their own, and a `Baton` says which of them computes. Whoever comes to a collective (tokens on
their way to experts and back, tensor- or context-parallel sums) gives the baton up, and asks for it when the data is there. Nothing
waits for another rank with the baton in hand, and forwards and backwards have communicators of their own (`PairedGroup`): so calls come
in one order on every communicator whoever computes when, and no rank's forward waits for another rank's backward. Bits do not depend
on the turns, because the parts share no sum.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from time import perf_counter

import torch
from torch import Tensor

from ...core.action import Action, Kind
from ..transport.base import Group, ReduceOp, Shape
from .watch import BACKWARD_LANE

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

    `waits` are the collectives for which it was lent, `idle_s` the seconds in which nobody had it between two who did: what of the
    collectives nothing has hidden.
    """

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self.idle_s = 0.0
        self._free_since_s: float | None = None
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._is_held = False
        self._failure: BaseException | None = None
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
        """Inside, the calling thread waits, of a `part` for a collective over `axis` if they are given, and another one may compute.
        Does nothing in a thread that has no baton."""
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
            self._changed.wait_for(lambda: self._failure is not None or (not self._is_held and self._queue[0] is ticket))
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


class PairRunner:
    """Runs the parts of pairs: one in the calling thread, the other in a thread that lives as long as this object."""

    def __init__(self, global_rank: int, baton: Baton, device: torch.device):
        self.baton = baton
        self._device = device
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        name = f"rank {global_rank} lane {BACKWARD_LANE}"
        threading.Thread(target=_serve, args=(self._queue,), name=name, daemon=True).start()
        weakref.finalize(self, self._queue.put, None)

    def run(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Both parts, the forward first to compute. Raises what one of them raised; the other ends at its next turn."""
        ended: Future[None] = Future()
        self.baton.begin()
        stream = self._caller_stream()

        def beside() -> None:
            try:
                with stream, torch.autograd.set_multithreading_enabled(False), self.baton.held():
                    backward()
                ended.set_result(None)
            except BaseException as error:  # whatever it is, the caller is the one to know
                self.baton.fail(error)
                ended.set_exception(error)

        try:
            with self.baton.held():
                self._queue.put(beside)
                forward()
        except BaseException as error:
            self.baton.fail(error)
            raise
        ended.result()

    def take_waits(self) -> list[Wait]:
        """The collectives that the parts have waited for since the last call."""
        waits, self.baton.waits = self.baton.waits, []
        return waits

    def _caller_stream(self) -> AbstractContextManager[object]:
        """On a GPU both parts queue their kernels where the caller does: allocations are made and freed in one order."""
        return torch.cuda.stream(torch.cuda.current_stream(self._device)) if self._device.type == "cuda" else nullcontext()


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (run := queue.get()) is not None:
        run()
        del run  # what it holds is not to live until the next one comes


class PairedGroup(Group):
    """A group of two communicators over the same ranks, one for forwards and one for backwards: which is meant follows from the action
    that the recorder knows for the calling thread. A call of one part of a pair lends the baton to the other."""

    def __init__(self, forward: Group, backward: Group, baton: Baton):
        super().__init__(forward.name, forward.axis, forward.ranks, forward.ranks[forward.rank], forward.recorder)
        self._forward, self._backward, self._baton = forward, backward, baton

    @contextmanager
    def _line(self) -> Iterator[Group]:
        action, _ = self.recorder.scope
        with self._baton.lent(action, self.axis):
            yield self._backward if action is not None and action.kind in _BACKWARDS else self._forward

    def waiting(self) -> AbstractContextManager[None]:
        return self._baton.lent()

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        with self._line() as group:
            return group.all_to_all(parts, shapes)

    def all_gather(self, tensor: Tensor, shapes: Sequence[Shape] | None = None) -> list[Tensor]:
        with self._line() as group:
            return group.all_gather(tensor, shapes)

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, wide: bool = False, used_up: bool = False) -> Tensor:
        with self._line() as group:
            return group.all_reduce(tensor, op, wide=wide, used_up=used_up)

    def reduce_scatter(self, parts: Sequence[Tensor], *, wide: bool = False) -> Tensor:
        with self._line() as group:
            return group.reduce_scatter(parts, wide=wide)

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
