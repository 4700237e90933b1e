"""The rule about memory that is used again within a step: its last reader must have ended
before the next writer starts.

"Ended before" is happens-before under the execution rule: a rank's compute runs in list order; a transfer starts when
its payload exists and the transfer before it on its lane has ended, and ends when it has been received; a compute
action starts when its messages have arrived. Nothing makes compute wait for a send to leave, so the end of a send is
known only through what the receiver does next. Sends are taken as rendezvous, the weakest promise: what is safe here is
safe for buffered and stream-ordered sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ....core.schedule.action import COMPUTE, Kind
from ..facts import BUFFER_KINDS, Buffers, Facts, ring_slots
from .blocking import NONE
from .rule import Rule, Violation
from .view import View

_MAX_CLOCK_ENTRIES = 1 << 26
"""Entries of the table of clocks held at once; more ranks are worked through in several passes."""


def buffer_reuse(view: View) -> Iterator[Violation]:
    """Writes into memory whose last reader may still be at work."""
    buffers = view.facts.buffers
    assert buffers is not None, "the rule needs buffers"
    clocks = _Clocks(view, buffers.recv_buffers)
    for name in BUFFER_KINDS:
        slot = buffers.table(name, view.schedule)
        if slot is None:
            continue
        life = _life(view, slot, name)
        old, new = _unsafe(view, clocks, life)
        rings = least_rings(view, name, clocks) if len(old) else ()
        for first, then in zip(old.tolist(), new.tolist(), strict=True):
            reader, writer, stage = int(life.reader[first]), int(life.writer[then]), int(life.stage[first])
            what = (
                f"this fills the slot of {life.noun} of stage {stage}, microbatch {life.microbatch[first]}, again, "
                f"while {view.token(reader)} may still run. A ring of {rings[stage]} is safe for this stage."
            )
            yield Violation(writer, int(view.rank[writer]), what, (reader,))


def least_rings(view: View, name: str, clocks: _Clocks | None = None, recv_buffers: int = 2) -> tuple[int, ...]:
    """Per stage a ring size for the buffers `name` of `Buffers` that is safe; the least one where
    microbatches run in order."""
    clocks = clocks or _Clocks(view, recv_buffers)
    low = np.ones(view.schedule.num_stages, dtype=np.int64)
    high = np.full_like(low, view.schedule.num_microbatches)
    while (low < high).any():
        middle = (low + high) // 2
        life = _life(view, ring_slots(middle, view.schedule.num_microbatches), name)
        unsafe = np.zeros(len(low), dtype=bool)
        unsafe[life.stage[_unsafe(view, clocks, life)[0]]] = True
        low = np.where(unsafe, np.minimum(middle + 1, high), low)
        high = np.where(unsafe, high, middle)
    return tuple(high.tolist())


@dataclass(frozen=True)
class _Life:
    """Values of one kind: columns of their slot, the action that writes each, and the last that reads it.

    `sends`: the reader is a send; `receives`: the writer is a receive. Both are then `direction`
    messages: 0 forward, 1 backward.
    """

    noun: str
    stage: np.ndarray
    microbatch: np.ndarray
    slot: np.ndarray
    writer: np.ndarray
    reader: np.ndarray
    direction: int = 0
    sends: bool = False
    receives: bool = False


def _life(view: View, slot: np.ndarray, name: str) -> _Life:
    """The values kept in the buffers called `name` of `Buffers`, when those of [stage, microbatch] are in `slot`."""
    forward, gradient = view.first(Kind.F), view.gradient
    weight = view.first(Kind.W)
    last = np.where(weight != NONE, weight, gradient)
    sent_forward, sent_back, received_forward, received_back = (view.first(kind) for kind in _MESSAGES)
    match name:
        case "activations":
            columns = ("the activations", forward, last, 0, False, False)
        case "outputs":
            # on one rank the next stage reads it, on the last stage the loss
            here = np.concatenate([forward[1:], gradient[-1:]])
            columns = ("the output", forward, np.where(sent_forward != NONE, sent_forward, here), 0, True, False)
        case "inputs":
            columns = ("the input", received_forward, last, 0, False, True)
        case "output_gradients":
            columns = ("the output's gradient", received_back, last, 1, False, True)
        case _:
            # nobody reads the first stage's
            here = np.concatenate([np.full((1, forward.shape[1]), NONE), gradient[:-1]])
            columns = ("the input's gradient", gradient, np.where(sent_back != NONE, sent_back, here), 1, True, False)
    noun, writer, reader, direction, sends, receives = columns
    stage, microbatch = np.nonzero((writer != NONE) & (reader != NONE))
    cell = stage, microbatch
    return _Life(noun, stage, microbatch, slot[cell], writer[cell], reader[cell], direction, sends, receives)


_MESSAGES = (Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B)


def _unsafe(view: View, clocks: _Clocks, life: _Life) -> tuple[np.ndarray, np.ndarray]:
    """(a value, the next value in its slot), as rows of `life`, where the second may be written before
    the first has been read."""
    old, new = _reuses(view, life)
    safe = _is_ordered(view, clocks, life, old, new)
    return old[~safe], new[~safe]


def _reuses(view: View, life: _Life) -> tuple[np.ndarray, np.ndarray]:
    """(a value, the next value in the same slot of the same rank), as rows of `life`."""
    order = np.lexsort((life.writer, life.slot, view.rank[life.writer]))
    old, new = order[:-1], order[1:]
    same = (life.slot[old] == life.slot[new]) & (view.rank[life.writer[old]] == view.rank[life.writer[new]])
    return old[same], new[same]


def _is_ordered(view: View, clocks: _Clocks, life: _Life, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Whether the last reader of each `old` value has ended before the writer of its `new` one starts."""
    reader, writer = life.reader[old], life.writer[new]
    ordered = np.zeros(len(old), dtype=bool)
    is_send = (
        np.isin(view.schedule.actions.kind[reader], (Kind.SEND_F, Kind.SEND_B))
        if life.sends
        else np.zeros(len(old), dtype=bool)
    )
    if life.receives:
        lane = clocks.lanes[life.direction]
        # Posted only when compute has gone past the reader, or filled only by something made after it.
        ordered = (lane.posted_after[writer] >= reader) | (
            clocks.known(lane.made_by[writer], view.rank[reader]) >= reader
        )
    else:
        ordered = reader < writer
    if is_send.any():
        lane = clocks.lanes[life.direction]
        received = lane.first_use[reader[is_send]]
        ordered[is_send] = clocks.known(writer[is_send], view.rank[received]) >= received
    return ordered


