"""When each rank of a schedule holds most, and what it holds then."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from ...core.plan.plan import Plan
from ...core.schedule.action import Action, Kind
from ...core.schedule.schedule import Schedule
from ..stack.memory_profile import MemoryProfile
from .changes import all_changes, check_countable
from .sizes import rank_step_bytes, stage_sizes
from .states import states_of


@dataclass(frozen=True)
class Peak:
    """Bytes of one rank when it holds most, besides what is static, and the most that ever outlives an action."""

    during: int
    retained: int
    working: int
    gathered: int
    summed: int
    lasting: int
    action: str


def peaks(plan: Plan, profile: MemoryProfile, schedule: Schedule) -> list[Peak]:
    """The peak of every rank. Exact numerics hold more sums of gradients the longer the step runs, so
    every action is looked at."""
    if profile.growing_gradients and plan.numerics.mode == "exact":
        return peaks_by_action(plan, profile, schedule)
    return peaks_by_state(plan, profile, schedule)


def peaks_by_action(plan: Plan, profile: MemoryProfile, schedule: Schedule) -> list[Peak]:
    """The peak of every rank, from what each action changes."""
    activations, gathers, sums = all_changes(plan, schedule, profile)
    parts = (activations.retained, activations.during - activations.retained, gathers.during, sums.during)
    return _highest(schedule, schedule.offsets, np.arange(len(schedule)), *parts)


def peaks_by_state(plan: Plan, profile: MemoryProfile, schedule: Schedule) -> list[Peak]:
    """The peak of every rank: counts of its states times the plan's sizes."""
    states, sizes = states_of(schedule), stage_sizes(plan)
    check_countable(max(max(size.tape.backward_bytes, size.tape.forward_bytes) for size in sizes), schedule)
    tapes, none = [size.tape for size in sizes], np.zeros(len(sizes) + 1, dtype=np.int64)
    names = ("retained_bytes", "forward_bytes", "backward_bytes", "deferred_bytes", "split_bytes", "weight_bytes")
    retained, forward, backward, deferred, split, weight = (
        np.array([*(getattr(tape, name) for tape in tapes), 0]) for name in names
    )
    whole = np.array([*(size.gathered_bytes for size in sizes), 0])
    sums = np.array([*(size.gradients_bytes for size in sizes), 0]) if profile.growing_gradients else none
    step = np.repeat(rank_step_bytes(plan, schedule.placement.stages_of_ranks), np.diff(states.offsets))
    reduce = np.array([*(size.reduce_bytes for size in sizes), 0])
    gathering = np.array([size.gathering_bytes for size in sizes])
    left = (states.retained * retained[states.stages] + states.deferred * deferred[states.stages]).sum(axis=1)
    held = left + retained[states.forward]
    both = forward[states.forward] - retained[states.forward], backward[states.backward] - retained[states.backward]
    working = np.maximum(*both) if profile.pairs_in_turn else both[0] + both[1]
    working += (
        split[states.split]
        - retained[states.split]
        + weight[states.weight]
        + reduce[states.reduce]
        + np.where(states.step, step, 0)
    )
    kind = schedule.actions.kind[states.action]
    working += np.where(kind == Kind.UNSHARD, gathering[schedule.actions.stage[states.action]], 0)
    gathered = (states.gathered * whole[states.stages]).sum(axis=1)
    summed = (states.summed * sums[states.stages]).sum(axis=1)
    return _highest(schedule, states.offsets, states.action, held, working, gathered, summed)


def _highest(
    schedule: Schedule,
    offsets: np.ndarray,
    action: np.ndarray,
    retained: np.ndarray,
    working: np.ndarray,
    gathered: np.ndarray,
    summed: np.ndarray,
) -> list[Peak]:
    """Per rank the first moment of the most bytes, of moments that are given rank by rank."""
    lasting = retained + gathered + summed
    during = lasting + working
    found = [Peak(0, 0, 0, 0, 0, 0, "")] * (len(offsets) - 1)
    rows = [(rank, lo, hi) for rank, (lo, hi) in enumerate(pairwise(offsets.tolist())) if lo < hi]
    at = np.array([lo + int(during[lo:hi].argmax()) for _, lo, hi in rows], dtype=np.int64)
    columns = [column[at].tolist() for column in (during, retained, working, gathered, summed)]
    most_lasting = [int(lasting[lo:hi].max()) for _, lo, hi in rows]
    names = [
        _name(*action)
        for action in zip(*(column[action[at]].tolist() for column in schedule.actions.columns), strict=True)
    ]
    for number, (rank, _, _) in enumerate(rows):
        most, own_retained, own_working, own_gathered, own_summed = (column[number] for column in columns)
        name = names[number] if most else ""
        found[rank] = Peak(most, own_retained, own_working, own_gathered, own_summed, most_lasting[number], name)
    return found


@lru_cache(maxsize=4096)
def _name(stage: int, kind: int, *others: int) -> str:
    """The token of an action, from the numbers of `ActionArray.columns`."""
    return str(Action(stage, Kind(kind), *(None if number < 0 else number for number in others)))
