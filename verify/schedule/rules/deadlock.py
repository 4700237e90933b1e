"""Rules about waiting: whether the lists come to their end, for each of the three meanings of a send.

- *rendezvous* (gloo): a send ends when its receive does;
- *buffered* (MPI's buffered mode): a send ends at once;
- *stream-ordered* (NCCL): sends and receives of one direction on a rank are one in-order queue next to the compute; a
  send waits for its payload and its receive, compute waits for its messages.

The rules run the lists *blocking, in order* with the first two meanings. A list that ends with blocking rendezvous ends
with all three, early-posted receives included: every other execution drops waits from that one and adds none.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....core.schedule.action import COMPUTE, Kind
from .blocking import NONE, Blocked, Hops, partners, run_blocking
from .rule import Rule, Violation
from .view import View

SEND_MEANINGS = ("rendezvous", "buffered", "stream-ordered")


def receive_cycle(view: View) -> Iterator[Violation]:
    """The first circle of ranks of which each waits in a receive, with sends that end at once."""
    if view.blocking.cycle and (blocked := run_blocking(view.schedule, view.hops, buffered=True)).cycle:
        streams = (
            "Only messages in streams next to the compute (NCCL) get"
            if runs_stream_ordered(view)
            else "No kind of send gets"
        )
        yield _circle_violation(view, blocked, f"Every one of them is in a receive. {streams} past it.")


def rendezvous_cycle(view: View) -> Iterator[Violation]:
    """The first circle of ranks that wait for each other when every send and receive blocks and lists run in order."""
    if view.blocking.cycle and not run_blocking(view.schedule, view.hops, buffered=True).cycle:
        streams = (
            "Buffered and stream-ordered (NCCL) sends get" if runs_stream_ordered(view) else "Only buffered sends get"
        )
        yield _circle_violation(view, view.blocking, f"{streams} past it.")


def send_meanings(view: View) -> dict[str, bool]:
    """Meaning of a send -> whether the lists come to their end with it. Messages must be matched
    (`send-without-receive` and the like)."""
    if not view.blocking.cycle:
        return dict.fromkeys(SEND_MEANINGS, True)
    runs = (False, not run_blocking(view.schedule, view.hops, buffered=True).cycle, runs_stream_ordered(view))
    return dict(zip(SEND_MEANINGS, runs, strict=True))


def runs_stream_ordered(view: View) -> bool:
    """Whether the lists end with one in-order queue of messages per rank and direction next to each rank's compute."""
    kind, num_ranks, nothing = view.schedule.actions.kind, view.schedule.num_ranks, len(view.schedule)
    is_compute = np.isin(kind, [int(each) for each in COMPUTE])
    forward, backward = (kind == Kind.SEND_F) | (kind == Kind.RECV_F), (kind == Kind.SEND_B) | (kind == Kind.RECV_B)
    queue = np.select([is_compute, forward, backward], [0, 1, 2], 3)
    key = queue * num_ranks + view.rank
    chosen = np.flatnonzero(queue < 3)
    order = chosen[np.argsort(key[chosen], kind="stable")]
    bounds = np.searchsorted(key[order], np.arange(3 * num_ranks + 1))
    needs = np.full((2, nothing), nothing)
    for row, hops in enumerate(view.hops):
        _fill_needs(needs, row, hops)
    partner = np.append(partners(view.schedule, view.hops), nothing)
    done = np.zeros(nothing + 1, dtype=bool)
    done[nothing] = True
    cursor, stop = bounds[:-1].copy(), bounds[1:]
    at_head = np.zeros(nothing + 1, dtype=bool)
    while len(active := np.flatnonzero(cursor < stop)):
        head = order[cursor[active]]
        at_head[head] = done[needs[0, head]] & done[needs[1, head]]
        # Messages go when both ends are at the head of their queues and the payload exists.
        ready = at_head[head] & (is_compute[head] | at_head[partner[head]])
        at_head[head] = False
        if not ready.any():
            return False
        done[head[ready]] = True
        cursor[active[ready]] += 1
    return True


def _fill_needs(needs: np.ndarray, row: int, hops: Hops) -> None:
    """A send needs its maker, the user of a message its receive."""
    sends = hops.crossing & (hops.send != NONE) & (hops.maker != NONE)
    needs[row, hops.send[sends]] = hops.maker[sends]
    uses = hops.crossing & (hops.receive != NONE) & (hops.user != NONE)
    needs[row, hops.user[uses]] = hops.receive[uses]


def _circle_violation(view: View, blocked: Blocked, remark: str) -> Violation:
    waits = [
        (f"rank {view.rank[index]} in {view.token(index)} waits for {view.token(blocked.partner[index])}")
        for index in blocked.cycle
    ]
    ring = " -> ".join(f"rank {view.rank[index]}" for index in (*blocked.cycle, blocked.cycle[0]))
    what = f"{'; '.join(waits)}: {ring} is a circle. {remark}"
    return Violation(blocked.cycle[0], int(view.rank[blocked.cycle[0]]), what, blocked.cycle[1:])


DEADLOCK_RULES = (
    Rule(
        "receive-cycle",
        "Executing the lists in order with sends that end at once, no circle of ranks waits in receives.",
        "Move a receive behind the send that the other rank waits for, or leave all messages to `lower`.",
        "0F0,0RECV_B0,0SEND_F0,0B0,0REDUCE_GRAD,0STEP\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1STEP\n",
        receive_cycle,
    ),
    Rule(
        "rendezvous-cycle",
        "Executing the lists in order with sends that end when their receive does, no circle of ranks waits for each "
        "other.",
        "Receive before sending on one of these ranks, or leave all messages to `lower`, whose order cannot deadlock.",
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0STEP\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1STEP\n",
        rendezvous_cycle,
    ),
)
