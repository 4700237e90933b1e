"""The pass that adds SEND and RECV, in an order that cannot deadlock.

Messages are placed along one global order of events: a compute action when it starts, a message (its SEND and its
RECV together) when its producer ends, times being those of a run with unit costs (F=I=W=1, B=2, messages 0). Each
rank's list is that order restricted to the rank. So executing the lists blocking and in order follows the global
order and cannot deadlock, whatever the times really are, and sends and receives of every pair of ranks have the
same order. Nothing in this depends on the placement. Where a stage has two replicas, their REDUCE_GRADs are one
event of that order too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..base.errors import ScheduleError
from .action import ActionArray, Kind
from .schedule import Schedule

_DURATION = {Kind.F: 1, Kind.I: 1, Kind.W: 1, Kind.B: 2, Kind.OVERLAP_F_B: 3}


class UnrunnableError(ScheduleError):
    """Compute actions wait for each other in a circle. `cycle` holds their indices in `schedule` (the given one, or
    that with what earlier passes of `lower` added): each waits for the next."""

    def __init__(self, schedule: Schedule, cycle: tuple[int, ...]):
        self.schedule = schedule
        self.cycle = cycle
        steps = [f"{schedule.actions[index]} (rank {schedule.pp_rank[index]})" for index in cycle]
        super().__init__(f"{schedule.name}: this order can never run: {' waits for '.join([*steps, steps[0]])}.")


def add_messages(schedule: Schedule) -> Schedule:
    """SEND and RECV for every value that crosses ranks; see the module text for their places.

    Raises `ScheduleError` when compute actions are missing or doubled, `UnrunnableError` when
    their order can never run.
    """
    flow = _dataflow(schedule)
    start, end = _run(schedule, flow)
    messages = _messages(schedule, flow)
    if not len(messages.producer):
        return schedule
    rank = np.concatenate([schedule.pp_rank, messages.source, messages.destination])
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rank, minlength=schedule.num_ranks))])
    time = end[messages.producer]
    order = _order(schedule, messages, rank, np.concatenate([start, time, time]))
    columns = (column[order] for column in _columns(schedule.actions, messages))
    return Schedule(schedule.name, schedule.placement, ActionArray(*columns), offsets)


def unit_times(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of every action when F, I and W take 1, B 2, a pair 3 and everything else nothing.
    Raises as `add_messages`."""
    return _run(schedule, _dataflow(schedule))


@dataclass(frozen=True)
class _Dataflow:
    """Who makes what: indices into the schedule's actions. `len(schedule)` stands for "nothing needed"."""

    forward: np.ndarray  # [stage, microbatch] -> the F (or pair) that makes the stage's output
    gradient: np.ndarray  # [stage, microbatch] -> the B or I (or pair) that makes the gradient of the stage's input
    needs: tuple[np.ndarray, np.ndarray]  # per action: what it waits for besides its rank's previous action


@dataclass(frozen=True)
class _Messages:
    """Columns, one row per value that crosses ranks, forward values first. `stage` is the sender's."""

    producer: np.ndarray
    backward: np.ndarray
    stage: np.ndarray
    microbatch: np.ndarray
    source: np.ndarray
    destination: np.ndarray


