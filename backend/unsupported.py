"""`unsupported`: what this backend does not run of a plan that can be simulated, in words."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ..core.plan.batch_sizes import sizes_of
from ..core.plan.plan import AnyPlan, ModularPlan, Plan
from ..core.plan.schedule_choice import named_schedule
from ..core.plan.schedule_of import schedule_for
from ..core.plan.sections import ScheduleChoice
from ..core.program.buckets import sums_are_sharded
from ..core.schedule import lower
from ..core.schedule.action import Kind
from .data.vocabulary import of_part, unknown_ids

RUN_DTYPES = ("fp32", "bf16", "fp16")
"""Formats of hidden states that layers compute with (`backend.tensor_parallel.context.DTYPES`, which needs torch)."""


def unsupported(plan: AnyPlan) -> list[str]:
    """What the backend does not run of a plan that can be simulated, one sentence each. Empty
    when it runs all of it."""
    problems = [of_part(part, problem) for part in plan.parts for problem in _unsupported(part)]
    return list(dict.fromkeys([*problems, *(_unsupported_joins(plan) if isinstance(plan, ModularPlan) else ())]))


def _unsupported(plan: Plan) -> list[str]:
    problems = [
        f"the backend does not run {what} yet. Use {instead}."
        for wrong, what, instead in (
            (
                plan.precision.dtype not in RUN_DTYPES,
                f"precision.dtype={plan.precision.dtype!r}",
                'precision.dtype="bf16", "fp16" or "fp32"',
            ),
            *_unsupported_batches(plan),
            *_unsupported_sharding(plan),
            *_unsupported_torch(plan),
            *_unsupported_overlap(plan),
            *_unsupported_trimming(plan),
            *unsupported_graphs(plan),
        )
        if wrong
    ]
    if plan.train.sample_every is not None and plan.runtime.cuda_graphs:
        problems.append(
            f"train.sample_every={plan.train.sample_every} reads logits, which captured steps do not show. Leave it "
            "out, or use runtime.cuda_graphs=false."
        )
    sizes = [plan.of_size(size) for size in sizes_of(plan.batch)]
    problems += [problem for each in sizes for problem in _unsupported_pairs(each)]
    problems += unknown_ids(plan)
    return problems + [problem for each in sizes for problem in _unsupported_schedule(each)]


def _unsupported_joins(plan: ModularPlan) -> Iterator[str]:
    """What no run of several modules does."""
    if plan.train.load is not None:
        yield f"train.load={plan.train.load!r} is the folder of one model, and this plan has [[modules]]. Leave it out."
    if any(module.layout.zero == 3 for module in plan.modules):
        yield "the backend does not run layout.zero=3 with [[modules]] yet. Use layout.zero=2."
    if plan.runtime.cuda_graphs:
        yield "the backend does not run runtime.cuda_graphs=true with [[modules]] yet. Use false."
    if plan.data_parallel.library != "shardproof":
        yield f'data_parallel.library={plan.data_parallel.library!r} is not tried with [[modules]]. Use "shardproof".'
    if plan.runtime.trim_padding:
        yield (
            "the backend does not run runtime.trim_padding=true with [[modules]] yet, whose bridges carry whole "
            "sequences. Use false."
        )


def _unsupported_batches(plan: Plan) -> Iterator[tuple[bool, str, str]]:
    """`(wrong, what, instead)` of batches that change."""
    if plan.batch.stays:
        return
    key = "batch.schedule" if plan.batch.rampup is None else "batch.rampup"
    sharded = {sums_are_sharded(plan.of_size(size)) for size in sizes_of(plan.batch)}
    yield (
        len(sharded) > 1,
        f"layout.zero={plan.layout.zero} in fast numerics with {key}, of which some batches are equally many "
        "microbatches on all data-parallel ranks and others are not",
        "multiples of batch.micro * layout.dp",
    )


def _unsupported_sharding(plan: Plan) -> Iterator[tuple[bool, str, str]]:
    """`(wrong, what, instead)` of what ZeRO does not cut."""
    layout, shard = plan.layout, plan.data_parallel.shard
    apart = shard is not None and plan.numerics.mode == "exact" and shard % layout.cp != 0
    yield (
        apart,
        f"data_parallel.shard={shard} with cp={layout.cp} in exact numerics",
        (f"shard={layout.cp}, or another multiple of it"),
    )
    parts = layout.zero == 3 and plan.schedule.max_active_stages is None and plan.schedule.file is None
    instead = 'schedule.max_active_stages=3, say, which gathers whole stages, or data_parallel.library="torch"'
    yield parts and plan.data_parallel.library == "shardproof", "layout.zero=3 layer by layer", instead


def _unsupported_torch(plan: Plan) -> Iterator[tuple[bool, str, str]]:
    """`(wrong, what, instead)` of what torch's fully_shard does not do around our layers."""
    if plan.data_parallel.library == "torch":
        what, own = 'data_parallel.library="torch" with', 'data_parallel.library="shardproof"'
        yield plan.layout.pp > 1, f"{what} layout.pp={plan.layout.pp}", f"layout.pp=1 or {own}"
        gathers = plan.schedule.max_active_stages is not None
        yield (
            gathers,
            f"{what} schedule.max_active_stages={plan.schedule.max_active_stages}",
            ("none, for it gathers layer by layer"),
        )
        uneven, per_round = len(plan.microbatch_counts) > 1, plan.batch.micro_size * plan.layout.dp
        # copies gather together, once in a microbatch
        fitting = f"batch.global={min(plan.microbatch_counts) * per_round} or {own}"
        yield uneven, f"{what} batch.global={plan.batch.global_size} over dp={plan.layout.dp} ranks", fitting
        yield plan.model.is_moe, f"{what} experts, which have copies of their own", own
        turns = bool(plan.runtime.ep_comm_overlap)  # its hooks gather and reduce in the order of one thread
        yield turns, f"{what} runtime.ep_comm_overlap=true", f"ep_comm_overlap=false or {own}"
        # it takes gradients in the format of the gathered weights, and ours are sums in fp32
        dtype = plan.precision.dtype
        yield dtype != "fp32", f'{what} precision.dtype="{dtype}"', f'precision.dtype="fp32" or {own}'


