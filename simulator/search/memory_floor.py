"""A lower bound on the memory of the worst rank, which decides most layouts that do not fit before anything is priced.

What rests (weights, sums of gradients, optimizer state) is the same for plans that differ in microbatch,
recomputation, sequence parallelism and schedule only, what a microbatch keeps for those that differ in copies and ZeRO
only: a search works either out once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ...core.plan.plan import Plan
from ...core.program import Group, composition, num_shards, stage_groups
from ..memory.sizes import Parts, part_tape, part_tapes
from ..memory.static import StageElements, elements_of, gradients_bytes, optimizer_bytes, weights_bytes
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


class Resting(NamedTuple):
    """Bytes of a rank throughout the step, and those of its sums of gradients."""

    held: int
    summed: int


class Saved(NamedTuple):
    """Bytes that a microbatch keeps on a rank, and of the first or last stage, of which it is the rank, those that a
    microbatch keeps and those that its backward needs beyond that."""

    retained: int
    own: int
    backward: int

    def running(self, count: int) -> int:
        """Activations of so many microbatches; the backward of the only one needs more than it keeps."""
        return self.retained + self.backward if count == 1 else count * self.retained


class End(NamedTuple):
    """The rank of the first or of the last stage. `number` is that of all that hold the same, `resting_number` that of
    all that do but for what is recomputed. Stages of it that hold
    the same are one of `stages`, each with how many these are; `parts` are what a microbatch keeps of all of them, and
    `own` what it keeps of the first or last stage, part by part with their counts; `last` is that stage's last part."""

    number: int
    resting_number: int
    stages: tuple[tuple[int, int], ...]
    parts: tuple[tuple[Group, int], ...]
    own: tuple[tuple[Group, int], ...]
    last: Group


class _Tapes(NamedTuple):
    """What is known of layouts that cut layers in the same way: how large tensors are, the tapes of parts, and what a
    microbatch keeps on the ranks of the ends, by their numbers."""

    tensors: LayerTensors
    parts: Parts
    saved: dict[int, Saved]


