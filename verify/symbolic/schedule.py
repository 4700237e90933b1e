"""A lowered schedule run on values: what every action really reads, and what every stage's
gradient is really the sum of.

Each pipeline rank walks its list. A value is a digest of 64 bits; F, B, I and W are functions of what lies in their
rank's memory when they run, and messages are delivered as a wire does it: first in, first out between two ranks in one
direction, whatever their labels. One device computes the same functions on the right values, stage by stage.

Rows of a schedule are the same on all tensor- and data-parallel ranks and no action names such a rank, so what
holds for one microbatch index holds for the samples that each of them has there. Everything is arrays: one step of
the interpreter is a stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...core.schedule.action import Kind
from ...core.schedule.schedule import Schedule
from ..schedule.rules.view import View

ABSENT = -1
"""Stands for the row of an action that is not there."""
_FORWARD, _GRADIENT, _WEIGHT, _TOKENS, _TARGETS, _SHARD = (np.uint64(each) for each in range(11, 17))


def mixed(tag: np.uint64, *values: np.ndarray) -> np.ndarray:
    """A hash of arrays of digests, element by element: rounds of the splitmix64 finalizer (Steele, Lea &
    Flood 2014, figure 17)."""
    state = np.full(
        np.broadcast_shapes(*(value.shape for value in values)), tag * np.uint64(0x9E3779B1), dtype=np.uint64
    )
    for value in values:
        state = (state + np.uint64(0x9E3779B97F4A7C15)) ^ value
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return state


@dataclass(frozen=True)
class OneDevice:
    """Digests that are right: of every stage's output, the gradient of its input and of its weights, all
    `[stage, microbatch]`."""

    forward: np.ndarray
    gradient: np.ndarray
    weight: np.ndarray

    @classmethod
    def of(cls, num_stages: int, num_microbatches: int) -> OneDevice:
        """All stages one after the other, forward and back."""
        tables = [np.zeros((num_stages, num_microbatches), dtype=np.uint64) for _ in range(3)]
        forward, gradient, weight = tables
        value = microbatch_symbols(_TOKENS, np.arange(num_microbatches))
        for stage in range(num_stages):
            value = forward[stage] = mixed(_FORWARD, _of_stage(stage), value)
        value = microbatch_symbols(_TARGETS, np.arange(num_microbatches))
        for stage in reversed(range(num_stages)):
            weight[stage] = mixed(_WEIGHT, _of_stage(stage), forward[stage], value)
            value = gradient[stage] = mixed(_GRADIENT, _of_stage(stage), forward[stage], value)
        return cls(*tables)


def microbatch_symbols(tag: np.uint64, microbatch: np.ndarray) -> np.ndarray:
    """The tokens or the targets of microbatches."""
    return mixed(tag, microbatch.astype(np.uint64))


def _of_stage(stage: int) -> np.ndarray:
    return np.array([stage], dtype=np.uint64)


class ScheduleRun:
    """The interpreter's tables over the *rows* of a schedule: its actions with overlapped pairs taken
    apart (`View.parts`)."""

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self.view = View(schedule)
        self.kind, stage, microbatch, index = self.view.parts
        self.stage, self.microbatch, self.index = (column.astype(np.int64) for column in (stage, microbatch, index))
        self.rank = self.view.rank[index].astype(np.int64)
        self.right = OneDevice.of(schedule.num_stages, schedule.num_microbatches)

    def rows(self, *kinds: Kind) -> np.ndarray:
        """Rows of some kinds, ascending."""
        return np.flatnonzero(np.isin(self.kind, kinds))

    def cell(self, rows: np.ndarray, stage_step: int = 0) -> np.ndarray:
        """(rank, stage, microbatch) of rows as one number; `stage_step` looks at a neighbour stage."""
        stages, microbatches = self.schedule.num_stages, self.schedule.num_microbatches
        return (self.rank[rows] * stages + self.stage[rows] + stage_step) * microbatches + self.microbatch[rows]

    def last_before(
        self, writers: np.ndarray, written: np.ndarray, readers: np.ndarray, read: np.ndarray
    ) -> np.ndarray:
        """[row] -> for each reader the writer of the cell it reads that ran last before it, else ABSENT."""
        length = len(self.schedule) + 1
        times = written * length + self.index[writers]
        order = np.argsort(times, kind="stable")
        found = np.searchsorted(times[order], read * length + self.index[readers]) - 1
        known = found >= 0
        known[known] = written[order][found[known]] == read[known]
        result = np.full(len(self.kind), ABSENT)
        result[readers[known]] = writers[order][found[known]]
        return result

    @cached_property
    def delivered(self) -> np.ndarray:
        """[row] -> for each receive the send whose message arrives, else ABSENT: the k-th of one is
        the k-th of the other."""
        result = np.full(len(self.kind), ABSENT)
        for send, receive, step in ((Kind.SEND_F, Kind.RECV_F, 1), (Kind.SEND_B, Kind.RECV_B, -1)):
            sends, sent = self._numbered(self.rows(send), step, sending=True)
            receives, awaited = self._numbered(self.rows(receive), -step, sending=False)
            _, from_sends, from_receives = np.intersect1d(sent, awaited, assume_unique=True, return_indices=True)
            result[receives[from_receives]] = sends[from_sends]
        return result

    def _numbered(self, rows: np.ndarray, step: int, *, sending: bool) -> tuple[np.ndarray, np.ndarray]:
        """(rows, their channel and number on it as one number), without those that have no neighbour stage."""
        rows = rows[(self.stage[rows] + step >= 0) & (self.stage[rows] + step < self.schedule.num_stages)]
        peer = self.view.owner(self.stage[rows] + step, self.microbatch[rows]).astype(np.int64)
        source, destination = (self.rank[rows], peer) if sending else (peer, self.rank[rows])
        channel = source * self.schedule.num_ranks + destination
        order = np.argsort(channel, kind="stable")
        channel, rows = channel[order], rows[order]
        first = np.searchsorted(channel, channel)
        return rows, channel * (len(self.schedule) + 1) + np.arange(len(rows)) - first

    @cached_property
    def forward_inputs(self) -> np.ndarray:
        """[row] -> for each forward of a later stage the forward whose output it reads."""
        makers = self.rows(Kind.F)
        return self._inputs(makers, makers[self.stage[makers] > 0], (Kind.SEND_F, Kind.RECV_F), 1)

    @cached_property
    def gradient_inputs(self) -> np.ndarray:
        """[row] -> for each backward of an earlier stage the backward whose gradient it reads."""
        makers = self.rows(Kind.B, Kind.I)
        readers = makers[self.stage[makers] < self.schedule.num_stages - 1]
        return self._inputs(makers, readers, (Kind.SEND_B, Kind.RECV_B), -1)

    def _inputs(self, makers: np.ndarray, readers: np.ndarray, messages: tuple[Kind, Kind], step: int) -> np.ndarray:
        """Through memory from neighbour stages on one rank, and through messages from others."""
        sends, receives = self.rows(messages[0]), self.rows(messages[1])
        carried = self.last_before(makers, self.cell(makers), sends, self.cell(sends))
        passes = (self.stage[makers] + step >= 0) & (self.stage[makers] + step < self.schedule.num_stages)
        passes[passes] = (
            self.view.owner(self.stage[makers[passes]] + step, self.microbatch[makers[passes]])
            == self.rank[makers[passes]]
        )
        local = makers[passes]
        writers = np.concatenate([receives, local])
        written = np.concatenate([self.cell(receives), self.cell(local, step)])
        source = self.last_before(writers, written, readers, self.cell(readers))
        by_message = np.flatnonzero((source != ABSENT) & np.isin(self.kind[source], messages[1]))
        send = self.delivered[source[by_message]]
        source[by_message] = np.where(send == ABSENT, ABSENT, carried[send])
        return source

    @cached_property
    def saved(self) -> np.ndarray:
        """[row] -> for each backward the forward of its stage whose saved values it uses."""
        makers, readers = self.rows(Kind.F), self.rows(Kind.B, Kind.I)
        return self.last_before(makers, self.cell(makers), readers, self.cell(readers))

    @cached_property
    def deferred(self) -> np.ndarray:
        """[row] -> for each W the I that left its work."""
        makers, readers = self.rows(Kind.I), self.rows(Kind.W)
        return self.last_before(makers, self.cell(makers), readers, self.cell(readers))

    @cached_property
    def has_weights(self) -> np.ndarray:
        """[row] -> False for forwards and backwards of a stage whose parameters lie apart
        (RESHARD, no UNSHARD since)."""
        result = np.ones(len(self.kind), dtype=bool)
        changes, users = self.rows(Kind.UNSHARD, Kind.RESHARD), self.rows(Kind.F, Kind.B, Kind.I)
        if len(changes):
            changed, used = (self.rank[rows] * self.schedule.num_stages + self.stage[rows] for rows in (changes, users))
            last = self.last_before(changes, changed, users, used)[users]
            gathered = (last != ABSENT) & (self.kind[last] == Kind.UNSHARD)
            result[users] = gathered | ~np.isin(used, changed)
        return result

    @cached_property
    def values(self) -> np.ndarray:
        """[row] -> the digest that each F (output), B and I (gradient of the input) makes; what was never made is 0."""
        values = np.zeros(len(self.kind) + 1, dtype=np.uint64)  # the last one stands for ABSENT
        for stage, rows in self._by_stage(self.rows(Kind.F)):
            arrived = (
                microbatch_symbols(_TOKENS, self.microbatch[rows]) if stage == 0 else values[self.forward_inputs[rows]]
            )
            values[rows] = self._computed(_FORWARD, stage, rows, arrived)
        for stage, rows in reversed(list(self._by_stage(self.rows(Kind.B, Kind.I)))):
            values[rows] = self._computed(
                _GRADIENT, stage, rows, values[self.saved[rows]], self._arrived_gradient(stage, rows, values)
            )
        return values

    @cached_property
    def contributions(self) -> np.ndarray:
        """[row] -> the digest of the weight gradient that each B and W adds; what was never made is 0."""
        made = np.zeros(len(self.kind) + 1, dtype=np.uint64)
        for stage, rows in self._by_stage(self.rows(Kind.B, Kind.I)):
            arrived = self._arrived_gradient(stage, rows, self.values)
            made[rows] = self._computed(_WEIGHT, stage, rows, self.values[self.saved[rows]], arrived)
        weight = self.rows(Kind.W)
        made[weight] = made[self.deferred[weight]]
        return made

    def _arrived_gradient(self, stage: int, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        """The gradient of a stage's output: for the last stage it comes from the targets of the microbatch
        that the action names."""
        if stage == self.schedule.num_stages - 1:
            return microbatch_symbols(_TARGETS, self.microbatch[rows])
        return values[self.gradient_inputs[rows]]

    def _computed(self, tag: np.uint64, stage: int, rows: np.ndarray, *inputs: np.ndarray) -> np.ndarray:
        value = mixed(tag, _of_stage(stage), *inputs)
        return np.where(self.has_weights[rows], value, mixed(_SHARD, value))

    def _by_stage(self, rows: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        order = np.argsort(self.stage[rows], kind="stable")
        rows = rows[order]
        bounds = np.searchsorted(self.stage[rows], np.arange(self.schedule.num_stages + 1))
        return ((stage, rows[bounds[stage] : bounds[stage + 1]]) for stage in range(self.schedule.num_stages))