def _unsupported_overlap(plan: Plan) -> Iterator[tuple[bool, str, str]]:
    """`(wrong, what, instead)` of what overlaps with products, messages between stages alone, and of fused launches."""
    exact = bool(plan.runtime.compile) and plan.numerics.mode == "exact"
    yield exact, 'runtime.compile=true with numerics.mode="exact"', 'runtime.compile=false or numerics.mode="fast"'
    for name in ("launch_blocking", "fused_loss", "dropout"):
        value = getattr(plan.runtime, name)
        written = "true" if value is True else value
        yield bool(value), f"runtime.{name}={written}", f"runtime.{name}=false"
    overlap = "data_parallel.overlap_grad_reduce=true without data_parallel.bucket_bytes"
    at_once = plan.data_parallel.bucket_bytes is None and not sums_are_sharded(plan)
    yield bool(plan.data_parallel.overlap_grad_reduce) and at_once, overlap, "bucket_bytes=25000000, say"
    if (bucket_bytes := plan.data_parallel.bucket_bytes) is not None:
        by_parts = plan.layout.cp > 1 and plan.numerics.mode == "exact"
        yield by_parts, f"data_parallel.bucket_bytes={bucket_bytes} with cp={plan.layout.cp} in exact numerics", "none"


def _unsupported_trimming(plan: Plan) -> Iterator[tuple[bool, str, str]]:
    """`(wrong, what, instead)` of what is counted or drawn over whole sequences, or cuts them."""
    model, layout, trimmed = plan.model, plan.layout, plan.runtime.trim_padding
    for wrong, what in (
        (layout.cp > 1, f"cp={layout.cp}"),
        (layout.sequence_parallel, "sequence_parallel=true"),
        (model.is_moe, "experts"),
        (model.qk_norm and layout.tp > 1, f"norms of heads and tp={layout.tp}"),
        (model.num_mtp_layers > 0, "multi-token prediction"),
        (model.hidden_dropout > 0 or model.attention_dropout > 0, "dropout"),
    ):
        yield trimmed and wrong, f"runtime.trim_padding=true with {what}", "trim_padding=false"


def unsupported_graphs(plan: Plan) -> Iterator[tuple[bool, str, str]]:
    """`(wrong, what, instead)` of what the host takes part in, which captured work cannot ask."""
    by_layer, none = plan.runtime.cuda_graph_scope == "layer", "cuda_graphs=false"
    for wrong, what, instead in (_not_by_layer if by_layer else _not_by_step)(plan):
        scope = 'cuda_graph_scope="layer"' if by_layer else "cuda_graphs=true"
        yield bool(plan.runtime.cuda_graphs) and wrong, f"runtime.{scope} with {what}", instead or none
    library = 'data_parallel.library="torch"'
    yield (
        bool(plan.runtime.cuda_graphs) and plan.data_parallel.library == "torch",
        f"runtime.cuda_graphs=true with {library}",
        none,
    )
    yield (
        by_layer and not plan.runtime.cuda_graphs,
        'runtime.cuda_graph_scope="layer" without graphs',
        "cuda_graphs=true",
    )


