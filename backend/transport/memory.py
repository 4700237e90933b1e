"""The in-memory transport: all ranks are threads of one process.

For tests, proofs and debugging: no sockets, no start-up cost, every mismatch is an error with both sides named
instead of a hang, and one rank that fails wakes all others. Values are those of any other transport, since
transports only move bytes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...core.base.errors import RankFailure
from ..base.recorder import Recorder
from ..base.streams import Moment, now, take_over, used_here, wait_for
from ..watch.stop import StopRequest
from ..watch.watch import Board, RankWatch
from .base import DEFAULT_TIMEOUT_S, Channel, Group, ReduceOp, Shape, Transport, TransportError, contiguous_copy

Made = TypeVar("Made", "_Meeting", "_Mailbox")


class MemoryWorld:
    """What the ranks of one process share. Each rank's thread takes its own `transport(global_rank)`."""

    def __init__(
        self,
        world_size: int,
        *,
        device: str | torch.device = "cpu",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        board: Board | None = None,
    ):
        """`board` is where the ranks show what they are doing."""
        self.world_size = world_size
        self.board = board
        self.device = torch.device(device)
        self.timeout_s = timeout_s
        self.failure: str | None = None
        self.stop = StopRequest()
        self.places: dict[int, tuple[Recorder, RankWatch]] = {}
        self._lock = threading.Lock()
        self._places: dict[tuple[Any, ...], _Meeting | _Mailbox] = {}

    def transport(self, global_rank: int, recorder: Recorder | None = None) -> MemoryTransport:
        """The transport of one rank. Where that rank is lies in `places` from now on."""
        transport = MemoryTransport(self, global_rank, recorder)
        self.places[global_rank] = transport.recorder, transport.watch
        return transport

    def abort(self, reason: str) -> None:
        """Makes every call of every rank, waiting or to come, raise `TransportError` with `reason`.
        The first reason stays."""
        with self._lock:
            if self.failure is None:
                self.failure = reason
            places = list(self._places.values())
        for place in places:
            with place.changed:
                place.changed.notify_all()

    def place(self, key: tuple[Any, ...], make: Callable[[], Made]) -> Made:
        """The meeting or mailbox that all ranks know under `key`, made by whoever comes first."""
        with self._lock:
            if key not in self._places:
                self._places[key] = make()
            return self._places[key]  # type: ignore[return-value]

    def wait(self, changed: threading.Condition, ready: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Returns when `ready()`. Raises `TransportError` when the world was aborted or the time is
        over; `changed` is held."""
        deadline_s = time.monotonic() + self.timeout_s
        while self.failure is None and not ready():
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise TransportError(f"{describe()} after {self.timeout_s:g} s.")
            changed.wait(remaining_s)
        if self.failure is not None:
            raise TransportError(self.failure)


class _Meeting:
    """Where the members of a group lay down one value per call and take all of them."""

    def __init__(self, size: int):
        self.size = size
        self.changed = threading.Condition()
        self._calls: dict[int, dict[int, tuple[str, Any]]] = {}
        self._taken: dict[int, int] = {}

    def exchange(self, world: MemoryWorld, group: Group, call: int, op: str, value: Any) -> list[Any]:
        """Every member's value of this call, in member order. `op` must be the same for all."""
        with self.changed:
            table = self._calls.setdefault(call, {})
            table[group.rank] = (op, value)
            if len(table) == self.size:
                self.changed.notify_all()
            world.wait(self.changed, lambda: len(table) == self.size, lambda: self._absent(group, op, table))
            self._taken[call] = self._taken.get(call, 0) + 1
            if self._taken[call] == self.size:
                del self._taken[call], self._calls[call]
        others = {group.ranks[position]: other for position, (other, _) in table.items() if other != op}
        if others:
            raise TransportError(
                f"{group}: call {call} is {op} here, but {others} elsewhere. All must make the same calls in one order."
            )
        return [table[position][1] for position in range(self.size)]

    def _absent(self, group: Group, op: str, table: dict[int, Any]) -> str:
        absent = [group.ranks[position] for position in range(self.size) if position not in table]
        return f"{group}: {op} still waits for ranks {absent}"


class _Mailbox:
    """Where tensors lie until they are taken, and senders wait for that."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.tensors: deque[tuple[Tensor, Moment]] = deque()
        """Each with the moment from which on it is there."""
        self.taken: dict[int, Moment] = {}
        """When the copies of tensors that were taken are made, by number."""
        self.num_sent = 0
        self.num_taken = 0


class MemoryGroup(Group):
    """A group whose members are threads."""

    def __init__(
        self, world: MemoryWorld, name: str, axis: str, ranks: Sequence[int], global_rank: int, recorder: Recorder
    ):
        super().__init__(name, axis, ranks, global_rank, recorder)
        self._world = world
        self._meeting = world.place(("group", name, self.ranks), lambda: _Meeting(self.size))
        self._num_calls = 0

    def _all_to_all(self, parts: list[Tensor], shapes: list[Shape]) -> list[Tensor]:
        # copied before the meeting, so that the sender may go on and change its tensors
        tables = self._exchange("all_to_all", [contiguous_copy(part) for part in parts])
        received = [table[self.rank] for table in tables]
        self._check_arrived("all_to_all", received, shapes, parts[0].dtype)
        return received

    def _all_gather(self, tensor: Tensor, shapes: list[Shape]) -> list[Tensor]:
        received = self._exchange("all_gather", contiguous_copy(tensor))
        self._check_arrived("all_gather", received, shapes, tensor.dtype)
        return [contiguous_copy(other) for other in received]

    def _all_reduce(self, tensor: Tensor, op: ReduceOp, used_up: bool) -> Tensor:
        received = self._exchange(f"all_reduce {op}", contiguous_copy(tensor))
        self._check_arrived("all_reduce", received, [tuple(tensor.shape)] * self.size, tensor.dtype)
        result = contiguous_copy(received[0])
        for other in received[1:]:
            result = result + other if op == "sum" else torch.maximum(result, other)
        return result

    def _reduce_scatter(self, parts: list[Tensor]) -> Tensor:
        first, *others = self._all_to_all(parts, [tuple(parts[0].shape)] * self.size)
        for other in others:
            first = first + other
        return first

    def _barrier(self) -> None:
        self._exchange("barrier", None)

    def _end(self) -> None:
        """Nothing to let go of: the world ends with its last thread."""

    def _exchange(self, op: str, value: Tensor | list[Tensor] | None) -> list[Any]:
        """What all members bring; on a GPU the current stream comes after the streams that made it."""
        self._num_calls += 1
        brought = value, now(self._world.device)
        found = self._meeting.exchange(self._world, self, self._num_calls, op, brought)
        for tensors, moment in found:
            wait_for(moment, self._world.device)
            used_here([tensors] if isinstance(tensors, Tensor) else tensors or ())
        return [tensors for tensors, _ in found]

    def _check_arrived(self, op: str, tensors: list[Tensor], shapes: list[Shape], dtype: torch.dtype) -> None:
        for source, tensor, shape in zip(self.ranks, tensors, shapes, strict=True):
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise TransportError(
                    f"{self}: {op} expects {dtype} {shape} from rank {source}, but {tensor.dtype} "
                    f"{tuple(tensor.shape)} arrived."
                )


class MemoryChannel(Channel):
    """A channel between two threads."""

    def __init__(self, world: MemoryWorld, name: str, source: int, destination: int, global_rank: int):
        super().__init__(name, source, destination, global_rank)
        self._world = world
        self._mailbox = world.place(("channel", name, source, destination), _Mailbox)

    def begin_send(self, tensor: Tensor) -> Callable[[], None]:
        self._check_end(self.source, "send")
        mailbox, device = self._mailbox, self._world.device
        with mailbox.changed:
            mailbox.tensors.append((tensor.detach(), now(device)))
            mailbox.num_sent = number = mailbox.num_sent + 1
            mailbox.changed.notify_all()

        def send() -> None:
            with mailbox.changed:
                self._world.wait(
                    mailbox.changed, lambda: mailbox.num_taken >= number, lambda: f"{self}: send is not received"
                )
                taken = mailbox.taken.pop(number)
            wait_for(taken, device)  # whoever changes the tensor comes after its copy

        return send

    def begin_receive(self, shape: Shape, dtype: torch.dtype) -> Callable[[], Tensor]:
        self._check_end(self.destination, "receive")
        mailbox = self._mailbox

        def receive() -> Tensor:
            with mailbox.changed:
                self._world.wait(mailbox.changed, lambda: bool(mailbox.tensors), lambda: f"{self}: nothing was sent")
                tensor, moment = mailbox.tensors[0]
                if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype:
                    raise TransportError(
                        f"{self}: expects {dtype} {tuple(shape)}, but {tensor.dtype} {tuple(tensor.shape)} was sent."
                    )
                mailbox.tensors.popleft()
                received = contiguous_copy(take_over(tensor, moment))
                mailbox.num_taken += 1
                mailbox.taken[mailbox.num_taken] = now(self._world.device)
                mailbox.changed.notify_all()
            return received

        return receive

    def _end(self) -> None:
        """Nothing to let go of: the world ends with its last thread."""


class MemoryTransport(Transport):
    """One thread's way to the others of its `MemoryWorld`."""

    def __init__(self, world: MemoryWorld, global_rank: int, recorder: Recorder | None = None):
        super().__init__(global_rank, world.world_size, world.device, recorder, world.board)
        self._world = world
        self.stop = world.stop

    def _group(self, name: str, axis: str, ranks: Sequence[int]) -> Group:
        return MemoryGroup(self._world, name, axis, ranks, self.global_rank, self.recorder)

    def _channel(self, name: str, source: int, destination: int) -> Channel:
        return MemoryChannel(self._world, name, source, destination, self.global_rank)


def run_threads(world: MemoryWorld, job: Callable[[MemoryTransport, Any], Any], payload: Any) -> list[Any]:
    """What `job(transport, payload)` returned on every rank, each in a thread of its own named `rank <n>`.

    A rank that raises wakes and fails all others. Raises `RankFailure` from its exception.
    """
    results: list[Any] = [None] * world.world_size
    failures: list[tuple[int, BaseException]] = []

    def run(global_rank: int) -> None:
        try:
            with world.transport(global_rank) as transport:
                results[global_rank] = job(transport, payload)
        except BaseException as error:  # whatever ends one rank must wake the others
            failures.append((global_rank, error))
            world.abort(f"rank {global_rank} failed: {type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world.world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        global_rank, error = failures[0]
        raise RankFailure(f"rank {global_rank} failed: {type(error).__name__}: {error}", global_rank) from error
    return results