class MemoryFloors:
    """Bounds for the plans of one search: they share model, cluster, precision, stack, offload and numerics, and those
    with the same ZeRO stage their sharding."""

    def __init__(self) -> None:
        self._ends: dict[tuple[object, ...], tuple[End, End]] = {}
        self._numbers: dict[object, int] = {}
        self._elements: dict[tuple[object, ...], list[StageElements]] = {}
        self._resting: dict[tuple[object, ...], Resting] = {}
        self._tapes: dict[tuple[object, ...], _Tapes] = {}

    def bytes_of(self, plan: Plan) -> int:
        """Bytes that the worst rank holds at least: what stays throughout and what its schedule must have in flight on
        the first rank, or on the rank of the last stage, which keeps the logits."""
        ends, counts = self.ends_of(plan), plan.microbatch_counts
        resting = self.resting_of(plan, len(counts), ends, {plan.layout.zero: lambda: plan})
        return least_bytes(plan.schedule.name, plan, counts[0], resting, self.saved_of(plan, ends))[0]

    def resting_of(
        self, plan: Plan, num_counts: int, ends: tuple[End, End], zeros: Mapping[int, Callable[[], Plan]]
    ) -> list[tuple[Resting, Resting]]:
        """What rests on the ranks of the first and of the last stage of plans that differ from one in their ZeRO stage:
        by ZeRO stage what makes the plan. `num_counts` are different numbers of microbatches that data-parallel ranks
        have."""
        layout, found = plan.layout, list[Resting]()
        cut = (layout.tp, layout.cp, layout.ep, layout.etp, layout.dp, len(plan.placement.ranks[0]), num_counts)
        for zero, made in zeros.items():
            for end in ends:
                key = (cut, zero, end.resting_number)
                if (resting := self._resting.get(key)) is None:
                    resting = self._resting[key] = self._rests(made(), end)
                found.append(resting)
        return list(zip(found[::2], found[1::2], strict=True))

    def saved_of(self, plan: Plan, ends: tuple[End, End]) -> tuple[Saved, Saved]:
        """What a microbatch keeps on the ranks of the first and of the last stage."""
        tapes = self._tapes_of(plan)
        return self._saved_of(0, ends[0], tapes), self._saved_of(1, ends[1], tapes)

    def _rests(self, plan: Plan, end: End) -> Resting:
        """What rests on the rank of an end. Parts of its stages are those of all copies and ZeRO stages, how often they
        are cut is not."""
        layout, profile = plan.layout, profile_of(plan).memory
        key = (layout.tp, layout.ep, layout.etp, end.resting_number)
        if (stages := self._elements.get(key)) is None:
            stages = self._elements[key] = [elements_of(plan, profile, stage) for stage, _ in end.stages]
        held, summed = 0, 0
        for (stage, count), elements in zip(end.stages, stages, strict=True):
            of_plan = elements._replace(shards=num_shards(plan, stage))
            held += count * (weights_bytes(plan, profile, of_plan) + optimizer_bytes(plan, profile, of_plan))
            summed += count * gradients_bytes(plan, profile, of_plan)
        return Resting(held, summed)

    def _tapes_of(self, plan: Plan) -> _Tapes:
        """What is known of layouts that cut layers as a plan's does."""
        layout = plan.layout
        cut = (layout.tp, layout.cp, layout.cp_inner, layout.ep, layout.etp, layout.sequence_parallel)
        key = (*cut, plan.batch.micro_size, plan.recompute)
        if key not in self._tapes:
            self._tapes[key] = _Tapes(LayerTensors(plan, profile_of(plan).memory), part_tapes(plan), {})
        return self._tapes[key]

    def _saved_of(self, side: int, end: End, tapes: _Tapes) -> Saved:
        """What a microbatch keeps on the rank of the first stage, or where `side` is 1 of the last. The backward that
        is looked at is that of the last part, before which nothing of the stage is freed."""
        key = 2 * end.number + side
        if (saved := tapes.saved.get(key)) is None:
            tensors, parts = tapes.tensors, tapes.parts
            retained, own = (
                sum(count * part_tape(group, tensors, parts).retained_bytes for group, count in groups)
                for groups in (end.parts, end.own)
            )
            tape = part_tape(end.last, tensors, parts)
            saved = tapes.saved[key] = Saved(retained, own, tape.backward_bytes - tape.retained_bytes)
        return saved

    def ends_of(self, plan: Plan) -> tuple[End, End]:
        """The ranks of the first and of the last stage."""
        layout, placement = plan.layout, plan.placement
        last = placement.num_stages - 1
        owned = tuple(placement.stages_of_ranks[placement.ranks[stage][0]] for stage in (0, last))
        key = (layout.pp, layout.vpp, layout.stages, owned, plan.recompute)
        if (ends := self._ends.get(key)) is None:
            first, other = owned
            ends = self._ends[key] = (self._end(plan, first, first[0]), self._end(plan, other, other[-1]))
        return ends

    def _end(self, plan: Plan, stages: Sequence[int], at_end: int) -> End:
        """The rank that holds some stages, of which one is first or last of all."""
        same: dict[object, list[int]] = {}
        for stage in stages:
            same.setdefault(composition(stage_groups(plan, stage)), []).append(stage)
        contents = tuple(composition(stage_groups(plan, stage)) for stage in stages)
        weights = tuple(stage_groups(plan, stage).weights for stage in stages)
        return End(
            number=self._numbers.setdefault(contents, len(self._numbers)),
            resting_number=self._numbers.setdefault(("weights", weights), len(self._numbers)),
            stages=tuple((first, 1 + len(others)) for first, *others in same.values()),
            parts=_saved_parts(plan, stages),
            own=_saved_parts(plan, [at_end]),
            last=stage_groups(plan, at_end)[-1],
        )


def _saved_parts(plan: Plan, stages: Sequence[int]) -> tuple[tuple[Group, int], ...]:
    """The parts of stages of which a microbatch keeps something on the device, one of those that are equal with how
    many these are."""
    found: dict[int, tuple[Group, int]] = {}
    for group in (group for stage in stages for group in stage_groups(plan, stage) if not group.offloaded):
        _, known = found.get(group.part, (group, 0))
        found[group.part] = (group, known + group.count)
    return tuple(found.values())


def least_bytes(
    name: str,
    plan: Plan,
    num_microbatches: int,
    resting: Sequence[tuple[Resting, Resting]],
    saved: tuple[Saved, Saved],
) -> list[int]:
    """Bytes that the worst rank holds at least with a schedule, for everything that may rest on the ends of a plan."""
    first, last = _running(name, saved, plan.layout.pp, num_microbatches)
    if name in FILLED_IN_FLIGHT and _is_steady(
        plan, num_microbatches
    ):  # gradients are summed while these are in flight
        return [max(start.held + start.summed + first, end.held + end.summed + last) for start, end in resting]
    return [max(start.held + max(start.summed, first), end.held + max(end.summed, last)) for start, end in resting]


def _is_steady(plan: Plan, num_microbatches: int) -> bool:
    """Whether all gradients are there when the pipeline is full."""
    return not profile_of(plan).memory.growing_gradients or num_microbatches >= 3 * plan.layout.pp


def _running(name: str, saved: tuple[Saved, Saved], pp: int, num_microbatches: int) -> tuple[int, int]:
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
