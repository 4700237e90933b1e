"""What every action of a schedule adds to its rank's memory and takes from it, as arrays over all actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.base.errors import PlanError
from ...core.base.reduction import sibling
from ...core.plan.plan import Plan
from ...core.schedule.action import ActionArray, Kind
from ...core.schedule.schedule import Schedule
from ..stack.memory_profile import MemoryProfile
from .sizes import rank_step_bytes, stage_sizes

MOST_BYTES = 2**62
"""Bytes of a rank over a step whose running sums are exact in 64 bits."""


@dataclass(frozen=True, eq=False)
class Changes:
    """Per action, in bytes: what it adds when it begins and, negative, when it ends; what its rank has `retained` while
    it runs, and all that its rank holds `during` it, both besides what is static."""

    begins: np.ndarray
    ends: np.ndarray
    retained: np.ndarray
    during: np.ndarray


def all_changes(plan: Plan, schedule: Schedule, profile: MemoryProfile) -> tuple[Changes, Changes, Changes]:
    """Activations, gathered weights, and sums of gradients."""
    return _activations(plan, schedule, profile), _gathers(plan, schedule), _sums(plan, schedule, profile)


def _activations(plan: Plan, schedule: Schedule, profile: MemoryProfile) -> Changes:
    """A forward holds its most while it runs and leaves what is kept; a backward needs that and more, and leaves
    nothing, or, where it is split, what the weight gradients need."""
    actions, sizes = schedule.actions, stage_sizes(plan)
    retained, forward, backward, deferred, split, weight = (
        countable([getattr(size.tape, name) for size in sizes], schedule)
        for name in (
            "retained_bytes",
            "forward_bytes",
            "backward_bytes",
            "deferred_bytes",
            "split_bytes",
            "weight_bytes",
        )
    )
    reduce = countable([size.reduce_bytes for size in sizes], schedule)
    kind, stage = actions.kind, actions.stage
    pair = np.where(kind == Kind.OVERLAP_F_B, actions.pair_stage, stage)
    forwards = np.isin(kind, (Kind.F, Kind.OVERLAP_F_B))
    backwards = np.isin(kind, (Kind.B, Kind.I, Kind.OVERLAP_F_B))
    whole = np.where(kind == Kind.I, split[pair], backward[pair])
    begins = np.where(forwards, forward[stage], 0) + np.where(backwards, whole - retained[pair], 0)
    if profile.pairs_in_turn:
        in_turn = retained[stage] + np.maximum(forward[stage] - retained[stage], whole - retained[pair])
        begins = np.where(kind == Kind.OVERLAP_F_B, in_turn, begins)
    begins += np.where(kind == Kind.W, weight[stage], 0) + np.where(kind == Kind.REDUCE_GRAD, reduce[stage], 0)
    leaves = np.where(forwards, retained[stage], 0) - np.where(backwards, retained[pair], 0)
    leaves += np.where(kind == Kind.I, deferred[stage], 0) - np.where(kind == Kind.W, deferred[stage], 0)
    step = rank_step_bytes(plan, schedule.placement.stages_of_ranks)
    rank = np.repeat(np.arange(schedule.num_ranks), np.diff(schedule.offsets))
    begins = np.where(kind == Kind.STEP, np.asarray(step, dtype=np.int64)[rank], begins)
    before = _before(schedule, leaves)
    return Changes(begins, leaves - begins, before + np.where(forwards, retained[stage], 0), before + begins)


def _gathers(plan: Plan, schedule: Schedule) -> Changes:
    """Weights of whole stages that UNSHARD brings and RESHARD takes."""
    kind = schedule.actions.kind
    nothing = np.zeros(len(kind), dtype=np.int64)
    if not (kind == Kind.UNSHARD).any():
        return Changes(nothing, nothing, nothing, nothing)
    sizes, stage = stage_sizes(plan), schedule.actions.stage
    size = countable([size.gathered_bytes for size in sizes], schedule)[stage]
    gathering = np.where(kind == Kind.UNSHARD, countable([size.gathering_bytes for size in sizes], schedule)[stage], 0)
    brings, takes = np.where(kind == Kind.UNSHARD, size, 0), np.where(kind == Kind.RESHARD, -size, 0)
    before = _before(schedule, brings + takes)
    return Changes(brings, takes, before + brings, before + brings + gathering)


def _sums(plan: Plan, schedule: Schedule, profile: MemoryProfile) -> Changes:
    """Gradients that grow with the first backward and go with the step. Exact numerics hold one sum per finished
    node of the batch tree, and where REDUCE_GRAD puts them together one."""
    actions = schedule.actions
    change = np.zeros(len(actions.kind), dtype=np.int64)
    if not profile.growing_gradients:
        return Changes(change, change, change, change)
    stage = np.where(actions.kind == Kind.OVERLAP_F_B, actions.pair_stage, actions.stage)
    finishes = np.isin(actions.kind, (Kind.B, Kind.W, Kind.OVERLAP_F_B))
    rank = np.repeat(np.arange(schedule.num_ranks), np.diff(schedule.offsets))
    of_rank = np.zeros(schedule.num_ranks, dtype=np.int64)
    ranks = enumerate(schedule.placement.stages_of_ranks)
    for pp_rank, owned in ((pp_rank, owned) for pp_rank, stages in ranks for owned in stages):
        size, where = (
            stage_sizes(plan)[owned].gradients_bytes,
            np.flatnonzero(finishes & (rank == pp_rank) & (stage == owned)),
        )
        counts = _num_sums(plan, actions, where)
        change[where] = size * np.diff(counts, prepend=0)
        left = int(counts[-1]) if len(counts) else 0
        reduces = np.flatnonzero((actions.kind == Kind.REDUCE_GRAD) & (rank == pp_rank) & (actions.stage == owned))
        if left and len(reduces):
            change[reduces[-1]] = size * (1 - left)
            left = 1
        of_rank[pp_rank] += size * left
    steps = actions.kind == Kind.STEP
    change[steps] -= of_rank[rank[steps]]
    before = _before(schedule, change)
    return Changes(np.zeros_like(change), change, before, before)


def _num_sums(plan: Plan, actions: ActionArray, where: np.ndarray) -> np.ndarray:
    """How many sums of each gradient there are after every backward of a stage: one, or the finished nodes of
    the tree over the batch."""
    if plan.numerics.mode == "fast":
        return np.ones(len(where), dtype=np.int64)
    paired = actions.kind[where] == Kind.OVERLAP_F_B
    microbatches = np.where(paired, actions.pair_microbatch[where], actions.microbatch[where])
    micro, total = plan.batch.micro_size, plan.batch.global_size
    held: set[tuple[int, int]] = set()
    counts = []
    for first in (microbatches * micro).tolist():
        for sample in range(first, first + micro):
            node = (sample, sample + 1)
            while (other := sibling(total, node)) in held:
                assert other is not None
                held.remove(other)
                node = (min(node[0], other[0]), max(node[1], other[1]))
            held.add(node)
        counts.append(len(held))
    return np.asarray(counts, dtype=np.int64)


def _before(schedule: Schedule, leaves: np.ndarray) -> np.ndarray:
    """Per action what the actions before it in its row have left."""
    before = np.cumsum(leaves) - leaves
    rows = schedule.offsets[:-1].clip(max=max(0, len(leaves) - 1))
    return before - np.repeat(before[rows], np.diff(schedule.offsets)) if len(leaves) else before


def countable(sizes: Sequence[int], schedule: Schedule) -> np.ndarray:
    """Sizes whose sums over a schedule stay exact in 64 bits. Raises `PlanError` where they would not."""
    check_countable(max(sizes), schedule)
    return np.asarray(sizes, dtype=np.int64)


def check_countable(largest: int, schedule: Schedule) -> None:
    """Raises `PlanError` where so many bytes at every action would not be counted exactly."""
    if largest * len(schedule) > MOST_BYTES:
        raise PlanError(
            f"a step allocates up to {largest * len(schedule):.2g} bytes of activations or gathered weights, more than "
            f"{MOST_BYTES:.2g} bytes, which is all that is counted. Use a smaller batch.sequence, batch.micro or "
            "model.hidden_size."
        )
