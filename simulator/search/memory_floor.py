"""A lower bound on the memory of the worst rank, which decides most layouts that do not fit before anything is priced.

What rests (weights, sums of gradients, optimizer state) is the same for plans that differ in microbatch,
recomputation, sequence parallelism and schedule only, what a microbatch keeps for those that differ in copies and ZeRO
only: a search works either out once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from ...core.plan.plan import Plan
from ...core.program import composition, stage_groups
from ..memory.sizes import Parts, part_tape, part_tapes
from ..memory.static import gradients_bytes, optimizer_bytes, weights_bytes
from ..memory.tensors import LayerTensors
from ..stack.profiles import profile_of

ALL_IN_FLIGHT = frozenset({"GPipe", "LoopedBFS"})
"""Schedules whose ranks hold every microbatch when the first backward starts."""

FILLED_IN_FLIGHT = frozenset(
    {"1F1B", "Interleaved1F1B", "Combined1F1B", "InterleavedZeroBubble", "ZBH1", "ZBH2", "ZBAuto"}
)
"""Schedules whose first rank holds pp microbatches of each of its stages when they are under way."""


FIRST_OF_TWO: dict[str, Callable[[int], int]] = {
    "DualPipe": lambda pp: pp - 1,
    "DualPipeV": lambda pp: 2 * pp - 1,
    "ZBVZeroBubble": lambda pp: 2 * pp - 1,
    "VHalf": lambda pp: pp + 1,
    "VMin": lambda pp: 2 * pp // 3,
}
"""Schedules whose first rank holds the first stage and the last: microbatches of the first stage, of as many as there
are, that it holds at a time together with one of the last. Counted in the orders that the builders make."""


class _Resting(NamedTuple):
    """Bytes of a rank throughout the step, and those of its sums of gradients."""

    held: int
    summed: int

    def bytes_with(self, running: int, *, sums: bool) -> int:
        """The most that is held of it and of what runs; `sums` says that gradients are summed while it runs."""
        return self.held + max(self.summed, running + self.summed if sums else running)


class _Saved(NamedTuple):
    """Bytes that a microbatch keeps on a rank, and of the first or last stage, of which it is the rank, those that a
    microbatch keeps and those that its backward needs beyond that."""

    retained: int
    own: int
    backward: int

    def running(self, count: int) -> int:
        """Activations of so many microbatches; the backward of the only one needs more than it keeps."""
        return self.retained + self.backward if count == 1 else count * self.retained


_Ends = tuple[tuple[tuple[object, ...], tuple[int, ...]], ...]
"""What the ranks of the first and of the last stage hold, and which stages these are."""


class MemoryFloors:
    """Bounds for the plans of one search: they share model, cluster, precision, stack, offload and numerics, and those
    with the same ZeRO stage their sharding."""

    def __init__(self) -> None:
        self._resting: dict[tuple[object, ...], _Resting] = {}
        self._parts: dict[tuple[object, ...], tuple[Parts, dict[object, _Saved]]] = {}
        self._contents: dict[tuple[object, ...], _Ends] = {}

    def bytes_of(self, plan: Plan) -> int:
        """Bytes that the worst rank holds at least: what stays throughout and what its schedule must have in flight on
        the first rank, or on the rank of the last stage, which keeps the logits."""
        name = plan.schedule.name
        return self.of_zeros(plan, plan.microbatch_counts, [name], {plan.layout.zero: lambda: plan})[name][0]

    def of_zeros(
        self,
        plan: Plan,
        counts: Sequence[int],
        schedules: Sequence[str],
        zeros: Mapping[int, Callable[[], Plan]],
        most_bytes: float = inf,
    ) -> dict[str, list[int]]:
        """The same of plans that differ from one in their ZeRO stage, and in the order of their schedule: by schedule
        those of the ZeRO stages, each with what makes its plan. `counts` are the numbers of microbatches that
        data-parallel ranks have. Where what rests alone is above `most_bytes` nothing else is counted."""
        num_microbatches, ends = counts[0], self._ends(plan)
        resting = self._resting_of(plan, len(counts), ends, zeros)
        rests = [max(each.held + each.summed for each in ranks) for ranks in resting]
        if min(rests) > most_bytes:
            return dict.fromkeys(schedules, rests)
        saved = self._saved_of(plan, ends)
        steady = not self._grows(plan) or num_microbatches >= 3 * plan.layout.pp
        found = {}
        for name in schedules:
            fills = steady and name in FILLED_IN_FLIGHT
            first, last = _running(name, saved, plan.layout.pp, num_microbatches)
            found[name] = [
                max(start.bytes_with(first, sums=fills), end.bytes_with(last, sums=fills)) for start, end in resting
            ]
        return found

    def _grows(self, plan: Plan) -> bool:
        return profile_of(plan).memory.growing_gradients

    def _resting_of(
        self, plan: Plan, num_counts: int, ends: _Ends, zeros: Mapping[int, Callable[[], Plan]]
    ) -> list[tuple[_Resting, _Resting]]:
        """By ZeRO stage what rests on the ranks of the first and of the last stage."""
        layout, found = plan.layout, []
        cut = (layout.tp, layout.cp, layout.ep, layout.etp, layout.dp, len(plan.placement.ranks[0]), num_counts)
        for zero, made in zeros.items():
            for content, stages in ends:
                key = (cut, zero, content)
                if (resting := self._resting.get(key)) is None:
                    resting = self._resting[key] = _resting(made(), stages)
                found.append(resting)
        return list(zip(found[::2], found[1::2], strict=True))

    def _saved_of(self, plan: Plan, ends: _Ends) -> tuple[_Saved, _Saved]:
        """What a microbatch keeps on the ranks of the first and of the last stage."""
        layout, recompute = plan.layout, plan.recompute
        cut = (layout.tp, layout.cp, layout.cp_inner, layout.ep, layout.etp, layout.sequence_parallel)
        family = (*cut, plan.batch.micro_size, recompute)
        if family not in self._parts:
            self._parts[family] = part_tapes(plan), {}
        parts, known = self._parts[family]
        found = []
        for end, (content, stages) in enumerate(ends):
            if (saved := known.get((end, content))) is None:
                saved = known[end, content] = _saved(plan, stages, end, parts)
            found.append(saved)
        return found[0], found[1]

    def _ends(self, plan: Plan) -> _Ends:
        layout, placement = plan.layout, plan.placement
        last = placement.num_stages - 1
        ranks = (placement.ranks[0][0], placement.ranks[last][0])
        owned = tuple(placement.stages_of_ranks[rank] for rank in ranks)
        key = (layout.pp, layout.vpp, layout.stages, owned, plan.recompute)
        if key not in self._contents:
            parts = (tuple(composition(stage_groups(plan, stage)) for stage in own) for own in owned)
            self._contents[key] = tuple(zip(parts, owned, strict=True))
        return self._contents[key]


def _resting(plan: Plan, stages: Sequence[int]) -> _Resting:
    profile, held, summed = profile_of(plan).memory, 0, 0
    for stage, count in _distinct(plan, stages):
        held += count * (weights_bytes(plan, profile, stage) + optimizer_bytes(plan, profile, stage))
        summed += count * gradients_bytes(plan, profile, stage)
    return _Resting(held, summed)


def _saved(plan: Plan, stages: Sequence[int], end: int, parts: Parts) -> _Saved:
    """That of the rank of the first stage, or where `end` is 1 of the last, whose backward is looked at: that of its
    last part, before which nothing of the stage is freed."""
    tensors = LayerTensors(plan, profile_of(plan).memory)
    last = stages[-1 if end else 0]
    retained = sum(count * _retained(plan, stage, tensors, parts) for stage, count in _distinct(plan, stages))
    own = _retained(plan, last, tensors, parts)
    tape = part_tape(stage_groups(plan, last)[-1], tensors, parts)
    return _Saved(retained, own, tape.backward_bytes - tape.retained_bytes)


def _retained(plan: Plan, stage: int, tensors: LayerTensors, parts: Parts) -> int:
    """Bytes that a microbatch keeps on the device of a stage."""
    groups = (group for group in stage_groups(plan, stage) if not group.offloaded)
    return sum(group.count * part_tape(group, tensors, parts).retained_bytes for group in groups)


def _running(name: str, saved: tuple[_Saved, _Saved], pp: int, num_microbatches: int) -> tuple[int, int]:
    """Bytes that microbatches in flight keep on the ranks of the first and of the last stage at some time."""
    first, last = saved
    if name in ALL_IN_FLIGHT:
        return first.running(num_microbatches), last.running(num_microbatches)
    if name in FILLED_IN_FLIGHT:
        return first.running(min(pp, num_microbatches)), last.running(1)
    if name in FIRST_OF_TWO:
        more = min(FIRST_OF_TWO[name](pp), num_microbatches) - 1
        return max(first.running(1), first.retained + more * first.own), last.running(1)
    return first.running(1), last.running(1)


def _distinct(plan: Plan, stages: Sequence[int]) -> list[tuple[int, int]]:
    """One of the stages that hold the same, and how many these are."""
    found: dict[object, list[int]] = {}
    for stage in stages:
        found.setdefault(composition(stage_groups(plan, stage)), []).append(stage)
    return [(first, 1 + len(others)) for first, *others in found.values()]
