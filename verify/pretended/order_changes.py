"""What may be wrong in the order of calls, as changes of our own code in a rank's process: each a fault that `order`
or `circles` must find, with its rank and its action."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...backend.base.recorder import Recorder
from ...backend.pipeline import executor
from ...backend.ranks import gradient_sums, training_rank
from ...backend.transport import mesh
from ...backend.transport.process_group import ProcessGroup, ProcessGroupChannel

CHANGED_RANK = 1
"""The rank whose calls change, where not all do."""


@dataclass(frozen=True)
class OrderChange:
    """`make(global_rank)` changes the process of a rank. The rule, a rank and an action (or layer) must be named in the
    plan of that name; `circle` and `without-action` may name any."""

    make: Callable[[int], None]
    rule: str
    rank: int | None
    action: str
    plan: str = "tp2-pp2"


def _replace(owner: Any, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, change(getattr(owner, name)))


def _swapped(global_rank: int) -> None:
    def change(init: Callable[..., None]) -> Callable[..., None]:
        def made(self: Any, *given: Any, **named: Any) -> None:
            init(self, *given, **named)
            first, second = self.tp, self.tp_gradients
            first._process_group, second._process_group = second._process_group, first._process_group

        return made

    if global_rank == CHANGED_RANK:
        _replace(mesh.Mesh, "__init__", change)


def _other_order(global_rank: int) -> None:
    """The loss is added up before the gradient norm."""

    def change(norm: Callable[..., float]) -> Callable[..., float]:
        def first_the_loss(self: Any, held: Any, gradients: Any) -> float:
            self._early_loss = self.mean_loss({}, 1)
            return norm(self, held, gradients)

        return first_the_loss

    if global_rank == CHANGED_RANK:
        _replace(training_rank.Totals, "norm", change)


def _dropped(global_rank: int) -> None:
    """Of the group of a model the second call is left out."""

    def change(gather: Callable[..., Any]) -> Callable[..., Any]:
        def but_one(self: Any, tensor: Any, shapes: Any) -> Any:
            if self.axis == "model" and self.num_calls == 2:
                return [tensor.clone() for _ in shapes]
            return gather(self, tensor, shapes)

        return but_one

    if global_rank == CHANGED_RANK:
        _replace(ProcessGroup, "_all_gather", change)


def _other_shape(global_rank: int) -> None:
    """A sum over a model has one element more."""

    def change(gather: Callable[..., Any]) -> Callable[..., Any]:
        def longer(self: Any, tensor: Any, shapes: Any) -> Any:
            if self.axis != "model":
                return gather(self, tensor, shapes)
            padded = torch.nn.functional.pad(tensor.reshape(-1), (0, 1))
            found = gather(self, padded, [tuple(padded.shape)] * self.size)
            return [each[:-1].reshape(tensor.shape) for each in found]

        return longer

    if global_rank == CHANGED_RANK:
        _replace(ProcessGroup, "_all_gather", change)


def _sent_twice(global_rank: int) -> None:
    def change(begin: Callable[..., Any]) -> Callable[..., Any]:
        alive: list[Any] = []  # what is sent must stay until it has gone

        def twice(self: Any, tensor: Any) -> Any:
            alive.append(begin(self, tensor))
            return begin(self, tensor)

        return twice

    if global_rank == 0:
        _replace(ProcessGroupChannel, "begin_send", change)


def _not_received(global_rank: int) -> None:
    def change(begin: Callable[..., Any]) -> Callable[..., Any]:
        def nothing(self: Any, shape: Any, dtype: Any) -> Any:
            return lambda: torch.zeros(shape, dtype=dtype, device=self._device)

        return nothing

    if global_rank == 2:
        _replace(ProcessGroupChannel, "begin_receive", change)


def _circle(global_rank: int) -> None:
    """Rank 2 asks its model before it adds up the tied table with rank 0, all others after it."""

    def change(tied: Callable[..., Any]) -> Callable[..., Any]:
        def asks_too(plan: Any, mesh: Any, reduced: Any, recorder: Any) -> Any:
            def asks() -> None:
                with recorder.layer("asked"):
                    mesh.model.all_gather(torch.zeros(1, device="cuda"))

            if global_rank == 2:
                asks()
            found = tied(plan, mesh, reduced, recorder)
            if global_rank != 2:
                asks()
            return found

        return asks_too

    _replace(gradient_sums, "tied_gradients", change)


def _wider(global_rank: int) -> None:
    """What is gathered is sent in twice the bytes."""

    def change(gather: Callable[..., Any]) -> Callable[..., Any]:
        def twice(self: Any, tensor: Any, shapes: Any) -> Any:
            found = gather(self, torch.stack([tensor, tensor]), [(2, *shape) for shape in shapes])
            return [each[0].clone() for each in found]

        return twice

    _replace(ProcessGroup, "_all_gather", change)


def _own_thread(global_rank: int) -> None:
    """Backwards run in autograd's own thread, which knows no action."""

    @contextmanager
    def many(mode: bool) -> Any:
        yield

    _replace(executor.torch.autograd, "set_multithreading_enabled", lambda before: many)


def _nameless(global_rank: int) -> None:
    """A lane works for nobody."""

    @contextmanager
    def within(self: Recorder, scope: Any) -> Any:
        yield

    _replace(Recorder, "within", lambda before: within)


ORDER_CHANGES = {
    "two communicators are swapped": OrderChange(_swapped, "wrong-communicator", CHANGED_RANK, "in data"),
    "a rank makes its calls in another order": OrderChange(_other_order, "call-differs", CHANGED_RANK, "STEP loss"),
    "a call is dropped": OrderChange(_dropped, "other-bytes", CHANGED_RANK, "STEP loss"),
    "a member gives another number of elements": OrderChange(
        _other_shape, "count-differs", CHANGED_RANK, "STEP grad_norm"
    ),
    "a message is sent twice": OrderChange(_sent_twice, "message-without-partner", 2, "SEND_F"),
    "a message is not received": OrderChange(_not_received, "message-without-partner", 2, "SEND_F"),
    "two communicators wait for each other": OrderChange(_circle, "circle", 2, "asked"),
    "what is gathered has more bytes than is recorded": OrderChange(_wider, "other-bytes", 0, "STEP"),
    "backwards lose their action": OrderChange(_own_thread, "without-action", 0, "outside of actions"),
    "overlapped collectives lose their action": OrderChange(
        _nameless, "without-action", 0, "outside of actions", "tp2-overlap"
    ),
}
