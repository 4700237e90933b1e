"""What a whole step of one rank computes and sends, by action, and how what was recorded differs from it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ..schedule.action import Action
from ..schedule.schedule import Schedule
from .actions import operations
from .batch import load_batch
from .work import Operation

if TYPE_CHECKING:
    from ..plan.plan import Plan

ByAction = Mapping[Action | None, Counter[Operation]]
"""Operations and how often each comes, by action; None for what belongs to none."""


def step_of_rank(plan: Plan, schedule: Schedule, global_rank: int) -> dict[Action | None, Counter[Operation]]:
    """What a rank does in a step that runs a lowered schedule. Outside of actions it loads its part of the batch."""
    here = plan.layout.coordinates(global_rank)
    found: dict[Action | None, Counter[Operation]] = {None: Counter(load_batch(plan, here["tp"], here["dp"]))}
    # weights of a stage may be gathered again
    times = Counter(part for each in schedule.row(here["pp"]) for part in each.parts)
    for action, count in times.items():
        replica = plan.placement.replica_of(action.stage, here["pp"])
        program = operations(
            plan, action.kind, action.stage, here["tp"], here["dp"], cp_rank=here["cp"], replica=replica
        )
        found[action] = Counter([*program] * count)
    return found


def recorded_by_action(events: Iterable[tuple[Action | None, Operation]]) -> dict[Action | None, Counter[Operation]]:
    """What a rank has recorded, in the same form."""
    found: defaultdict[Action | None, Counter[Operation]] = defaultdict(Counter)
    for action, operation in events:
        found[action][operation] += 1
    return dict(found)


def differences(expected: ByAction, recorded: ByAction) -> dict[Action | None, tuple[list[Operation], list[Operation]]]:
    """By action what is missing of the expected operations, and what there is besides. Empty where all is equal."""
    found = {}
    for action in sorted({*expected, *recorded}, key=str):
        should, did = expected.get(action, Counter()), recorded.get(action, Counter())
        if should != did:
            found[action] = sorted((should - did).elements(), key=str), sorted((did - should).elements(), key=str)
    return found
