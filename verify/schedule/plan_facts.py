"""`plan_facts`: what a plan says besides its schedule: layers of the stages, formats of messages,
collectives of every rank."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...core.base.errors import ScheduleError
from ...core.layout.stage_parameters import stage_parameters
from ...core.layout.stages import StageLayers
from ...core.model.blocks import layer_prefix
from ...core.model.parameters import TABLES
from ...core.plan.plan import Plan
from ...core.program import (
    Collective,
    num_copies,
    num_shards,
    operations,
    reduce_microbatch,
    sequences_are_cut,
)
from ...core.program.buckets import bucket_sizes, waits_for_parts
from ...core.schedule.action import Kind
from ...core.schedule.schedule import Schedule
from .calls import Call, Calls
from .facts import Facts, LayerHoldings, MessageFormats

_PER_STEP = frozenset({Kind.REDUCE_GRAD, Kind.UNSHARD, Kind.STEP})
_PER_MICROBATCH = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})


def plan_facts(plan: Plan, schedule: Schedule) -> Facts:
    """The facts that follow from a plan for a schedule of it.

    Of the collectives those of REDUCE_GRAD, UNSHARD and STEP: forwards and backwards communicate inside one pipeline
    rank only, whose ranks all run one row, so that their order agrees by construction. Raises `ScheduleError` when the
    schedule has other numbers of ranks or stages than the plan.
    """
    layout = plan.layout
    if (schedule.num_ranks, schedule.num_stages) != (layout.pp, layout.num_stages):
        raise ScheduleError(
            f"schedule {schedule.name} has {schedule.num_ranks} ranks and {schedule.num_stages} stages, but the plan "
            f"has pp={layout.pp} "
            f"and {layout.num_stages} stages. Check it with its own plan, or without one."
        )
    calls = plan_calls(plan, schedule, per_microbatch=False)
    return Facts(messages=message_formats(plan), layers=layer_holdings(plan), collectives=calls)


def message_formats(plan: Plan) -> MessageFormats:
    """Hidden states of one microbatch on rank 0 of tensor and context parallelism: its own tokens with
    sequence parallelism."""
    lo, hi = plan.tokens_of(0)
    dtype = "bf16" if plan.precision.dtype == "fp8" else plan.precision.dtype
    text = f"{dtype}[{plan.batch.micro_size},{hi - lo},{plan.model.hidden_size}]"
    return MessageFormats((text,) * plan.layout.num_stages, (text,) * plan.layout.num_stages)


def layer_holdings(plan: Plan) -> LayerHoldings:
    """Layers by name, for the model and for each stage."""
    model = StageLayers(0, 0, plan.model.num_layers, embedding=True, head=True)
    return LayerHoldings(_names(model), tuple(_names(stage) for stage in plan.stages))


def plan_calls(plan: Plan, schedule: Schedule, *, per_microbatch: bool = True) -> Calls:
    """The collectives of every rank of a plan that runs `schedule`, in list order; with `per_microbatch` those
    of F, B, I and W too."""
    layout, kinds = plan.layout, _PER_STEP | (_PER_MICROBATCH if per_microbatch else frozenset())
    lists = [tuple(_calls_of(plan, schedule, pp_rank, kinds)) for pp_rank in range(schedule.num_ranks)]
    list_of = np.empty(layout.world_size, dtype=np.int64)
    for pp_rank, ranks in enumerate(np.array(layout.groups("tp-cp-ep-dp"))):
        list_of[ranks] = pp_rank
    axes = tuple(gradient_axes(plan, stage) for stage in range(schedule.num_stages))
    shards = num_shards(plan, 0)
    return Calls(layout, schedule.placement, tuple(lists), tuple(list_of.tolist()), axes, (shards.dense, shards.expert))


def gradient_axes(plan: Plan, stage: int) -> frozenset[str]:
    """The axes along which ranks hold different parts of a stage's gradients.

    Tokens are spread over `dp` (context parallelism included), and over the copies of a stage that two pipeline ranks
    hold (`replica`, which covers dp); those of experts over `edp`. Hybrid sharding adds first inside its groups, then
    over them. With sequence parallelism every tensor-parallel rank knows the gradients of whole norms, biases, routers
    and low-rank projections for its own tokens only; those of the norms of query and key heads, without it too, for its
    own heads. A stage without layers has no gradients, hence no axes; what is reduced after every microbatch is
    complete before REDUCE_GRAD. So are, in exact numerics, the sums over the sequences that context parallelism cuts:
    ranks that differ only in their part of a sequence have finished other elements.
    """
    layout, held = plan.layout, stage_parameters(plan.model, plan.stages[stage])
    replicated = len(plan.placement.ranks[stage]) > 1
    axes: set[str] = set()
    for expert, copies in enumerate(num_copies(plan, stage)):
        if any(parameter.expert == bool(expert) for parameter in held):
            axis = (("dp", "replica"), ("edp", "expert_replica"))[expert][replicated]
            shards = num_shards(plan, stage)[expert] if layout.zero else copies
            finished = layout.cp if sequences_are_cut(plan) and not expert else 1
            axes |= _split(axis, copies=copies, shards=shards, finished=finished)
    waiting = any(waits_for_parts(plan, size.layer) for size in bucket_sizes(plan, stage, 0))
    axes -= {each.axis for each in reduce_microbatch(plan, stage) if not (waiting and each.axis.startswith("dp"))}
    if layout.tp > 1 and (layout.sequence_parallel or plan.model.qk_norm):
        whole = (parameter for parameter in held if parameter.cut is None and not parameter.expert)
        by_tokens = (parameter for parameter in whole if parameter.name not in TABLES)
        axis = "tp_cp" if sequences_are_cut(plan) else "tp"
        axes |= (
            {axis}
            if any(layout.sequence_parallel or ".attention." in parameter.name for parameter in by_tokens)
            else set()
        )
    return frozenset(axes)


def _split(axis: str, *, copies: int, shards: int, finished: int) -> set[str]:
    """The axis over so many copies, or the two that hybrid sharding makes of it; `finished` neighbours hold
    parts of no common sum"""
    if shards == copies:
        return {axis} if copies > finished else set()
    return {f"{axis}_replicate"} | ({f"{axis}_shard"} if shards > finished else set())


def _calls_of(plan: Plan, schedule: Schedule, pp_rank: int, kinds: frozenset[Kind]) -> Iterable[Call]:
    row = schedule.row(pp_rank)
    chosen = np.isin(row.kind, [int(kind) for kind in kinds | ({Kind.OVERLAP_F_B} if Kind.F in kinds else set())])
    known: dict[tuple[Kind, int], list[Collective]] = {}
    for action in row.take(np.flatnonzero(chosen)):
        for part in action.parts:
            key = part.kind, part.stage
            if pp_rank not in plan.placement.ranks[part.stage]:
                continue  # an action on the wrong rank, which `wrong-rank` reports
            if key not in known:
                replica = plan.placement.replica_of(part.stage, pp_rank)
                found = operations(plan, part.kind, part.stage, replica=replica)
                known[key] = [operation for operation in found if isinstance(operation, Collective)]
            for operation in known[key]:
                yield Call(part, operation.op, operation.axis, operation.layer)


def _names(content: StageLayers) -> tuple[str, ...]:
    inner = (layer_prefix(layer) for layer in content.layers)
    return (*(("embedding",) if content.embedding else ()), *inner, *(("head",) if content.head else ()))
