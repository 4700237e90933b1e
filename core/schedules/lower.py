"""`lower`: from compute actions to everything a rank does in a step: messages, gradient reductions, the optimizer step.

Messages are placed along one global order of events: a compute action when it starts, a message (its SEND and its RECV together)
when its producer ends, times being those of a run with unit costs (F=I=W=1, B=2, messages 0). Each rank's list is that order
restricted to the rank. So executing the lists blocking and in order follows the global order and cannot deadlock, whatever the
times really are, and sends and receives of every pair of ranks have the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..action import ActionArray, Kind
from ..errors import ScheduleError
from ..schedule import Schedule


class UnrunnableError(ScheduleError):
    """Compute actions wait for each other in a circle. `cycle` holds their indices in `schedule` (the given one, or that with its
    gradient reductions): each waits for the next."""

    def __init__(self, schedule: Schedule, cycle: tuple[int, ...]):
        self.schedule = schedule
        self.cycle = cycle
        steps = [f"{schedule.actions[index]} (rank {schedule.pp_rank[index]})" for index in cycle]
        super().__init__(f"{schedule.name}: this order can never run: {' waits for '.join([*steps, steps[0]])}.")


_DURATION = {Kind.F: 1, Kind.I: 1, Kind.W: 1, Kind.B: 2, Kind.OVERLAP_F_B: 3}


def lower(schedule: Schedule) -> Schedule:
    """The schedule with all it lacks: SEND and RECV where a stage's neighbour is on another rank, REDUCE_GRAD after each stage's
    last backward, STEP at the end of each rank.

    What is there already stays as it is, so a file with messages keeps them, and a lowered schedule is returned unchanged.
    Raises `ScheduleError` when compute actions are missing, doubled, or in an order that can never run.
    """
    kind = schedule.actions.kind
    if not (kind == Kind.REDUCE_GRAD).any():
        schedule = add_reductions(schedule)
    if not np.isin(kind, (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)).any():
        schedule = add_messages(schedule)
    if not (kind == Kind.STEP).any():
        schedule = add_steps(schedule)
    return schedule


def add_reductions(schedule: Schedule) -> Schedule:
    """REDUCE_GRAD of a stage right after the last action on its rank that adds to its weight gradients (B or W)."""
    actions = schedule.actions
    adds = np.isin(actions.kind, (Kind.B, Kind.W, Kind.OVERLAP_F_B))
    index = np.flatnonzero(adds)
    stage = np.where(actions.pair_stage >= 0, actions.pair_stage, actions.stage)[index].astype(np.int64)
    rank = schedule.pp_rank[index]
    # np.unique returns the first occurrence of each (rank, stage), which in reversed order is the last action.
    keys, where = np.unique((rank * schedule.num_stages + stage)[::-1], return_index=True)
    last = index[::-1][where]
    order = np.argsort(last, kind="stable")
    on_rank, of_stage = np.divmod(keys[order], schedule.num_stages)
    return _insert(schedule, last[order] + 1, of_stage, Kind.REDUCE_GRAD, rank_of=on_rank)


def add_steps(schedule: Schedule) -> Schedule:
    """One STEP at the end of each rank that holds a stage, written with the lowest of its stages."""
    stages = np.full(schedule.num_ranks, -1)
    for stage in reversed(range(schedule.num_stages)):
        for rank in schedule.placement.ranks[stage]:
            stages[rank] = stage
    ranks = np.flatnonzero(stages >= 0)
    return _insert(schedule, schedule.offsets[1:][ranks], stages[ranks], Kind.STEP, rank_of=ranks)


def add_messages(schedule: Schedule) -> Schedule:
    """SEND and RECV for every value that crosses ranks; see the module text for their places."""
    flow = _dataflow(schedule)
    start, end = _unit_times(schedule, flow)
    messages = _messages(schedule, flow)
    if not len(messages.producer):
        return schedule
    time = end[messages.producer]
    rank = np.concatenate([schedule.pp_rank, messages.source, messages.destination])
    order = _order(schedule, messages, rank, np.concatenate([start, time, time]))
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rank, minlength=schedule.num_ranks))])
    columns = (column[order] for column in _with_messages(schedule.actions, messages))
    return Schedule(schedule.name, schedule.placement, ActionArray(*columns), offsets)


def _order(schedule: Schedule, messages: _Messages, rank: np.ndarray, when: np.ndarray) -> np.ndarray:
    """The order of actions, sends and receives (in which the arguments list them) by rank and time.

    Messages come before actions that start at the same moment, and messages of one moment in one order on all ranks: by direction
    and sending stage, which identify them, as a stage ends one action at a time.
    """
    num_ties = 2 * schedule.num_stages + 1
    of_message = np.where(messages.backward, schedule.num_stages, 0) + messages.stage
    tie = np.concatenate([np.full(len(schedule), num_ties - 1), of_message, of_message])
    key = (rank.astype(np.int64) * (int(when.max()) + 1) + when) * num_ties + tie
    return np.argsort(key, kind="stable")  # the keys are a few sorted runs, which a stable sort only merges


def _with_messages(actions: ActionArray, messages: _Messages) -> tuple[np.ndarray, ...]:
    """The columns of the actions, then of all sends, then of all receives."""
    none = np.full(2 * len(messages.stage), -1, dtype=np.int32)
    send = np.where(messages.backward, np.int8(Kind.SEND_B), np.int8(Kind.SEND_F))
    receive = np.where(messages.backward, np.int8(Kind.RECV_B), np.int8(Kind.RECV_F))
    return (
        np.concatenate([actions.stage, messages.stage, messages.stage + np.where(messages.backward, -1, 1)]),
        np.concatenate([actions.kind, send, receive]),
        np.concatenate([actions.microbatch, messages.microbatch, messages.microbatch]),
        np.concatenate([actions.pair_stage, none]),
        np.concatenate([actions.pair_microbatch, none]),
    )


@dataclass(frozen=True)
class _Dataflow:
    """Who makes what: indices into the schedule's actions. `len(schedule)` stands for "nothing needed"."""

    forward: np.ndarray  # [stage, microbatch] -> the F (or pair) that makes the stage's output
    gradient: np.ndarray  # [stage, microbatch] -> the B or I (or pair) that makes the gradient of the stage's input
    needs: tuple[np.ndarray, np.ndarray]  # per action: the producers it waits for


