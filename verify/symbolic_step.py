"""Gradient reductions and the optimizer step on expressions, over the grid of all tensor-parallel ranks and all copies of a stage.

A gradient on one rank is the sum of what its microbatches gave; here it is a digest that names the stage, the rank's cut, and the copy
(which samples). Sums of digests modulo 2^64 are sums of gradients: see `expressions`. Exact numerics put every sample into its place
of the batch tree, in whatever order it comes (`core.reduction.CarryTree`), so an all_to_all of tree nodes keeps the order, and a library's
all_reduce does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..core.action import Kind
from ..core.parameters import Usage, stage_parameters, stage_usages
from ..core.plan import Plan
from ..core.program import Collective, Operations
from ..core.schedule import Placement
from .expressions import digest
from .symbolic_layers import Program
from .symbolic_tensors import MisfitError

States = Mapping[str, tuple[tuple[int, int], ...]]
"""`Usage.key` -> of every tensor-parallel rank the tokens `[lo, hi)` that its gradient covers."""


@dataclass(frozen=True)
class StepDifference:
    """Something that REDUCE_GRAD or STEP makes otherwise than one device; an `order` one is the same sum in another order."""

    kind: str
    where: str
    what: str


@dataclass
class StageGradients:
    """The gradients of one stage: arrays [tp, dp, replica] of digests by usage, alike for usages that are treated alike.

    `is_part` says that each copy has finished a part of the elements only (ZeRO).
    """

    plan: Plan
    placement: Placement
    stage: int
    values: dict[str, np.ndarray] = field(default_factory=dict)
    wanted: dict[str, np.ndarray] = field(default_factory=dict)
    is_part: bool = False
    reordered: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """[tp, dp, replica]."""
        return self.plan.layout.tp, self.plan.layout.dp, len(self.placement.ranks[self.stage])


def reduced_gradients(
    plan: Plan,
    placement: Placement,
    program: Program,
    stage: int,
    states: States,
    num_reductions: Mapping[tuple[int, int], tuple[int, ...]],
) -> tuple[StageGradients, list[StepDifference]]:
    """A stage's gradients as STEP finds them, and what is wrong with them.

    `num_reductions` says how often each holder's contributions pass through REDUCE_GRAD (`symbolic_sums.Judgement`).
    """
    gradients = StageGradients(plan, placement, stage)
    differences: list[StepDifference] = []
    usages = stage_usages(plan.model, plan.stages[stage])
    covered = {parameter.name for parameter in program.own_tokens(plan, stage)}
    representatives: dict[tuple[object, ...], Usage] = {}
    for usage in usages:
        representatives.setdefault(_treatment(usage, states, covered), usage)
    calls = [program.actions(plan, Kind.REDUCE_GRAD, stage, t, d, replica=r) for t, d, r in np.ndindex(gradients.shape)]
    operations, note = _in_step(calls)
    if note:
        differences.append(StepDifference("value", f"{stage}REDUCE_GRAD", note))
    per_holder = [num_reductions.get((rank, stage), ()) for rank in placement.ranks[stage]]
    for usage in representatives.values():
        try:
            total = _reduce_usage(gradients, usage, states[usage.key], operations, per_holder, usage.parameter.name in covered)
        except MisfitError as error:
            differences.append(StepDifference("value", f"{stage}REDUCE_GRAD, {usage.key}", str(error)))
            continue
        wanted = gradients.wanted[usage.key]
        if not np.array_equal(total, wanted):
            alike = len([each for each in usages if _treatment(each, states, covered) == _treatment(usage, states, covered)])
            what = _how(total, wanted, per_holder, operations) + (f" (and {alike - 1} more gradients alike)" if alike > 1 else "")
            differences.append(StepDifference("value", f"{stage}REDUCE_GRAD, {usage.key}", what))
        gradients.values[usage.key] = wanted  # what follows is judged on its own
    in_parts = plan.layout.zero > 0 and plan.num_copies(stage) > 1
    if usages and gradients.is_part != in_parts and not any(difference.kind == "value" for difference in differences):
        what = "every copy keeps whole gradients" if in_parts else "every copy keeps a part of the gradients only"
        differences.append(StepDifference("value", f"{stage}REDUCE_GRAD", f"{what}, and zero={plan.layout.zero} wants it otherwise"))
    gradients.is_part = in_parts and bool(usages)  # a stage without layers has no parts
    if split := _split_blocks(plan, [tokens for usage in usages if usage.parameter.name in covered for tokens in states[usage.key]]):
        differences.append(StepDifference("order", f"{stage}REDUCE_GRAD", split))
    if gradients.reordered:
        what = "gradients are added over ranks in the library's order"
        differences.append(StepDifference("order", f"{stage}REDUCE_GRAD", what))
    return gradients, differences


def _split_blocks(plan: Plan, bounds: Sequence[tuple[int, int]]) -> str:
    """What is wrong with tokens that are cut inside a leaf of exact sums over tokens."""
    block = plan.leaf_sizes.reduction_token_block
    split = [end for tokens in bounds for end in tokens if end % block and end != plan.batch.sequence]
    if plan.numerics.mode == "fast" or not split:
        return ""
    return f"sums over tokens are cut at token {split[0]}, inside a block of reduction_token_block={block}"


def _treatment(usage: Usage, states: States, covered: set[str]) -> tuple[object, ...]:
    return usage.role, usage.parameter.cut is None, states[usage.key], usage.parameter.name in covered


def _reduce_usage(
    gradients: StageGradients,
    usage: Usage,
    tokens: Sequence[tuple[int, int]],
    operations: Sequence[Collective],
    per_holder: Sequence[tuple[int, ...]],
    covered: bool,
) -> np.ndarray:
    """The sum over all groups of contributions, each reduced as often as the schedule does it."""
    shape, sequence = gradients.shape, gradients.plan.batch.sequence
    total, wanted = np.zeros(shape, dtype=np.uint64), np.zeros(shape, dtype=np.uint64)
    for times in sorted({times for counts in per_holder for times in counts}):
        own, whole = np.zeros(shape, dtype=np.uint64), np.zeros(shape, dtype=np.uint64)
        for t, d, r in np.ndindex(shape):
            if times in per_holder[r]:
                name = (gradients.stage, usage.key, t if usage.parameter.cut is not None else "", d, r, times)
                own[t, d, r] = _tokens_digest(name, *tokens[t])
                whole[t, d, r] = _tokens_digest(name, 0, sequence)
        wanted += np.broadcast_to(whole.sum((1, 2), keepdims=True, dtype=np.uint64), shape)
        gradients.is_part = False
        for _ in range(times):
            for operation in operations:
                if operation.axis != "tp" or covered:
                    own = _collective(gradients, operation, own)
        total += own
    gradients.wanted[usage.key] = wanted
    return total


def _tokens_digest(name: tuple[object, ...], lo: int, hi: int) -> np.uint64:
    """Digests of intervals of tokens add up as the intervals do."""
    ends = [digest(name, position) if position else 0 for position in (hi, lo)]
    return np.uint64((ends[0] - ends[1]) % 2**64)


def _collective(gradients: StageGradients, operation: Collective, own: np.ndarray) -> np.ndarray:
    axes = {"tp": (0,), "dp": (1,), "replica": (1, 2)}.get(operation.axis)
    if axes is None:
        raise MisfitError(f"{operation.op} over {operation.axis} does not join ranks that hold the same gradients")
    size = int(np.prod([own.shape[axis] for axis in axes]))
    if operation.group_size != size:
        raise MisfitError(f"{operation.op} over {operation.axis} names {operation.group_size} ranks, but there are {size}")
    if operation.op == "all_gather":
        if not gradients.is_part:
            raise MisfitError("all_gather is given gradients that every rank holds whole")
        gradients.is_part = False
        return own
    if gradients.is_part:
        raise MisfitError(f"{operation.op} adds parts of different elements")
    gradients.is_part = operation.op in ("reduce_scatter", "all_to_all")
    gradients.reordered |= operation.op != "all_to_all"
    return np.broadcast_to(own.sum(axes, keepdims=True, dtype=np.uint64), own.shape)


def _in_step(sequences: Sequence[Sequence[object]]) -> tuple[list[Collective], str]:
    """The collectives that all ranks call in one order, and a note when they do not."""
    calls = [[each for each in sequence if isinstance(each, Collective)] for sequence in sequences]
    kinds = [[(call.op, call.axis, call.layer) for call in own] for own in calls]
    for own in kinds:
        if own != kinds[0]:
            return calls[0], f"ranks call different collectives: {_calls_text(kinds[0])} and {_calls_text(own)}"
    return calls[0], ""


def _calls_text(kinds: Sequence[tuple[str, str, str]]) -> str:
    return ", ".join(f"{op} over {axis}" for op, axis, _ in kinds) or "none"


def _how(total: np.ndarray, wanted: np.ndarray, per_holder: Sequence[tuple[int, ...]], operations: Sequence[Collective]) -> str:
    for times in range(2, 1025):
        if np.array_equal(total, wanted * np.uint64(times)):
            return f"it is {times} times the sum over the global batch"
    if any(0 in counts for counts in per_holder):
        return "a part of it is never reduced: STEP uses a rank's own samples only"
    if any(count > 1 for counts in per_holder for count in counts):
        return f"contributions pass through REDUCE_GRAD {max(max(counts, default=0) for counts in per_holder)} times"
    called = _calls_text([(each.op, each.axis, each.layer) for each in operations])
    return f"it is not the sum over all tokens of the global batch; REDUCE_GRAD calls {called}"


def unshard_difference(plan: Plan, placement: Placement, program: Program, stage: int) -> StepDifference | None:
    """What is wrong with UNSHARD of a stage: it has to bring together the parts of all copies (ZeRO-3)."""
    shape = plan.layout.tp, plan.layout.dp, len(placement.ranks[stage])
    calls, note = _in_step([program.actions(plan, Kind.UNSHARD, stage, t, d, replica=r) for t, d, r in np.ndindex(shape)])
    size = shape[1] * shape[2]
    due = plan.layout.zero == 3 and size > 1 and bool(stage_parameters(plan.model, plan.stages[stage]))
    wanted = [("all_gather", "dp" if shape[2] == 1 else "replica", size)] * due
    if note or [(call.op, call.axis, call.group_size) for call in calls] != wanted:
        called = _calls_text([(call.op, call.axis, call.layer) for call in calls])
        return StepDifference(
            "value", f"{stage}UNSHARD", note or f"one all_gather over {size} copies is due, and the program calls {called}"
        )
    return None


class Step:
    """STEP of all pipeline ranks together."""

    def __init__(self, plan: Plan, placement: Placement, program: Program, stages: Sequence[StageGradients]):
        self.plan, self.placement, self.stages = plan, placement, stages
        self.ranks = [rank for rank in range(placement.num_ranks) if placement.stages_of(rank)]
        self.shape = (len(self.ranks), plan.layout.tp, plan.layout.dp)
        self.operations: dict[tuple[int, int, int], Operations] = {}
        for rank, t, d in np.ndindex(self.shape):
            stage = placement.stages_of(self.ranks[rank])[0]
            replica = placement.replica_of(stage, self.ranks[rank])
            self.operations[rank, t, d] = program.actions(plan, Kind.STEP, stage, t, d, replica=replica)

    def differences(self) -> Iterator[StepDifference]:
        """Everything STEP does otherwise than one device."""
        yield from self._scalar("grad_norm", *self._squares())
        yield from self._scalar("loss", *self._losses())
        yield from self._tied_table()
        yield from self._parameters()

    def _of_layer(self, layer: str) -> tuple[list[Collective], str]:
        return _in_step([[each for each in own if getattr(each, "layer", None) == layer] for own in self.operations.values()])

    def _squares(self) -> tuple[np.ndarray, np.uint64]:
        """Each rank's sum of squares, every element of the model counted once: on a stage's first replica, or every copy's own part. What
        tensor parallelism does not cut is counted by its first rank, and goes with that rank's slices here."""
        own, total = np.zeros(self.shape, dtype=np.uint64), np.uint64(0)
        for gradients in self.stages:
            if not gradients.values:  # a stage without layers
                continue
            squares = np.empty(gradients.shape, dtype=np.uint64)
            for cell in np.ndindex(gradients.shape):
                squares[cell] = digest("squares", gradients.stage, *cell)
            total = squares.sum(dtype=np.uint64, initial=total)
            for replica, pp_rank in enumerate(self.placement.ranks[gradients.stage]):
                if gradients.is_part:
                    own[self.ranks.index(pp_rank)] += squares[:, :, replica]
                elif replica == 0:
                    own[self.ranks.index(pp_rank)] += squares.sum((1, 2), dtype=np.uint64)[:, None]
        return own, total

    def _losses(self) -> tuple[np.ndarray, np.uint64]:
        """The losses of a rank's samples, on the ranks of the last stage, counted by the first tensor-parallel rank."""
        own, total = np.zeros(self.shape, dtype=np.uint64), 0
        for replica, pp_rank in enumerate(self.placement.ranks[-1]):
            for d in range(self.plan.layout.dp):
                loss = digest("losses", d, replica)
                own[self.ranks.index(pp_rank), 0, d] = loss
                total += loss
        return own, np.uint64(total % 2**64)

    def _scalar(self, layer: str, own: np.ndarray, wanted: np.uint64) -> Iterator[StepDifference]:
        calls, note = self._of_layer(layer)
        for call in calls:
            axes = {"dp": (2,), "model": (0, 1), "tp": (1,)}.get(call.axis)
            if axes is None:
                note = note or f"{call.op} over {call.axis} is no sum over the ranks that hold parts of it"
            else:
                own = np.broadcast_to(own.sum(axes, keepdims=True, dtype=np.uint64), own.shape)
        if note or not (own == wanted).all():
            axes_text = " and ".join(call.axis for call in calls) or "no axis"
            rank, t, d = np.argwhere(own != wanted)[0].tolist() if not note else (0, 0, 0)
            place = f"pipeline rank {self.ranks[rank]}, tp rank {t}, dp rank {d}"
            what = note or f"{place} has another sum than one device; its parts are added over {axes_text}"
            yield StepDifference("value", f"STEP, {layer}", what)
        elif any(call.op == "all_reduce" for call in calls):
            yield StepDifference("order", f"STEP, {layer}", "the scalar is added over ranks in the library's order")

    def _tied_table(self) -> Iterator[StepDifference]:
        """First and last stage add the sums of their uses; each rank that holds one of them needs the other's."""
        if not self.plan.model.tied_embeddings:
            return
        first, last = self.placement.ranks[0], self.placement.ranks[-1]
        for rank, pp_rank in enumerate(self.ranks):
            needed = int((pp_rank in first) != (pp_rank in last))
            for t, d in np.ndindex(self.shape[1:]):
                calls = [each for each in self.operations[rank, t, d] if isinstance(each, Collective) and each.axis == "embedding"]
                if len(calls) != needed:
                    where = f"STEP, embedding.tokens.weight on pipeline rank {pp_rank}, tp rank {t}, dp rank {d}"
                    uses = "without the other end's use" if len(calls) < needed else "with a sum that is added more than once"
                    what = f"the tied table is updated {uses}: {needed} collectives over embedding are due, {len(calls)} called"
                    yield StepDifference("value", where, what)
                    return

    def _parameters(self) -> Iterator[StepDifference]:
        """Weights whose parts were updated apart must come together again: in STEP, or with ZeRO-3 at UNSHARD."""
        if self.plan.layout.zero == 3:
            return
        by_stage = {gradients.stage: gradients for gradients in self.stages}
        for rank, pp_rank in enumerate(self.ranks):
            apart = [stage for stage in self.placement.stages_of(pp_rank) if by_stage[stage].is_part]
            for t, d in np.ndindex(self.shape[1:]):
                own = self.operations[rank, t, d]
                gathers = [each for each in own if isinstance(each, Collective) and each.layer == "" and each.op == "all_gather"]
                sizes = [each.group_size for each in gathers if each.axis in ("dp", "replica")]
                if sizes != [int(np.prod(by_stage[stage].shape[1:])) for stage in apart]:
                    where = f"STEP on pipeline rank {pp_rank}, tp rank {t}, dp rank {d}"
                    what = f"stages {apart} are updated in parts, which {len(gathers)} all_gather over their copies bring together"
                    yield StepDifference("value", where, what)
                    return
