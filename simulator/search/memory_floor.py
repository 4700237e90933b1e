"""A lower bound on the memory of the worst rank, which decides most layouts that do not fit before anything is priced.

What rests (weights, sums of gradients, optimizer state) is the same for plans that differ in microbatch,
recomputation, sequence parallelism and schedule only, what a microbatch keeps for those that differ in copies and ZeRO
only: a search works either out once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ...core.plan.plan import Plan
from ...core.program import composition, stage_groups
from ..memory.sizes import part_tapes, stage_tape
from ..memory.static import gradients_bytes, optimizer_bytes, weights_bytes
from ..memory.tensors import LayerTensors
from ..stack.profiles import profile_of

ALL_IN_FLIGHT = frozenset({"GPipe", "LoopedBFS"})
"""Schedules whose ranks hold every microbatch when the first backward starts."""

FILLED_IN_FLIGHT = frozenset(
    {"1F1B", "Interleaved1F1B", "Combined1F1B", "InterleavedZeroBubble", "ZBH1", "ZBH2", "ZBAuto"}
)
"""Schedules whose first rank holds pp microbatches of each of its stages when they are under way."""


class _Resting(NamedTuple):
    """Bytes of a rank throughout the step, and those of its sums of gradients."""

    held: int
    summed: int

    def bytes_with(self, running: int, *, sums: bool) -> int:
        """The most that is held of it and of what runs; `sums` says that gradients are summed while it runs."""
        return self.held + max(self.summed, running + self.summed if sums else running)


class _Kept(NamedTuple):
    """Bytes that a microbatch keeps on a rank, and what the backward of one of its stages needs beyond that."""

    retained: int
    backward: int

    def running(self, count: int) -> int:
        """Activations of so many microbatches; the backward of the only one needs more than it keeps."""
        return self.retained + self.backward if count == 1 else count * self.retained


class MemoryFloors:
    """Bounds for the plans of one search: they share model, cluster, precision, stack, offload and numerics, and those
    with the same ZeRO stage their sharding."""

    def __init__(self) -> None:
        self._resting: dict[tuple[object, ...], _Resting] = {}
        self._kept: dict[tuple[object, ...], _Kept] = {}
        self._contents: dict[tuple[object, ...], tuple[tuple[tuple[object, ...], tuple[int, ...]], ...]] = {}

    def bytes_of(self, plan: Plan) -> int:
        """Bytes that the worst rank holds at least: what stays throughout and what its schedule must have in flight on
        the first rank, or on the rank of the last stage, which keeps the logits."""
        name = plan.schedule.name
        return self.of_zeros(plan, plan.microbatch_counts, [name], {plan.layout.zero: lambda: plan})[name][0]

    def of_zeros(
        self, plan: Plan, counts: Sequence[int], schedules: Sequence[str], zeros: Mapping[int, Callable[[], Plan]]
    ) -> dict[str, list[int]]:
        """The same of plans that differ from one in their ZeRO stage, and in the order of their schedule: by schedule
        those of the ZeRO stages, each with what makes its plan. `counts` are the numbers of microbatches that
        data-parallel ranks have."""
        layout, num_microbatches = plan.layout, counts[0]
        cut = (layout.tp, layout.cp, layout.ep, layout.etp)
        family = (layout.cp_inner, layout.sequence_parallel, plan.batch.micro_size, plan.recompute)
        copies = (layout.dp, len(plan.placement.ranks[0]), len(counts))
        ends, kept, resting = self._ends(plan), list[_Kept](), list[list[_Resting]]()
        for end, (content, stages) in enumerate(ends):
            key: tuple[object, ...] = (end, *cut, *family, content)
            if key not in self._kept:
                self._kept[key] = _kept(plan, stages, end)
            kept.append(self._kept[key])
            resting.append([])
            for zero, made in zeros.items():
                key = (*cut, *copies, zero, content)
                if key not in self._resting:
                    self._resting[key] = _resting(made(), stages)
                resting[-1].append(self._resting[key])
        steady = not profile_of(plan).memory.growing_gradients or num_microbatches >= 3 * layout.pp
        found = {}
        for name in schedules:
            fills = name in FILLED_IN_FLIGHT
            most = num_microbatches if name in ALL_IN_FLIGHT else 1
            in_flight = (min(layout.pp, num_microbatches) if fills else most, most)
            running = [each.running(count) for each, count in zip(kept, in_flight, strict=True)]
            found[name] = [
                max(each.bytes_with(run, sums=fills and steady) for each, run in zip(ranks, running, strict=True))
                for ranks in zip(*resting, strict=True)
            ]
        return found

    def _ends(self, plan: Plan) -> tuple[tuple[tuple[object, ...], tuple[int, ...]], ...]:
        """What the ranks of the first and of the last stage hold, and which stages these are."""
        layout, placement = plan.layout, plan.placement
        last = placement.num_stages - 1
        ranks = (placement.ranks[0][0], placement.ranks[last][0])
        owned = tuple(placement.stages_of_ranks[rank] for rank in ranks)
        key = (layout.pp, layout.vpp, layout.stages, owned, plan.recompute)
        if key not in self._contents:
            parts = (tuple(composition(stage_groups(plan, stage)) for stage in own) for own in owned)
            self._contents[key] = tuple(zip(parts, owned, strict=True))
        return self._contents[key]


def _resting(plan: Plan, stages: tuple[int, ...]) -> _Resting:
    profile = profile_of(plan).memory
    held = sum(weights_bytes(plan, profile, stage) + optimizer_bytes(plan, profile, stage) for stage in stages)
    return _Resting(held, sum(gradients_bytes(plan, profile, stage) for stage in stages))


def _kept(plan: Plan, stages: tuple[int, ...], end: int) -> _Kept:
    """That of the rank of the first stage, or where `end` is 1 of the last, whose backward is looked at."""
    tensors, parts = LayerTensors(plan, profile_of(plan).memory), part_tapes(plan)
    tapes = [stage_tape(stage_groups(plan, stage), tensors, parts) for stage in stages]
    ends = tapes[-1] if end else tapes[0]
    return _Kept(sum(tape.retained_bytes for tape in tapes), ends.backward_bytes - ends.retained_bytes)