@dataclass(frozen=True)
class _Messages:
    """Columns, one row per value that crosses ranks. `stage` is the sender's."""

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
    is_gradient = np.isin(actions.kind, (Kind.B, Kind.I)) | paired
    backward_stage = np.where(paired, actions.pair_stage, actions.stage)
    backward_microbatch = np.where(paired, actions.pair_microbatch, actions.microbatch)
    forward = _table(schedule, is_forward, actions.stage, actions.microbatch, "forward")
    gradient = _table(schedule, is_gradient, backward_stage, backward_microbatch, "backward")

    needs_forward = np.full(num_actions, num_actions)
    later = is_forward & (actions.stage > 0)
    needs_forward[later] = forward[actions.stage[later] - 1, actions.microbatch[later]]

    needs_gradient = np.full(num_actions, num_actions)
    loss = is_gradient & (backward_stage == num_stages - 1)
    needs_gradient[loss] = forward[num_stages - 1, backward_microbatch[loss]]
    earlier = is_gradient & ~loss
    needs_gradient[earlier] = gradient[backward_stage[earlier] + 1, backward_microbatch[earlier]]
    weight = actions.kind == Kind.W
    needs_gradient[weight] = gradient[actions.stage[weight], actions.microbatch[weight]]
    return _Dataflow(forward, gradient, (needs_forward, needs_gradient))


def _table(schedule: Schedule, chosen: np.ndarray, stage: np.ndarray, microbatch: np.ndarray, what: str) -> np.ndarray:
    """[stage, microbatch] -> the index of the one chosen action; refuses missing and doubled ones."""
    shape = (schedule.num_stages, schedule.num_microbatches)
    stage, microbatch = stage[chosen], microbatch[chosen]
    count = np.bincount(stage.astype(np.int64) * shape[1] + microbatch, minlength=shape[0] * shape[1]).reshape(shape)
    if (count != 1).any():
        bad_stage, bad_microbatch = (int(i) for i in np.argwhere(count != 1)[0])
        raise ScheduleError(
            f"{schedule.name}: stage {bad_stage} runs the {what} of microbatch {bad_microbatch} {count[bad_stage, bad_microbatch]} times, "
            "so it cannot be lowered. Every stage runs every microbatch once; `check` lists all that is wrong."
        )
    table = np.empty(shape, dtype=np.int64)
    table[stage, microbatch] = np.flatnonzero(chosen)
    return table


def _unit_times(schedule: Schedule, flow: _Dataflow) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of every action with unit costs. Advances all ranks that can run their next action at once."""
    num_actions = len(schedule)
    duration_of_kind = np.array([_DURATION.get(kind, 0) for kind in Kind])
    duration = duration_of_kind[schedule.actions.kind]
    start = np.zeros(num_actions, dtype=np.int64)
    end = np.full(num_actions + 1, -1, dtype=np.int64)
    end[num_actions] = 0
    cursor, stop = schedule.offsets[:-1].copy(), schedule.offsets[1:]
    free = np.zeros(schedule.num_ranks, dtype=np.int64)
    needs_forward, needs_gradient = flow.needs
    active = np.flatnonzero(cursor < stop)
    while len(active):
        head = cursor[active]
        forward_end, gradient_end = end[needs_forward[head]], end[needs_gradient[head]]
        ready = np.flatnonzero((forward_end >= 0) & (gradient_end >= 0))
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
    """Indices of actions of which each waits for the next: a needed value for its maker, a maker for the action its rank is stuck at."""
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
        row, microbatch = np.nonzero(crossing)
        producer, consumer = senders[crossing], receivers[crossing]
        parts.append((producer, np.full(len(row), backward), row + int(backward), microbatch, rank[producer], rank[consumer]))
    return _Messages(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _insert(schedule: Schedule, before: np.ndarray, stage: np.ndarray, kind: Kind, *, rank_of: np.ndarray) -> Schedule:
    """The schedule with actions without a microbatch inserted before the given (ascending) indices, in rows `rank_of`."""
    actions = schedule.actions
    none = np.full(len(before), -1)
    values = (stage, np.full(len(before), kind), none, none, none)
    columns = [np.insert(column, before, value) for column, value in zip(actions.columns, values, strict=True)]
    added = np.bincount(rank_of, minlength=schedule.num_ranks)
    offsets = schedule.offsets + np.concatenate([[0], np.cumsum(added)])
    return Schedule(schedule.name, schedule.placement, ActionArray(*columns), offsets)
