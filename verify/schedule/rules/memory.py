"""The rule about activation memory, and how many microbatches a rank holds at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....core.schedule.action import Kind
from ..facts import ActivationMemory, Facts
from .blocking import NONE
from .rule import Rule, Violation
from .view import View


def held(view: View, stage_amount: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(index, amount held on its rank while it runs) of every forward, when a microbatch of stage s holds
    `stage_amount[s]` from the start of its F to the end of its B or W. Exact for in-order execution; a pair holds what
    its backward frees until it ends."""
    kind, stage, _, index = view.parts
    forward, frees = kind == Kind.F, np.isin(kind, (Kind.B, Kind.W))
    change = np.where(forward, stage_amount[stage], 0) - np.where(frees, stage_amount[stage], 0)
    total = np.cumsum(change)
    row_start = np.searchsorted(index, view.schedule.offsets[view.rank[index[forward]]])
    before = np.where(row_start > 0, total[row_start - 1], 0)
    return index[forward], total[forward] - before


def peak_in_flight(view: View) -> list[int]:
    """Per pipeline rank, the most (stage, microbatch) pairs whose activations are held at once."""
    index, amount = held(view, np.ones(view.schedule.num_stages, dtype=np.int64))
    peak = np.zeros(view.schedule.num_ranks, dtype=np.int64)
    np.maximum.at(peak, view.rank[index], amount)
    return peak.tolist()


def memory_over_capacity(view: View) -> Iterator[Violation]:
    """Per rank, the first forward at which its activations no longer fit."""
    memory = view.facts.memory
    assert memory is not None, "the rule needs memory"
    index, amount = held(view, np.array(memory.stage_bytes, dtype=np.int64))
    capacity = np.array(memory.capacity_bytes, dtype=np.int64)[view.rank[index]]
    over = amount > capacity
    ranks, first = np.unique(view.rank[index[over]], return_index=True)
    for rank, i in zip(ranks.tolist(), np.flatnonzero(over)[first].tolist(), strict=True):
        what = f"activations would take {amount[i]} bytes here, but the rank has {capacity[i]} bytes for them."
        yield Violation(int(index[i]), rank, what)


_FEW_ENOUGH, _FEW_ENOUGH_AT_THE_END = 6, 2
"""Times the pipeline ranks: so many microbatches may all be in flight. Of the schedules whose memory does not grow,
ZB-H2 holds 2p-1 on its first stage and interleaved ones hold up to 5p (when the last group is incomplete); their
last stages at most 1.5p."""


def activation_growth(view: View) -> Iterator[Violation]:
    """Per rank, the first stage of which it holds every microbatch at once although there are many."""
    num_ranks, placement = view.schedule.num_ranks, view.schedule.placement
    forward, gradient = view.first(Kind.F), view.gradient
    for rank in range(num_ranks):
        for stage in placement.stages_of(rank):
            mine = (view.owner_table[stage] == rank) & (forward[stage] != NONE) & (gradient[stage] != NONE)
            few = (_FEW_ENOUGH_AT_THE_END if stage == placement.num_stages - 1 else _FEW_ENOUGH) * num_ranks
            if mine.sum() > few and forward[stage, mine].max() < gradient[stage, mine].min():
                what = (
                    f"all {int(mine.sum())} microbatches of stage {stage} are held here, with {num_ranks} "
                    "pipeline ranks."
                )
                yield Violation(int(forward[stage, mine].max()), rank, what)
                break


MEMORY_RULES = (
    Rule(
        "memory-over-capacity",
        "The activations a rank holds, from each forward to the end of its backward, fit its memory.",
        "Start fewer forwards before backwards, recompute more, or use smaller microbatches.",
        "0F0,0F1,0B0,0B1\n",
        memory_over_capacity,
        "memory",
        Facts(memory=ActivationMemory(stage_bytes=(8,), capacity_bytes=(15,))),
        key="cluster.device_memory_bytes",
    ),
    Rule(
        "activation-growth",
        "No stage holds the activations of all microbatches at once when they are many: more than twice the pipeline "
        "ranks on the last "
        "stage, six times on the others. Memory that grows with the number of microbatches buys no shorter bubble "
        "beyond that.",
        "Use 1F1B or one of its relatives, whose memory does not depend on the number of microbatches, or fewer "
        "microbatches.",
        "0F0,0F1,0F2,0B0,0B1,0B2\n",
        activation_growth,
        severity="warning",
    ),
)
