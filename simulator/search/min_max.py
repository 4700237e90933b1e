"""The cut of layers over stages of which the busiest pipeline rank has least to do, embedding and head counted by their
priced time: exact, by closed rules rather than by trying cuts."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from ...core.layout.stages import StageLayers, to_string
from ...core.plan.plan import Plan
from ...core.program import recomputes_all, stage_groups
from ...core.schedule.placement import Placement
from ..cost.pricing import Pricing

Owner = Hashable
"""The ranks that run a stage: stages with the same owners add to the same work."""

Length = Callable[[int, int], float]
"""Seconds of a stage, by its first layer and that after its last."""


class Work(NamedTuple):
    """Seconds of the forward and backward of a microbatch: of each layer, and of what else the first and the last stage
    hold."""

    layers: tuple[float, ...]
    before: float
    after: float


def work_of(plan: Plan, pricing: Pricing) -> Work | None:
    """What a plan's layers, its embedding and its head with what comes before it take, however they are cut; what the
    host takes longer to launch a stage than the device to run it is left out. None where a layer's time depends on the
    cut: some layers of a stage are recomputed, or kept in host memory."""
    if plan.offload.activations or (plan.recompute.mode == "full" and not recomputes_all(plan)):
        return None
    layers, before, after = [], 0.0, 0.0
    for stage in range(plan.placement.num_stages):
        for group in stage_groups(plan, stage):
            seconds = pricing.group_s(group, stage)
            if group.kind == "layer":
                layers += [seconds] * group.count
            elif group.kind == "embedding":
                before += seconds
            else:
                after += seconds * group.count
    return Work(tuple(layers), before, after)


def min_max_stages(work: Work, placement: Placement) -> str | None:
    """The layout string of the cut by min-max over the stages of a placement; None where there are fewer layers than
    stages."""
    counts = min_max_cut(work, [tuple(sorted(ranks)) for ranks in placement.ranks])
    if counts is None:
        return None
    ends, last = [0, *accumulate(counts)], len(counts) - 1
    return to_string(
        tuple(StageLayers(stage, ends[stage], ends[stage + 1], stage == 0, stage == last) for stage in range(last + 1))
    )


def min_max_cut(work: Work, owners: Sequence[Owner]) -> list[int] | None:
    """Layers of every stage such that the most that an owner does is least, every stage with a layer at least; None
    where there are too few. Where several owners are as busy as can be, the others are as even as they can.

    Where layers differ and owners have several stages, the longest stage is least instead: owners may then differ.
    """
    if len(work.layers) < len(owners):
        return None
    if len(set(work.layers)) == 1:
        return _of_equal(work, owners)
    return _of_unequal(work, len(owners))


def _of_equal(work: Work, owners: Sequence[Owner]) -> list[int]:
    """Every layer goes to whoever would have least with it, first among owners, then among the stages of each."""
    each, last = work.layers[0], len(owners) - 1
    fixed = [work.before * (stage == 0) + work.after * (stage == last) for stage in range(last + 1)]
    mine: dict[Owner, list[int]] = {}
    for stage, owner in enumerate(owners):
        mine.setdefault(owner, []).append(stage)
    loads = [sum(fixed[stage] for stage in stages) for stages in mine.values()]
    least = [len(stages) for stages in mine.values()]
    counts = [0] * len(owners)
    for stages, number in zip(mine.values(), _poured(loads, least, each, len(work.layers)), strict=True):
        shared = _poured([fixed[stage] for stage in stages], [1] * len(stages), each, number)
        for stage, count in zip(stages, shared, strict=True):
            counts[stage] = count
    return counts


def _poured(loads: Sequence[float], least: Sequence[int], each: float, number: int) -> list[int]:
    """How many of `number` equal layers go where, `least` at least, so that the largest sum is least: one by one to
    where it is then smallest."""
    counts = list(least)
    heap = [(load + each * (count + 1), at) for at, (load, count) in enumerate(zip(loads, counts, strict=True))]
    heapq.heapify(heap)
    for _ in range(number - sum(least)):
        after, at = heap[0]
        counts[at] += 1
        heapq.heapreplace(heap, (after + each, at))
    return counts


def _of_unequal(work: Work, num_stages: int) -> list[int]:
    """A cut whose longest stage is least: the least of all sums of neighbouring layers that stages can keep to."""
    sums = [0.0, *accumulate(work.layers)]
    number = len(work.layers)

    def length(first: int, end: int) -> float:
        return sums[end] - sums[first] + work.before * (first == 0) + work.after * (end == number)

    possible = sorted({length(first, end) for first in range(number) for end in range(first + 1, number + 1)})
    most = possible[bisect_left(possible, True, key=lambda limit: _fits(length, number, num_stages, limit))]
    return list(_shared_out(length, number, num_stages, most))


def _fits(length: Length, number: int, num_stages: int, most: float) -> bool:
    """Whether stages of no more than `most` hold all layers, each one at least: as full as they can be, they are few
    enough."""
    return _needed(length, number, most)[0] <= num_stages


def _needed(length: Length, number: int, most: float) -> list[int]:
    """By first layer how few stages of no more than `most` hold it and those after it; too many where one alone is
    longer."""
    needed = [0] * (number + 1)
    end = number
    for first in range(number - 1, -1, -1):
        while end > first and length(first, end) > most:
            end -= 1
        needed[first] = needed[end] + 1 if end > first else number + 1
    return needed


def _shared_out(length: Length, number: int, num_stages: int, most: float) -> Iterator[int]:
    """Layers of stages of no more than `most`, each as long as the mean of what is left, as nearly as the later ones
    allow."""
    needed, first = _needed(length, number, most), 0
    for left in range(num_stages, 0, -1):
        mean = length(first, number) / left
        ends = [
            end
            for end in range(first + 1, number + 1)
            if length(first, end) <= most and needed[end] <= left - 1 <= number - end
        ]
        end = number if left == 1 else min(ends, key=lambda end: abs(length(first, end) - mean))
        yield end - first
        first = end