def _dataflow(schedule: Schedule) -> _Dataflow:
    actions, num_actions, num_stages = schedule.actions, len(schedule), schedule.num_stages
    paired = actions.kind == Kind.OVERLAP_F_B
    is_forward = (actions.kind == Kind.F) | paired
    is_gradient = (actions.kind == Kind.B) | (actions.kind == Kind.I) | paired
    backward_stage, backward_microbatch = actions.stage, actions.microbatch
    if paired.any():
        backward_stage = np.where(paired, actions.pair_stage, actions.stage)
        backward_microbatch = np.where(paired, actions.pair_microbatch, actions.microbatch)
    forward = _table(schedule, is_forward, actions.stage, actions.microbatch, "forward")
    gradient = _table(schedule, is_gradient, backward_stage, backward_microbatch, "backward")

    needs_forward = np.full(num_actions, num_actions, dtype=np.int32)
    later = np.flatnonzero(is_forward & (actions.stage > 0))
    needs_forward[later] = forward[actions.stage[later] - 1, actions.microbatch[later]]

    needs_gradient = np.full(num_actions, num_actions, dtype=np.int32)
    at_loss = backward_stage == num_stages - 1
    loss = np.flatnonzero(is_gradient & at_loss)
    needs_gradient[loss] = forward[num_stages - 1, backward_microbatch[loss]]
    earlier = np.flatnonzero(is_gradient & ~at_loss)
    needs_gradient[earlier] = gradient[backward_stage[earlier] + 1, backward_microbatch[earlier]]
    weight = np.flatnonzero(actions.kind == Kind.W)
    needs_gradient[weight] = gradient[actions.stage[weight], actions.microbatch[weight]]
    reductions, before_counterpart = _replica_reductions(schedule)
    needs_gradient[reductions] = before_counterpart
    return _Dataflow(forward, gradient, (needs_forward, needs_gradient))


