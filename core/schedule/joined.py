"""1F1B and GPipe over stages that need not be a line: branches that join on their way to the last stage
(`core.plan.plan.ModularPlan`).

Every stage lies on a pipeline rank of its own.

A stage's place in 1F1B is its depth, the stages on the way from it to the last: so many forwards it runs
before its first backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .action import Action, Kind
from .lower import lower
from .placement import Placement
from .rows import one_forward_one_backward
from .schedule import Schedule

Value = tuple[Kind, int, int | None]
"""A forward or a backward: kind, stage, microbatch."""

_DURATION = {Kind.F: 1, Kind.B: 2}


def joined_schedule(name: str, placement: Placement) -> Schedule:
    """The lowered schedule `name`, `1F1B` or `GPipe`."""
    assert name in ("1F1B", "GPipe"), name
    rows = [_row(name, placement, stage) for stage in range(placement.num_stages)]
    if placement.sources is None:
        return lower(Schedule.from_rows(name, placement, rows))
    ends = [[Action(stage, Kind.REDUCE_GRAD), Action(stage, Kind.STEP)] for stage in range(placement.num_stages)]
    walked = _with_messages(placement, rows)
    return Schedule.from_rows(name, placement, [[*row, *end] for row, end in zip(walked, ends, strict=True)])


def depths(placement: Placement) -> tuple[int, ...]:
    """For every stage the number of stages after it on the way to the last.

    >>> depths(Placement("explicit", 4, ((0,), (1,), (2,), (3,)), 2, sources=((), (0,), (), (1, 2))))
    (2, 1, 1, 0)
    """
    found = [0] * placement.num_stages
    for stage in reversed(range(placement.num_stages - 1)):
        found[stage] = found[placement.target_of(stage)] + 1
    return tuple(found)


def _row(name: str, placement: Placement, stage: int) -> list[Action]:
    num_microbatches = placement.num_microbatches
    warmup = num_microbatches if name == "GPipe" else min(depths(placement)[stage], num_microbatches)
    counts = {Kind.F: 0, Kind.B: 0}
    row = []
    for code in one_forward_one_backward(num_microbatches, warmup).tolist():
        kind = Kind(code)
        row.append(Action(stage, kind, counts[kind]))
        counts[kind] += 1
    return row


@dataclass(frozen=True)
class _Event:
    """What one or several ranks do at one place of the common order: a compute action, or a message with all
    its sends and receives."""

    when: tuple[int, int, int, int]
    actions: tuple[tuple[int, Action], ...]  # pipeline rank, action


def _with_messages(placement: Placement, rows: list[list[Action]]) -> list[list[Action]]:
    """The rows with SEND and RECV along one order of events, as `messages.add_messages` does for a line: executing them
    blocking and in order follows that order. All that a stage receives of a microbatch is one RECV, at the moment when
    the last of it is made."""
    ends = _unit_ends(placement, rows)
    events = [
        _Event(
            (ends[action.kind, action.stage, action.microbatch] - _DURATION[action.kind], 1, 0, 0), ((rank, action),)
        )
        for rank, row in enumerate(rows)
        for action in row
    ]
    events += _messages(placement, ends)
    walked: list[list[Action]] = [[] for _ in rows]
    for event in sorted(events, key=lambda event: event.when):
        for rank, action in event.actions:
            walked[rank].append(action)
    return walked


def _messages(placement: Placement, ends: dict[Value, int]) -> Iterator[_Event]:
    for stage in range(placement.num_stages):
        if not (sources := placement.sources_of(stage)):
            continue
        for microbatch in range(placement.num_microbatches):
            made = max(ends[Kind.F, source, microbatch] for source in sources)
            sends = tuple((source, Action(source, Kind.SEND_F, microbatch)) for source in sources)
            yield _Event((made, 0, stage, microbatch), (*sends, (stage, Action(stage, Kind.RECV_F, microbatch))))
            made = ends[Kind.B, stage, microbatch]
            receives = tuple((source, Action(source, Kind.RECV_B, microbatch)) for source in sources)
            order = placement.num_stages + stage
            yield _Event((made, 0, order, microbatch), ((stage, Action(stage, Kind.SEND_B, microbatch)), *receives))


def _unit_ends(placement: Placement, rows: list[list[Action]]) -> dict[Value, int]:
    """When every action ends in a run in which F takes 1, B 2 and messages nothing."""
    ends: dict[Value, int] = {}
    places, free = np.zeros(len(rows), dtype=int), np.zeros(len(rows), dtype=int)
    last = placement.num_stages - 1
    while any(place < len(row) for place, row in zip(places, rows, strict=True)):
        before = len(ends)
        for rank, row in enumerate(rows):
            while places[rank] < len(row):
                action = row[places[rank]]
                if action.kind is Kind.F:
                    needs = [(Kind.F, source, action.microbatch) for source in placement.sources_of(action.stage)]
                elif action.stage == last:
                    needs = [(Kind.F, last, action.microbatch)]
                else:
                    needs = [(Kind.B, placement.target_of(action.stage), action.microbatch)]
                if not all(need in ends for need in needs):
                    break
                start = max([int(free[rank]), *(ends[need] for need in needs)])
                ends[action.kind, action.stage, action.microbatch] = free[rank] = start + _DURATION[action.kind]
                places[rank] += 1
        assert len(ends) > before, "the stages' rows wait for each other"
    return {value: int(end) for value, end in ends.items()}
