"""Messages as a step sends them: given to a lane's thread while the compute lane goes on, and awaited by the
compute lane of the peer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...core.schedule.action import Action, Kind

TURNS = 8
"""Messages of one call each way: the lanes' threads start once a step, not once a message."""

WORK_CALLS, WORK_ELEMENTS = 32, 4096
"""Kernels that the sender goes on with, as many as take a few tenths of a millisecond: each takes the
interpreter's lock from the lane."""


def open_ends(transport: Any) -> Sequence[Any]:
    """The channels between two ranks, by the rank that sends."""
    return [transport.channel(f"measure/{source}", source, 1 - source) for source in (0, 1)]


def there_and_back(transport: Any, ends: Sequence[Any], payload: Any) -> None:
    """`TURNS` messages from rank 0 to rank 1 and back, one after the other, each while its sender computes."""
    import torch

    rank, lanes = transport.global_rank, _Lanes(transport, ends, payload)
    small = torch.ones(WORK_ELEMENTS, device=transport.device)
    for turn in range(TURNS):
        if rank == 1:
            lanes.take(turn)
        lanes.put(turn, payload)
        for _ in range(WORK_CALLS):
            small = small + 1.0
        if rank == 0:
            lanes.take(turn)
    lanes.finish()


def during_work(transport: Any, ends: Sequence[Any], payload: Any, work: Callable[[], Any]) -> None:
    """`TURNS` turns of work, in each of which both ranks send a message and receive one; nobody waits
    for any but at the end."""
    lanes = _Lanes(transport, ends, payload)
    for turn in range(TURNS):
        lanes.put(turn, payload)
        work()
    for turn in range(TURNS):
        lanes.take(turn)
    lanes.finish()


class _Lanes:
    """A lane out and a lane in, with `TURNS` messages each like `payload`."""

    def __init__(self, transport: Any, ends: Sequence[Any], payload: Any):
        from ..pipeline.messages import Clock, Lane, Mail

        rank, self._mail, clock = transport.global_rank, Mail(), Clock(transport.device)
        self._sends, self._receives = (
            [Action(0, kind, turn) for turn in range(TURNS)] for kind in (Kind.SEND_F, Kind.RECV_F)
        )

        def receive(action: Action, _: Any) -> None:
            self._mail.put(action, ends[1 - rank].receive(tuple(payload.shape), payload.dtype))

        def send(_: Action, tensor: Any) -> None:
            ends[rank].send(tensor)

        given: dict[str, Any] = {"mail": self._mail, "clock": clock, "global_rank": rank, "permits": TURNS}
        self._lanes = [
            Lane("out", self._sends, prepare=self._mail.take, perform=send, **given),
            Lane("in", self._receives, prepare=lambda _: None, perform=receive, **given),
        ]

    def put(self, turn: int, payload: Any) -> None:
        """Gives a message to the lane out."""
        self._mail.put(self._sends[turn], payload)

    def take(self, turn: int) -> Any:
        """What has come by the lane in, once it is there."""
        return self._mail.take(self._receives[turn])

    def finish(self) -> None:
        """Returns when all messages have left and come."""
        for lane in self._lanes:
            lane.finish()