def _not_by_step(plan: Plan) -> Iterator[tuple[bool, str, str]]:
    layers = 'cuda_graph_scope="layer" or cuda_graphs=false'
    gathers_late = "data_parallel.overlap_param_gather=true, which begins in STEP"
    yield plan.model.is_moe, "experts, whose tokens the host counts", layers
    yield plan.model.num_mtp_layers > 0, "multi-token prediction", layers
    yield bool(plan.data_parallel.overlap_param_gather), gathers_late, layers
    yield plan.layout.zero == 3, "layout.zero=3", layers


def _not_by_layer(plan: Plan) -> Iterator[tuple[bool, str, str]]:
    step = 'cuda_graph_scope="step" or cuda_graphs=false'
    trims, offloads = plan.runtime.trim_padding, plan.offload.activations > 0
    yield trims, "runtime.trim_padding=true, whose layers have other shapes in every step", step
    yield (
        offloads,
        f"offload.activations={plan.offload.activations}, which is copied layer by layer",
        "offload.activations=0",
    )
    yield (
        bool(plan.runtime.ep_comm_overlap),
        "runtime.ep_comm_overlap=true, whose layers run in turns",
        "ep_comm_overlap=false",
    )


def _unsupported_pairs(plan: Plan) -> list[str]:
    """What `runtime.ep_comm_overlap` lets run in turns are the pairs of a schedule."""
    if not plan.runtime.ep_comm_overlap or (schedule_for(plan).actions.kind == Kind.OVERLAP_F_B).any():
        return []
    schedule = plan.schedule.file or plan.schedule.name
    return [
        "runtime.ep_comm_overlap=true lets the forward and the backward of a schedule's pairs run in turns, and "
        f"{schedule} with "
        f"{plan.num_microbatches} microbatches has no pairs. Use Combined1F1B, DualPipe or DualPipeV, or more "
        "microbatches."
    ]


def _unsupported_schedule(plan: Plan) -> list[str]:
    if plan.schedule.file is None:
        return _unsupported_counts(plan)
    schedule = lower(schedule_for(plan))
    problems = []
    first, last = schedule.placement.ranks[0], schedule.placement.ranks[-1]
    if plan.model.shares_table and set(first) != set(last) and not schedule.placement.ends_of(first[0]):
        problems.append(
            "the backend adds up a tied table between ranks that hold one end each, or on ranks that hold both, but "
            "in "
            f"{plan.schedule.file} the first stage lies on ranks {first} and the last on {last}. Place the ends "
            "in the same way, or use "
            "model.tied_embeddings=false."
        )
    return problems


@functools.lru_cache(maxsize=4096)
def _common_order(choice: ScheduleChoice, pp: int, vpp: int, num_microbatches: int) -> tuple[tuple[str, ...], ...]:
    """What every pipeline rank does together with other data-parallel ranks, in order: reduces
    gradients and gathers weights."""
    schedule = lower(named_schedule(choice, pp=pp, vpp=vpp, num_microbatches=num_microbatches))
    rows = (schedule.row(pp_rank) for pp_rank in range(schedule.num_ranks))
    return tuple(
        tuple(str(action) for action in row if action.kind in (Kind.REDUCE_GRAD, Kind.UNSHARD)) for row in rows
    )


def _unsupported_counts(plan: Plan) -> list[str]:
    """Data-parallel ranks with one microbatch less than others must reduce gradients, and gather
    weights, in the same order."""
    if len(plan.microbatch_counts) == 1:
        return []
    orders = {_common_order(plan.schedule, plan.layout.pp, plan.layout.vpp, count) for count in plan.microbatch_counts}
    if len(orders) == 1:
        return []
    (most, least), per_round = plan.microbatch_counts, plan.batch.micro_size * plan.layout.dp
    return [
        f"schedule {plan.schedule.name} reduces gradients and gathers weights of a rank's stages in one order with "
        f"{most} microbatches "
        f"and in another with {least}, and global={plan.batch.global_size} gives some of the dp={plan.layout.dp} "
        f"ranks {most} and others "
        f"{least}. "
        f"Use global = {least * per_round} or {most * per_round}."
    ]
