"""What stages hand over, and how a schedule ends when its messages block: run once for all rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....core.schedule.action import Kind
from ....core.schedule.schedule import Schedule

NONE = -1
"""Stands in every table for "there is no such action"."""


@dataclass(frozen=True)
class Hops:
    """What neighbouring stages hand over in one direction: tables [hop, microbatch] of indices or NONE, hop h
    joining stages h and h+1.

    `maker` makes the value and `user` needs it; `send` and `receive` carry it where `crossing` says that
    they are on different ranks.
    """

    value: str
    send: np.ndarray
    receive: np.ndarray
    maker: np.ndarray
    user: np.ndarray
    crossing: np.ndarray

    @property
    def matched(self) -> tuple[np.ndarray, np.ndarray]:
        """(sends, receives) of the values that cross ranks and have both."""
        both = self.crossing & (self.send != NONE) & (self.receive != NONE)
        return self.send[both], self.receive[both]


@dataclass(frozen=True)
class Blocked:
    """How a blocking run ends: the messages of a circle of waiting ranks, empty when the run comes to its end."""

    cycle: tuple[int, ...]
    partner: np.ndarray


def run_blocking(schedule: Schedule, hops: Sequence[Hops], *, buffered: bool = False) -> Blocked:
    """Runs all messages in list order, a SEND and its RECV together, as many pairs at once as can go;
    `buffered` sends go by themselves.

    Sends and receives must be matched (`send-without-receive` and its siblings find nothing). Compute never blocks
    here: what it needs was received before it on its own rank, which `late-receive` and `hand-over-order` check.
    """
    rank = schedule.pp_rank
    partner = partners(schedule, hops)
    message = np.flatnonzero(partner != NONE)
    # One slot per message and one behind each rank's last, which nothing gets past.
    slot = np.arange(len(message), dtype=np.int32) + rank[message]
    num_slots = len(message) + schedule.num_ranks
    slot_of = np.zeros(len(schedule), dtype=np.int32)
    slot_of[message] = slot
    peer, partner_slot = np.zeros(num_slots, dtype=np.int32), np.full(num_slots, num_slots, dtype=np.int32)
    free = np.zeros(num_slots, dtype=bool)
    peer[slot], partner_slot[slot] = rank[partner[message]], slot_of[partner[message]]
    kind = schedule.actions.kind[message]
    free[slot] = (kind == Kind.SEND_F) | (kind == Kind.SEND_B)
    bounds = np.searchsorted(message, schedule.offsets) + np.arange(schedule.num_ranks + 1)
    cursor, stop = bounds[:-1].copy(), bounds[1:] - 1
    while True:
        there = cursor[peer[cursor]]
        ready = (there > partner_slot[cursor]) | free[cursor] if buffered else there == partner_slot[cursor]
        going = ready.nonzero()[0]
        if not len(going):
            break
        cursor[going] += 1
    stuck = np.flatnonzero(cursor < stop)
    if not len(stuck):
        return Blocked((), partner)
    ranks = _circle(int(stuck[0]), peer[cursor])
    return Blocked(tuple(message[cursor[ranks] - ranks].tolist()), partner)


def partners(schedule: Schedule, hops: Sequence[Hops]) -> np.ndarray:
    """Index of a send or receive -> index of its other end; NONE elsewhere."""
    partner = np.full(len(schedule), NONE, dtype=np.int64)
    for direction in hops:
        send, receive = direction.matched
        partner[send], partner[receive] = receive, send
    return partner


def _circle(rank: int, waits_for: np.ndarray) -> np.ndarray:
    """The ranks of one circle; following any stuck rank's peer leads into one."""
    import networkx

    waits = networkx.DiGraph(enumerate(waits_for.tolist()))
    return np.array([tail for tail, _ in networkx.find_cycle(waits, rank)])
