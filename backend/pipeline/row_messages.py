"""Messages that the compute lane itself sends and receives, at their places in the row, instead of lanes next to it.

Executed so, a row needs no threads, and products wait for the messages listed before them. Two ways:

- *in order*: one message after the other, each ending before the next begins. An order in which no rank
  waits for another in a circle is `lower`'s; of a file's own order `check` proves it (rules `receive-cycle`
  and `rendezvous-cycle`).
- *together*: messages side by side in a row begin together, and the next action waits for all of them, received ones
  first. That only drops waits from the order above. For let e be the first message, in an order that all rows agree
  with, that does not end: both its ranks have ended everything listed before it, so both have begun e, and nothing
  before e keeps its receiver from taking it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import torch

from ...core.plan.runtime import Runtime
from ...core.schedule.action import SENDS, Action
from ...core.schedule.placement import Placement
from ...core.schedule.timeline import Span
from ..watch.watch import Place
from .messages import Clock, Mail, Mark, MessageChannel, direction_of, lane_name, other_end, peer_of

RowOrder = Literal["in order", "together"]


def row_order_of(runtime: Runtime) -> RowOrder | None:
    """How a plan wants messages in the row; None where they overlap with products, which is the default."""
    if runtime.p2p_overlap is not False:
        return None
    return "in order" if runtime.p2p_batched is False else "together"


class RowMessages:
    """The messages of one walk over a row. `spans` are as lanes would have them."""

    def __init__(
        self,
        order: RowOrder,
        *,
        placement: Placement,
        channel: Callable[[Literal["F", "B"], int, bool], MessageChannel],
        shape_of: Callable[[Action], tuple[int, ...]],
        dtype: torch.dtype,
        mail: Mail,
        clock: Clock,
        global_rank: int,
        global_rank_of: Callable[[int], int],
        record: Callable[[Action, int], None],
        watch: Callable[[Action | None], AbstractContextManager[object]],
        place: Place,
    ):
        """Arguments are those of `messages.message_lanes`; `place` shows where the compute lane is, whose peers
        `global_rank_of` names."""
        self._times: list[tuple[Action, Mark, Mark]] = []
        self._order = order
        self._placement, self._channel, self._shape_of, self._dtype = placement, channel, shape_of, dtype
        self._mail, self._clock, self._global_rank, self._global_rank_of = mail, clock, global_rank, global_rank_of
        self._record, self._watch, self._place = record, watch, place
        self._listed: list[Action] = []

    @property
    def spans(self) -> list[Span]:
        """When each message began and ended."""
        seconds = self._clock.seconds
        return [
            Span(self._global_rank, lane_name(action, self._placement), action, seconds(start), seconds(end))
            for action, start, end in self._times
        ]

    def add(self, action: Action) -> None:
        """The row has come to a send or receive."""
        self._listed.append(action)
        if self._order == "in order":
            self.settle()

    def settle(self) -> None:
        """Returns when all messages listed so far have ended."""
        listed, self._listed = self._listed, []
        with torch.no_grad():
            self._exchange(listed)

    def _exchange(self, listed: Sequence[Action]) -> None:
        ends = [(action, self._clock.mark(), self._begin(action)) for action in listed]
        for action, start, end in sorted(ends, key=lambda each: each[0].kind in SENDS):
            self._place.waits(
                action, needs=str(other_end(action, self._placement)), peer=self._global_rank_of(self._peer(action))
            )
            with self._watch(action):
                end()
            self._times.append((action, start, self._clock.mark()))

    def _begin(self, action: Action) -> Callable[[], None]:
        line = self._channel(direction_of(action), self._peer(action), action.kind in SENDS)
        if action.kind in SENDS:
            tensor = self._mail.take(action)
            self._record(action, line.sent_bytes(tensor))
            return line.begin_send(tensor)
        receive = line.begin_receive(self._shape_of(action), self._dtype)
        return lambda: self._mail.put(action, receive())

    def _peer(self, action: Action) -> int:
        return peer_of(action, self._placement)