def _replica_reductions(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """The REDUCE_GRADs of stages with two replicas, and for each the action listed before the other
    replica's, where there is one."""
    second = np.array([ranks[1] if len(ranks) == 2 else -1 for ranks in schedule.placement.ranks])
    first = np.array([ranks[0] for ranks in schedule.placement.ranks])
    index = (
        np.flatnonzero(schedule.actions.kind == Kind.REDUCE_GRAD)
        if (second >= 0).any()
        else np.zeros(0, dtype=np.int64)
    )
    index = index[second[schedule.actions.stage[index]] >= 0]
    stage, rank = schedule.actions.stage[index], schedule.pp_rank[index]
    at = np.full((schedule.num_ranks, schedule.num_stages), -1, dtype=np.int64)
    at[rank, stage] = index
    counterpart_rank = np.where(rank == first[stage], second[stage], first[stage])
    counterpart = at[counterpart_rank, stage]
    has_one_before = counterpart > schedule.offsets[counterpart_rank]
    return index[has_one_before], counterpart[has_one_before] - 1


def _table(schedule: Schedule, chosen: np.ndarray, stage: np.ndarray, microbatch: np.ndarray, what: str) -> np.ndarray:
    """[stage, microbatch] -> the index of the one chosen action; refuses missing and doubled ones."""
    shape = (schedule.num_stages, schedule.num_microbatches)
    index = np.flatnonzero(chosen)
    cell = stage[index].astype(np.int64) * shape[1] + microbatch[index]
    count = np.bincount(cell, minlength=shape[0] * shape[1]).reshape(shape)
    if (count != 1).any():
        bad_stage, bad_microbatch = (int(i) for i in np.argwhere(count != 1)[0])
        raise ScheduleError(
            f"{schedule.name}: stage {bad_stage} runs the {what} of microbatch {bad_microbatch} "
            f"{count[bad_stage, bad_microbatch]} times, "
            "so it cannot be lowered. Every stage runs every microbatch once; `verify` lists all that is wrong."
        )
    table = np.empty(shape[0] * shape[1], dtype=np.int32)
    table[cell] = index
    return table.reshape(shape)


def _run(schedule: Schedule, flow: _Dataflow) -> tuple[np.ndarray, np.ndarray]:
    """`unit_times`. Advances all ranks that can run their next action at once."""
    num_actions = len(schedule)
    duration_of_kind = np.array([_DURATION.get(kind, 0) for kind in Kind], dtype=np.int32)
    duration = duration_of_kind[schedule.actions.kind]
    start = np.zeros(num_actions, dtype=np.int32)
    end = np.full(num_actions + 1, -1, dtype=np.int32)
    end[num_actions] = 0
    cursor, stop = schedule.offsets[:-1].copy(), schedule.offsets[1:]
    free = np.zeros(schedule.num_ranks, dtype=np.int32)
    needs_forward, needs_gradient = flow.needs
    active = np.flatnonzero(cursor < stop)
    while len(active):
        head = cursor[active]
        forward_end, gradient_end = end[needs_forward[head]], end[needs_gradient[head]]
        # Unknown ends are -1, so the sign bit of either says that the action is not ready.
        ready = ((forward_end | gradient_end) >= 0).nonzero()[0]
        if not len(ready):
            raise UnrunnableError(schedule, _cycle(schedule, flow, cursor, end))
        rank, index = active[ready], head[ready]
        begin = np.maximum(np.maximum(forward_end[ready], gradient_end[ready]), free[rank])
        start[index] = begin
        free[rank] = end[index] = begin + duration[index]
        cursor[rank] += 1
        active = active[cursor[active] < stop[active]]
    return start, end[:num_actions]


def _cycle(schedule: Schedule, flow: _Dataflow, cursor: np.ndarray, end: np.ndarray) -> tuple[int, ...]:
    """Indices of actions of which each waits for the next: a needed value for its maker, a maker for the action
    its rank is stuck at."""
    rank_of = schedule.pp_rank
    index = int(cursor[cursor < schedule.offsets[1:]][0])
    path: list[int] = []
    while index not in path:
        path.append(index)
        maker = next(int(needs[index]) for needs in flow.needs if end[needs[index]] < 0)
        if maker in path:
            return tuple(path[path.index(maker) :])
        head = int(cursor[rank_of[maker]])
        if head != maker:
            path.append(maker)
        index = head
    return tuple(path[path.index(index) :])


def _messages(schedule: Schedule, flow: _Dataflow) -> _Messages:
    rank = schedule.pp_rank
    parts = []
    for table, backward in ((flow.forward, False), (flow.gradient, True)):
        senders, receivers = (table[1:], table[:-1]) if backward else (table[:-1], table[1:])
        crossing = rank[senders] != rank[receivers]
        row, microbatch = (axis.astype(np.int32) for axis in np.nonzero(crossing))
        producer, consumer = senders[crossing], receivers[crossing]
        parts.append(
            (
                producer,
                np.full(len(row), backward),
                row + np.int32(backward),
                microbatch,
                rank[producer],
                rank[consumer],
            )
        )
    return _Messages(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _order(schedule: Schedule, messages: _Messages, rank: np.ndarray, when: np.ndarray) -> np.ndarray:
    """The order of actions, sends and receives (in which the arguments list them) by rank and time.

    Messages come before actions that start at the same moment, and messages of one moment in one order on all ranks: by
    direction, sending stage and replica, which identify them, as a replica of a stage ends one action at a time. Even
    stages come before odd ones: then executing blocking, neighbours exchange in pairs and no rank waits for a row of
    others to pass their messages on.
    """
    num_ties = 8 * schedule.num_stages + 1
    half = (schedule.num_microbatches + 1) // 2
    turn = 2 * messages.backward + messages.stage % 2
    of_message = 2 * (turn * np.int32(schedule.num_stages) + messages.stage) + (messages.microbatch >= half)
    key = rank.astype(np.int64)
    key *= int(when.max()) + 1
    key += when
    key *= num_ties
    key += np.concatenate([np.full(len(schedule), num_ties - 1, dtype=np.int32), of_message, of_message])
    return np.argsort(key, kind="stable")  # the keys are a few sorted runs, which a stable sort only merges


def _columns(actions: ActionArray, messages: _Messages) -> Iterator[np.ndarray]:
    """The columns of the actions, then of all sends, then of all receives, made one at a time
    because they may be large."""
    send = np.where(messages.backward, np.int8(Kind.SEND_B), np.int8(Kind.SEND_F))
    none = np.full(2 * len(send), -1, dtype=np.int32)
    yield np.concatenate(
        [actions.stage, messages.stage, messages.stage + np.where(messages.backward, np.int32(-1), np.int32(1))]
    )
    yield np.concatenate([actions.kind, send, send + np.int8(1)])  # each RECV is numbered after its SEND
    yield np.concatenate([actions.microbatch, messages.microbatch, messages.microbatch])
    yield np.concatenate([actions.pair_stage, none])
    yield np.concatenate([actions.pair_microbatch, none])
