"""Gradient reductions on expressions, over the grid of all tensor-parallel ranks and all copies of a stage. What
follows: `symbolic_step`.

A gradient on one rank is the sum of what its microbatches gave; here it is a digest that names the stage, the rank's
cut, and the copy (which samples). Sums of digests modulo 2^64 are sums of gradients: see `expressions`. Exact numerics
put every sample into its place of the batch tree, in whatever order it comes (`core.base.reduction.CarryTree`), so an
all_to_all of tree nodes keeps the order, and a library's all_reduce does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ...core.base.findings import Where
from ...core.layout.stage_parameters import Usage, stage_parameters, stage_usages
from ...core.plan.plan import Plan
from ...core.program import (
    EXPERT_BIAS,
    Collective,
    Operations,
    num_copies,
    num_shards,
    sequences_are_cut,
)
from ...core.program.buckets import bucket_layers, sums_are_sharded
from ...core.program.holdings import PART_LAYERS, KnownPart, knows_heads
from ...core.schedule.action import Action, Kind
from ...core.schedule.placement import Placement
from .experts import EXPERT_AXES, ExpertGrid
from .expressions import MODULUS, digest, digests
from .layers import Program
from .shards import dense_place, split_axis, summed
from .tensors import MisfitError

States = Mapping[str, tuple[tuple[int, int], ...]]
"""`Usage.key` -> of every tensor-parallel rank the tokens `[lo, hi)` that its gradient covers."""


@dataclass(frozen=True)
class StepDifference:
    """Something that REDUCE_GRAD or STEP makes otherwise than one device, over an `axis` where one is known; an `order`
    one is the same sum in another order."""

    kind: Literal["value", "order"]
    where: Where
    what: str
    axis: str | None = None


@dataclass
class StageGradients:
    """The gradients of one stage: arrays [tp, dp, replica] of digests by usage, one for
    usages that are treated in the same way.

    `is_part` says that each copy has finished a part of the elements only (ZeRO), `in_turn` that these are parts of
    a sum over tensor- and context-parallel ranks, which have to come together first, `divided` that they are parts
    of what a rank is to keep.
    """

    plan: Plan
    placement: Placement
    stage: int
    values: dict[str, np.ndarray] = field(default_factory=dict)
    wanted: dict[str, np.ndarray] = field(default_factory=dict)
    is_part: bool = False
    in_turn: bool = False
    divided: bool = False
    reordered: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """[tp, dp, replica], of which dp counts the context-parallel ranks of every data-parallel rank
        too, as its fastest axis."""
        layout = self.plan.layout
        return layout.tp, layout.dp * layout.cp, len(self.placement.ranks[self.stage])


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
    reduction = str(Action(stage, Kind.REDUCE_GRAD))
    usages = stage_usages(plan.model, plan.stages[stage])
    covered = {parameter.name for parameter in program.own_tokens(plan, stage)}
    buckets = bucket_layers(plan, stage)
    representatives: dict[tuple[object, ...], Usage] = {}
    for usage in usages:
        representatives.setdefault((buckets.get(usage.key), *_treatment(usage, states, covered)), usage)
    operations, note = in_step(of_ranks(program, plan, Kind.REDUCE_GRAD, stage, len(placement.ranks[stage])))
    if note:
        differences.append(StepDifference("value", Where(action=reduction), note))
    after_each, note = _after_each_microbatch(plan, program, stage)
    if note:
        differences.append(StepDifference("value", Where(words=f"{stage}B"), note))
    counted = [operation for operation in operations if operation.layer == EXPERT_BIAS]
    operations = [operation for operation in operations if operation.layer != EXPERT_BIAS]
    differences += _counts_difference(gradients, counted)
    per_holder = [num_reductions.get((rank, stage), ()) for rank in placement.ranks[stage]]
    for usage in representatives.values():
        where = Where(action=reduction, tensor=usage.parameter.name, words=f"{reduction}, {usage.key}")
        try:
            given = [
                _operations_for(plan, usage, each, covered, buckets.get(usage.key, ""))
                for each in (after_each, operations)
            ]
            covering = usage.parameter.name in covered
            total = _reduce_usage(gradients, usage, states[usage.key], given, per_holder, covering)
        except MisfitError as error:
            differences.append(StepDifference("value", where, str(error)))
            continue
        wanted = gradients.wanted[usage.key]
        if not np.array_equal(total, wanted):
            num_equal = len(
                [each for each in usages if _treatment(each, states, covered) == _treatment(usage, states, covered)]
            )
            what = _how(total, wanted, per_holder, operations) + (
                (f" (and {num_equal - 1} more gradients)") if num_equal > 1 else ""
            )
            differences.append(StepDifference("value", where, what))
        gradients.values[usage.key] = wanted  # what follows is judged on its own
    in_parts = plan.layout.zero > 0 and num_shards(plan, stage).dense > 1
    if usages and gradients.is_part != in_parts and not any(difference.kind == "value" for difference in differences):
        what = "every copy keeps whole gradients" if in_parts else "every copy keeps a part of the gradients only"
        what += f", and zero={plan.layout.zero} wants it otherwise"
        differences.append(StepDifference("value", Where(action=reduction), what, axis="dp"))
    gradients.is_part = in_parts and bool(usages)  # a stage without layers has no parts
    by_tokens = [usage for usage in usages if usage.parameter.name in covered and not knows_heads(usage.parameter)]
    if split := _split_blocks(plan, [tokens for usage in by_tokens for tokens in states[usage.key]]):
        differences.append(StepDifference("order", Where(action=reduction), split))
    if gradients.reordered:
        what = "gradients are added over ranks in the library's order"
        differences.append(StepDifference("order", Where(action=reduction), what))
    return gradients, differences


def _counts_difference(gradients: StageGradients, operations: Sequence[Collective]) -> Iterator[StepDifference]:
    """What is wrong with the counts of the experts that the step's tokens chose: every rank needs them
    over all tokens, once."""
    plan, stage, shape = gradients.plan, gradients.stage, gradients.shape
    if not plan.model.expert_bias or not any(
        usage.parameter.expert for usage in stage_usages(plan.model, plan.stages[stage])
    ):
        return
    own, wanted = np.zeros(shape, dtype=np.uint64), 0
    for t, d, r in np.ndindex(shape):
        own[t, d, r] = _tokens_digest((EXPERT_BIAS, stage, d, r), *plan.tokens_of(t))
    for d, r in np.ndindex(shape[1:]):
        wanted += int(_tokens_digest((EXPERT_BIAS, stage, d, r), 0, plan.batch.sequence // plan.layout.cp))
    for operation in operations:
        axes = {"tp": (0,), "dp": (1,), "replica": (1, 2)}.get(operation.axis, ())
        own = np.broadcast_to(own.sum(axes, keepdims=True, dtype=np.uint64), own.shape)
    if not (own == np.uint64(wanted % MODULUS)).all():
        called = calls_text([(each.op, each.axis, each.layer) for each in operations])
        what = f"counts of chosen experts are not those of the global batch; REDUCE_GRAD calls {called}"
        yield StepDifference("value", Where(action=str(Action(stage, Kind.REDUCE_GRAD)), tensor=EXPERT_BIAS), what)


def _split_blocks(plan: Plan, bounds: Sequence[tuple[int, int]]) -> str:
    """What is wrong with tokens that are cut inside a leaf of exact sums over tokens."""
    block = plan.leaf_sizes.reduction_token_block
    split = [end for tokens in bounds for end in tokens if end % block and end != plan.batch.sequence]
    if plan.numerics.mode == "fast" or not split:
        return ""
    return f"sums over tokens are cut at token {split[0]}, inside a block of reduction_token_block={block}"


def _treatment(usage: Usage, states: States, covered: set[str]) -> tuple[object, ...]:
    cut, expert = usage.parameter.cut is None, usage.parameter.expert
    return usage.role, cut, expert, states[usage.key], usage.parameter.name in covered, knows_heads(usage.parameter)


def _operations_for(
    plan: Plan, usage: Usage, operations: Sequence[Collective], covered: set[str], bucket: str
) -> list[Collective]:
    """The collectives that a gradient goes through: over tensor parallelism only where a rank knows a part of it, of
    tokens or of heads, which exact numerics exchange apart."""
    kind: KnownPart = "heads" if knows_heads(usage.parameter) and plan.numerics.mode == "exact" else "tokens"
    layer = PART_LAYERS[kind] if usage.parameter.name in covered else None
    theirs = [each for each in operations if (split_axis(each.axis)[0] in EXPERT_AXES) == usage.parameter.expert]
    return [each for each in theirs if each.layer == (layer if each.axis in ("tp", "tp_cp") else bucket)]


def _after_each_microbatch(plan: Plan, program: Program, stage: int) -> tuple[list[Collective], str]:
    """The collectives over copies that follow the weight gradients of every microbatch, and what is wrong with them:
    they are part of B and of W, and not of I."""
    if not sums_are_sharded(plan):
        return [], ""
    calls, note = [], ""
    for tp_rank in range(plan.layout.tp):
        by_kind = [
            [
                each
                for each in program.actions(plan, kind, stage, tp_rank)
                if isinstance(each, Collective) and _is_over_copies(each)
            ]
            for kind in (Kind.B, Kind.W, Kind.I)
        ]
        if by_kind[0] != by_kind[1] or by_kind[2]:
            note = "gradients of a microbatch are reduced otherwise after B than after W"
        calls.append(by_kind[0])
    operations, apart = in_step(calls)
    return operations, note or apart


def _is_over_copies(operation: Collective) -> bool:
    return split_axis(operation.axis)[0] in ("dp", "replica", *EXPERT_AXES)


def _reduce_usage(
    gradients: StageGradients,
    usage: Usage,
    tokens: Sequence[tuple[int, int]],
    given: Sequence[Sequence[Collective]],
    per_holder: Sequence[tuple[int, ...]],
    covered: bool,
) -> np.ndarray:
    """The sum over all groups of contributions, each reduced by what is `given` after its microbatch, and then by what
    is given at REDUCE_GRAD as often as the schedule does it.

    Where context-parallel ranks finish sequences after every microbatch (`exchange_difference`), each then
    has a part of the elements.
    """
    if usage.parameter.expert:
        return _reduce_experts(gradients, usage, tokens, given, per_holder)
    (after_each, operations), shape, plan = given, gradients.shape, gradients.plan
    local, by_parts = plan.batch.sequence // plan.layout.cp, sequences_are_cut(plan)
    whole_part = plan.leaf_sizes.heads.num_items if knows_heads(usage.parameter) else local
    if by_parts and not knows_heads(usage.parameter):  # heads, however many, are no sequence that was gathered
        tokens = [(0, local) if each == (0, plan.batch.sequence) else each for each in tokens]  # gathered, not summed
    total, wanted = np.zeros(shape, dtype=np.uint64), np.zeros(shape, dtype=np.uint64)
    for times in sorted({times for counts in per_holder for times in counts}):
        counted = np.array([times in counts for counts in per_holder], dtype=np.uint64)
        cells = shape if usage.parameter.cut is not None else (1, *shape[1:])
        at = {
            end: _tokens_digests((gradients.stage, usage.key, times), end, cells)
            for end in {whole_part, *(e for each in tokens for e in each)}
        }
        own = np.stack([(at[hi] - at[lo])[t % cells[0]] for t, (lo, hi) in enumerate(tokens)]) * counted
        whole = np.broadcast_to(at[whole_part], shape) * counted
        wanted += np.broadcast_to(whole.sum((1, 2), keepdims=True, dtype=np.uint64), shape)
        gradients.is_part, gradients.in_turn = by_parts and not covered, False
        if gradients.is_part:
            own = _over_cp(own, plan.layout.cp)
        for operation in after_each:
            own = _collective(gradients, operation, own)
        for _ in range(times):
            over_tokens = [
                operation for operation in operations if split_axis(operation.axis)[0] not in ("dp", "replica")
            ]
            for operation in over_tokens:
                own = _collective(gradients, operation, own)
            gradients.is_part |= by_parts  # of what has come together each takes its part again
            for operation in operations[len(over_tokens) :]:
                own = _collective(gradients, operation, own)
        total += own
    gradients.wanted[usage.key] = wanted
    _check_placement(gradients)
    return total


def _check_placement(gradients: StageGradients) -> None:
    """Raises `MisfitError` where hybrid sharding has left a rank less than the part it is to keep."""
    if gradients.divided:
        gradients.divided = False
        raise MisfitError("its parts, which ranks that keep equal ones have finished, do not come together")


def _over_cp(own: np.ndarray, cp: int) -> np.ndarray:
    """Summed over the context-parallel ranks of every data-parallel rank."""
    apart = own.reshape(own.shape[0], -1, cp, own.shape[2])
    return np.broadcast_to(apart.sum(2, keepdims=True, dtype=np.uint64), apart.shape).reshape(own.shape)


def _reduce_experts(
    gradients: StageGradients,
    usage: Usage,
    tokens: Sequence[tuple[int, int]],
    given: Sequence[Sequence[Collective]],
    per_holder: Sequence[tuple[int, ...]],
) -> np.ndarray:
    """The same for a parameter of experts, whose copies lie on other ranks."""
    shape, plan, cut = gradients.shape, gradients.plan, usage.parameter.cut is not None
    grid, of_dense, local = ExpertGrid(plan.layout), gradients.is_part, plan.batch.sequence // plan.layout.cp
    total, wanted = np.zeros(shape, dtype=np.uint64), np.zeros(shape, dtype=np.uint64)
    for times in sorted({times for counts in per_holder for times in counts}):
        name = (gradients.stage, usage.key, times)
        replicas = [r for r in range(shape[2]) if times in per_holder[r]]
        own = grid.contributions(name, shape[2], cut=cut, part=lambda name, t: int(_tokens_digest(name, *tokens[t])))
        own[:, :, [r for r in range(shape[2]) if r not in replicas]] = 0
        wanted += grid.wanted(name, replicas, shape, cut=cut, whole=lambda name, _: int(_tokens_digest(name, 0, local)))
        gradients.is_part = False
        for operation in [*given[0], *(each for _ in range(times) for each in given[1])]:
            own = _collective(gradients, operation, own)
        total += own
    gradients.wanted[usage.key] = wanted
    _check_placement(gradients)
    in_parts = plan.layout.zero > 0 and num_shards(plan, gradients.stage).expert > 1
    if gradients.is_part != in_parts and per_holder:
        raise MisfitError(
            f"zero={plan.layout.zero}, and every copy keeps {'a part' if gradients.is_part else 'all'} of it"
        )
    gradients.is_part = of_dense
    return total


def _tokens_digest(name: tuple[object, ...], lo: int, hi: int) -> np.uint64:
    """Digests of intervals of tokens add up as the intervals do."""
    ends = [digest(name, position) if position else 0 for position in (hi, lo)]
    return np.uint64((ends[0] - ends[1]) % 2**64)


def _tokens_digests(name: tuple[object, ...], end: int, shape: tuple[int, ...]) -> np.ndarray:
    """The digests of the tokens before `end`, one for every cell."""
    return digests(shape, name, end) if end else np.zeros(shape, dtype=np.uint64)


def _over_level(gradients: StageGradients, operation: Collective, own: np.ndarray) -> np.ndarray:
    """A collective of hybrid sharding: a reduction over those that keep a part each, then one over those that keep
    equal parts, which exact numerics make of parts of these parts, that have to come together again."""
    plan, (base, level), replicas = gradients.plan, split_axis(operation.axis), own.shape[2]
    is_expert = base in EXPERT_AXES
    parts, size = num_shards(plan, gradients.stage)[is_expert], num_copies(plan, gradients.stage)[is_expert]
    if operation.op == "all_gather":
        if level == "shard" or not gradients.divided:
            raise MisfitError(f"all_gather over {operation.axis} is given gradients that every rank keeps")
        gradients.divided = False
        return own
    by_parts = sequences_are_cut(plan) and not is_expert
    if level == "shard" and gradients.is_part and not by_parts:
        raise MisfitError(f"{operation.op} adds parts of different elements")
    if level == "replicate" and (gradients.divided or gradients.is_part != (parts > 1)):
        raise MisfitError(f"{operation.op} over {operation.axis} comes before every rank has a part")
    gradients.is_part |= level == "shard"
    gradients.divided = level == "replicate" and operation.op == "all_to_all"
    gradients.reordered |= operation.op != "all_to_all"
    grid = ExpertGrid(plan.layout)
    place = (lambda cell: grid.copy_of(cell, replicas)) if is_expert else dense_place(plan, replicas)
    return summed(operation, level, own, place, size=size, parts=parts, apart=plan.layout.cp if by_parts else 1)


def _collective(gradients: StageGradients, operation: Collective, own: np.ndarray) -> np.ndarray:
    if split_axis(operation.axis)[1]:
        return _over_level(gradients, operation, own)
    axes = {"tp": (0,), "dp": (1,), "replica": (1, 2), "tp_cp": (0,)}.get(operation.axis, ())
    if not axes and operation.axis not in EXPERT_AXES:
        raise MisfitError(f"{operation.op} over {operation.axis} does not join ranks that hold the same gradients")
    layout, by_parts = gradients.plan.layout, sequences_are_cut(gradients.plan) and operation.axis in ("dp", "replica")
    size = operation.group_size if not axes else int(np.prod([own.shape[axis] for axis in axes]))
    size *= layout.cp if operation.axis == "tp_cp" else 1
    if operation.group_size != size:
        raise MisfitError(
            f"{operation.op} over {operation.axis} names {operation.group_size} ranks, but there are {size}"
        )
    if by_parts and gradients.in_turn:
        raise MisfitError(
            f"{operation.op} over {operation.axis} is given parts of a sum over tokens that has not come together"
        )
    if by_parts and operation.op == "all_to_all":  # between the ranks that have the same part
        gradients.is_part = True
        apart = own.reshape(own.shape[0], -1, layout.cp, own.shape[2])
        added = apart.sum((1, 3) if operation.axis == "replica" else 1, keepdims=True, dtype=np.uint64)
        return np.broadcast_to(added, apart.shape).reshape(own.shape)
    if operation.op == "all_gather":
        if not gradients.is_part:
            raise MisfitError("all_gather is given gradients that every rank holds whole")
        gradients.is_part = gradients.in_turn = False
        return own
    if gradients.is_part:
        raise MisfitError(f"{operation.op} adds parts of different elements")
    gradients.is_part = operation.op in ("reduce_scatter", "all_to_all")
    gradients.in_turn = gradients.is_part and operation.axis == "tp_cp"
    gradients.reordered |= operation.op != "all_to_all"
    if not axes:
        return ExpertGrid(gradients.plan.layout).reduced(operation, own)
    own = np.broadcast_to(own.sum(axes, keepdims=True, dtype=np.uint64), own.shape)
    return _over_cp(own, layout.cp) if operation.axis == "tp_cp" else own


def of_ranks(program: Program, plan: Plan, kind: Kind, stage: int, num_replicas: int) -> list[Operations]:
    """What all ranks of a stage do in an action; data-parallel ranks that do the same stand there once."""
    tp_ranks, replicas = range(plan.layout.tp), range(num_replicas)
    return [
        own
        for tp_rank in tp_ranks
        for replica in replicas
        for _, own in program.of_copies(plan, kind, stage, tp_rank, replica)
    ]


def in_step(sequences: Sequence[Sequence[object]]) -> tuple[list[Collective], str]:
    """The collectives that all ranks call in one order, and a note when they do not."""
    # ranks that do the same may share one sequence
    distinct = {id(sequence): sequence for sequence in sequences}.values()
    calls = [[each for each in sequence if isinstance(each, Collective)] for sequence in distinct]
    kinds = [[(call.op, call.axis, call.layer) for call in own] for own in calls]
    for own in kinds:
        if own != kinds[0]:
            return calls[0], f"ranks call different collectives: {calls_text(kinds[0])} and {calls_text(own)}"
    return calls[0], ""


def calls_text(kinds: Sequence[tuple[str, str, str]]) -> str:
    """Collectives in words: `all_reduce over dp, all_gather over tp`."""
    return ", ".join(f"{op} over {axis}" for op, axis, _ in kinds) or "none"


def _how(
    total: np.ndarray, wanted: np.ndarray, per_holder: Sequence[tuple[int, ...]], operations: Sequence[Collective]
) -> str:
    for times in range(2, 1025):
        if np.array_equal(total, wanted * np.uint64(times)):
            return f"it is {times} times the sum over the global batch"
    if any(0 in counts for counts in per_holder):
        return "a part of it is never reduced: STEP uses a rank's own samples only"
    if any(count > 1 for counts in per_holder for count in counts):
        return f"contributions pass through REDUCE_GRAD {max(max(counts, default=0) for counts in per_holder)} times"
    called = calls_text([(each.op, each.axis, each.layer) for each in operations])
    return f"it is not the sum over all tokens of the global batch; REDUCE_GRAD calls {called}"


def exchange_difference(plan: Plan, program: Program, stage: int) -> StepDifference | None:
    """What is wrong with the end of a microbatch's backward: there context-parallel ranks finish sequences, once."""
    due = [("all_to_all", "cp", plan.layout.cp)] * (
        sequences_are_cut(plan) and bool(stage_parameters(plan.model, plan.stages[stage]))
    )
    for kind, wanted in ((Kind.B, due), (Kind.W, due), (Kind.I, [])):
        for tp_rank in range(plan.layout.tp):
            operations = program.actions(plan, kind, stage, tp_rank)
            sent = (
                each
                for each in operations
                if not each.layer and isinstance(each, Collective) and not _is_over_copies(each)
            )
            calls = [(each.op, each.axis, each.group_size) for each in sent]
            if calls != wanted:
                called = ", ".join(f"{op} over {axis} of {size}" for op, axis, size in calls) or "none"
                what = (
                    f"{len(wanted)} exchanges over context-parallel ranks are due after the last weight gradient, "
                    f"and {called} is called"
                )
                where = Where(words=f"{stage}{kind.name}, tp rank {tp_rank}")
                return StepDifference("value", where, what, axis="cp")
    return None