@dataclass(frozen=True)
class _Lane:
    """What the messages of one direction order, by index of their send or receive; other entries are NONE.

    `first_use[send]`: the first compute on the receiver's side that needs this message or one behind it on the lane.
    `made_by[receive]`: the last compute on the sender's side that made this message or one before it.
    `posted_after[receive]`: the compute action that must have ended before the receive is posted.
    """

    first_use: np.ndarray
    made_by: np.ndarray
    posted_after: np.ndarray


class _Clocks:
    """Which compute actions of other ranks have surely ended when a compute action starts."""

    def __init__(self, view: View, recv_buffers: int):
        self.view = view
        self.recv_buffers = recv_buffers
        self.compute = np.flatnonzero(_compute_mask(view))
        self.number = np.full(len(view.schedule) + 1, len(self.compute))  # the last entry is read through NONE
        self.number[self.compute] = np.arange(len(self.compute))

    @cached_property
    def lanes(self) -> tuple[_Lane, _Lane]:
        """The forward and the backward messages."""
        forward, backward = (self._lane(direction) for direction in (0, 1))
        return forward, backward

    def _lane(self, direction: int) -> _Lane:
        view, hops = self.view, self.view.hops[direction]
        both = hops.crossing & (hops.send != NONE) & (hops.receive != NONE)
        send, receive, maker, user = (table[both] for table in (hops.send, hops.receive, hops.maker, hops.user))
        order = np.lexsort((send, view.rank[receive], view.rank[send]))
        send, receive, maker, user = (column[order] for column in (send, receive, maker, user))
        key = view.rank[send].astype(np.int64) * view.schedule.num_ranks + view.rank[receive]
        size = len(view.schedule)
        columns = np.full((3, size), NONE, dtype=np.int64)
        columns[0, send] = _running(user, key, backwards=True)
        columns[1, receive] = _running(maker, key)
        earlier = np.arange(len(send)) - self.recv_buffers
        same = (earlier >= 0) & (key[np.maximum(earlier, 0)] == key)
        before = np.maximum.accumulate(np.where(_compute_mask(view), np.arange(size), -1))
        posted = before[receive[np.maximum(earlier, 0)]]
        same &= posted >= view.schedule.offsets[view.rank[receive]]
        columns[2, receive] = np.where(same, posted, NONE)
        return _Lane(*columns)

    def known(self, at: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """For each compute action `at`, the last compute action of `rank` that has surely ended before it
        starts or is the same."""
        result = np.full(len(at), NONE, dtype=np.int64)
        width = max(1, _MAX_CLOCK_ENTRIES // max(1, len(self.compute)))
        for first in range(0, self.view.schedule.num_ranks, width):
            columns = range(first, min(first + width, self.view.schedule.num_ranks))
            asked = np.flatnonzero((rank >= columns.start) & (rank < columns.stop))
            if len(asked):
                result[asked] = self._table(columns)[self.number[at[asked]], rank[asked] - first]
        return result

    def _table(self, ranks: range) -> np.ndarray:
        """[compute action, rank] -> `known`, for an interval of ranks; the last row stands for
        no action and is NONE."""
        if ranks not in self._tables:
            self._tables.clear()
            self._tables[ranks] = self._walk(ranks)
        return self._tables[ranks]

    @cached_property
    def _tables(self) -> dict[range, np.ndarray]:
        return {}

    @cached_property
    def _needs(self) -> np.ndarray:
        """[forward or backward input, compute action] -> number of a compute action of another rank that
        ends before it starts."""
        view, nothing = self.view, len(self.compute)
        needs = np.full((2, len(view.schedule)), nothing)
        for row, hops, lane in zip((0, 1), view.hops, self.lanes, strict=True):
            both = hops.crossing & (hops.receive != NONE) & (hops.user != NONE)
            needs[row, hops.user[both]] = self.number[lane.made_by[hops.receive[both]]]
        return needs[:, self.compute]

    def _walk(self, ranks: range) -> np.ndarray:
        """Runs all ranks' compute in list order, as many actions at once as can go, and passes on what each knows."""
        view, needs = self.view, self._needs
        num_compute, num_ranks = len(self.compute), view.schedule.num_ranks
        table = np.full((num_compute + 1, len(ranks)), NONE, dtype=np.int32)
        done = np.zeros(num_compute + 1, dtype=bool)
        done[num_compute] = True
        state = np.full((num_ranks, len(ranks)), NONE, dtype=np.int32)
        bounds = np.searchsorted(self.compute, view.schedule.offsets)
        cursor, stop = bounds[:-1].copy(), bounds[1:]
        active = np.flatnonzero(cursor < stop)
        while len(active):
            head = cursor[active]
            ready = done[needs[0, head]] & done[needs[1, head]]
            assert ready.any(), "asked of schedules that can run"
            rank, now = active[ready], head[ready]
            clock = np.maximum(np.maximum(state[rank], table[needs[0, now]]), table[needs[1, now]])
            own = np.flatnonzero((rank >= ranks.start) & (rank < ranks.stop))
            clock[own, rank[own] - ranks.start] = self.compute[now[own]]
            state[rank] = table[now] = clock
            done[now] = True
            cursor[rank] += 1
            active = active[cursor[active] < stop[active]]
        return table


def _compute_mask(view: View) -> np.ndarray:
    return np.isin(view.schedule.actions.kind, [int(kind) for kind in COMPUTE])


def _running(values: np.ndarray, key: np.ndarray, *, backwards: bool = False) -> np.ndarray:
    """Within each run of equal keys the largest value so far; backwards, the smallest from here on."""
    if not len(values):
        return values
    starts = np.r_[True, key[1:] != key[:-1]]
    span = int(values.max()) + 2
    number = np.cumsum(starts)
    if not backwards:
        return np.maximum.accumulate(values + number * span) - number * span
    shifted = (values + number * span)[::-1]
    return np.minimum.accumulate(shifted)[::-1] - number * span


BUFFER_RULES = (
    Rule(
        "buffer-reuse",
        "Memory is filled again only after its last reader, a send included, has surely ended.",
        "Use more slots, or wait for the send before the slot is filled again.",
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0STEP\n"
        "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1STEP\n",
        buffer_reuse,
        "buffers",
        Facts(buffers=Buffers(outputs=(1, 2))),
    ),
)
