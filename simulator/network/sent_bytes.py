"""What the groups of ranks of a whole run send in one step: every collective and message of every rank, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import product

from ...core.plan.plan import Plan
from ...core.program import Collective, Message, copies_do_the_same, operations
from ...core.schedule.action import SENDS, Kind
from ...core.schedule.schedule import Schedule
from .spreads import RANK_AXES, Spreads

PIPELINE = "pp"
"""The axis of messages between stages."""

MESSAGE = "message"
"""What stands for the operation of a message."""

Sent = tuple[str, str, tuple[int, ...]]
"""Axis, operation and global ranks of a group; of a message its two ends, the sender first."""


def sent_bytes(plan: Plan, schedule: Schedule) -> dict[Sent, list[float]]:
    """Bytes that each member of a group sends in a step of a lowered schedule, in the order of the members; of a
    message those of its sender alone. Of a module what it sends itself, and nothing over its bridges."""
    layout, found = plan.layout, dict[Sent, list[float]]()
    counts = [
        Counter((part.stage, part.kind) for action in schedule.row(pp_rank) for part in action.parts)
        for pp_rank in range(schedule.num_ranks)
    ]
    known: dict[tuple[object, ...], Mapping[tuple[str, str], int]] = {}
    for tp_rank, cp_rank, dp_rank in product(range(layout.tp), range(layout.cp), range(layout.dp)):
        ranks = _OfReplica(plan, tp_rank, cp_rank, dp_rank)
        for pp_rank, of_rank in enumerate(counts):
            here = ranks.global_rank(pp_rank)
            for (stage, kind), count in of_rank.items():
                if kind in SENDS and not 0 <= _next(kind, stage) < len(plan.placement.ranks):
                    continue  # over a bridge
                # data-parallel ranks mostly do the same, and there are thousands of them
                copy = 0 if copies_do_the_same(plan, kind, pp_rank) else dp_rank
                key = (kind, stage, pp_rank, tp_rank, cp_rank, copy)
                if key not in known:
                    known[key] = _sent_by_action(plan, kind, stage, pp_rank, (tp_rank, cp_rank, copy))
                for (axis, op), num_bytes in known[key].items():
                    if op == MESSAGE:
                        peer = ranks.global_rank(_peer(plan, kind, stage, pp_rank))
                        if peer != here:
                            _add(found, (PIPELINE, MESSAGE, (here, peer)), (0, 1), count * num_bytes)
                    else:
                        members, place = ranks.group(axis, stage, pp_rank)
                        _add(found, (axis, op, members), (place, len(members)), count * num_bytes)
    return found


def _add(found: dict[Sent, list[float]], key: Sent, sender: tuple[int, int], num_bytes: int) -> None:
    """Adds what a sender sends: its place, and of how many that send."""
    place, count = sender
    if key not in found:
        found[key] = [0.0] * count
    found[key][place] += num_bytes


def _sent_by_action(
    plan: Plan, kind: Kind, stage: int, pp_rank: int, place: tuple[int, int, int]
) -> Mapping[tuple[str, str], int]:
    """Bytes that one action of a rank sends, by axis and operation. The rank's place is its tensor-, context- and
    data-parallel rank."""
    tp_rank, cp_rank, dp_rank = place
    replica = plan.placement.replica_of(stage, pp_rank)
    found = Counter[tuple[str, str]]()
    for work in operations(plan, kind, stage, tp_rank, dp_rank, cp_rank=cp_rank, replica=replica):
        if isinstance(work, Message):
            found[PIPELINE, MESSAGE] += work.num_bytes
        elif isinstance(work, Collective) and work.group_size > 1:
            found[work.axis, work.op] += work.sent_bytes
    return found


def _peer(plan: Plan, kind: Kind, stage: int, pp_rank: int) -> int:
    """The pipeline rank that a send goes to."""
    assert kind in SENDS
    owners = plan.placement.ranks[_next(kind, stage)]
    return owners[min(plan.placement.replica_of(stage, pp_rank), len(owners) - 1)]


def _next(kind: Kind, stage: int) -> int:
    """The stage that a send goes to."""
    return stage + (1 if kind is Kind.SEND_F else -1)


class _OfReplica(Spreads):
    """The groups of any one place in the dense grid."""

    def __init__(self, plan: Plan, tp_rank: int, cp_rank: int, dp_rank: int):
        super().__init__(plan, dp_rank)
        self._first = plan.layout.global_rank(tp=tp_rank, cp=cp_rank, dp=dp_rank)
        self._groups: dict[tuple[object, ...], tuple[tuple[int, ...], int]] = {}

    def global_rank(self, pp_rank: int) -> int:
        """The rank of that place on a pipeline rank."""
        return self._first + pp_rank * self._dense["pp"]

    def group(self, axis: str, stage: int, pp_rank: int) -> tuple[tuple[int, ...], int]:
        """`members`, and the place of this rank among them, each group looked at once."""
        key = (axis, pp_rank) if axis in RANK_AXES else (axis, stage, pp_rank)
        if key not in self._groups:
            members = tuple(self.members(axis, stage, pp_rank).tolist())
            self._groups[key] = members, members.index(self.global_rank(pp_rank))
        return self._groups[key]
