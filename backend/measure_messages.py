"""Messages as a step sends them: given to a lane's thread while the compute lane goes on, and awaited by the compute lane of the peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..core.action import Action, Kind

TURNS = 8
"""Messages there and back in one call: the lanes' threads start once a step, not once a message."""

WORK_CALLS, WORK_ELEMENTS = 32, 4096
"""Kernels that the sender goes on with, as many as take a few tenths of a millisecond: each takes the interpreter's lock from the lane."""


def messages(transport: Any, sizes: Sequence[int]) -> Iterator[tuple[str, str, tuple[int, ...], Callable[[], Sequence[Any]], float]]:
    """Cases (`measure_cases.Case`) of messages by bytes, between two ranks; none in larger worlds."""
    import torch

    if transport.world_size != 2:
        return
    ends = [transport.channel(f"measure/{source}", source, 1 - source) for source in (0, 1)]
    for num_bytes in sizes:
        payload = torch.zeros(max(1, num_bytes // 4), device=transport.device)
        yield "message", "message", (num_bytes,), lambda payload=payload: [lambda: _turns(transport, ends, payload)], 2.0 * TURNS


def _turns(transport: Any, ends: Sequence[Any], payload: Any) -> None:
    """Messages from rank 0 to rank 1 and back, one after the other, each while its sender computes."""
    import torch

    from .pipeline.messages import Clock, Lane, Mail

    rank, mail, clock = transport.global_rank, Mail(), Clock(transport.device)
    sends, receives = ([Action(0, kind, turn) for turn in range(TURNS)] for kind in (Kind.SEND_F, Kind.RECV_F))
    small = torch.ones(WORK_ELEMENTS, device=transport.device)

    def receive(action: Action, _: Any) -> None:
        mail.put(action, ends[1 - rank].receive(tuple(payload.shape), payload.dtype))

    def send(_: Action, tensor: Any) -> None:
        ends[rank].send(tensor)

    given: dict[str, Any] = {"mail": mail, "clock": clock, "global_rank": rank, "permits": TURNS}
    lanes = [
        Lane("out", sends, prepare=mail.take, perform=send, **given),
        Lane("in", receives, prepare=lambda _: None, perform=receive, **given),
    ]
    for out, back in zip(sends, receives, strict=True):
        if rank == 1:
            mail.take(back)
        mail.put(out, payload)
        for _ in range(WORK_CALLS):
            small = small + 1.0
        if rank == 0:
            mail.take(back)
    for lane in lanes:
        lane.finish()
