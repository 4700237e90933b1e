"""What REDUCE_GRAD, UNSHARD and STEP send: gradients, gathered parameters, norms and losses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..base.reduction import cut, maximal_nodes
from ..layout.stage_parameters import stage_parameters
from ..model.blocks import num_losses
from ..model.parameters import Parameter, token_table
from .buckets import (
    ROUTERS,
    BucketSize,
    are_bucketed,
    bucket_sizes,
    gathered_sizes,
    owned_interval,
    sums_are_sharded,
    waits_for_parts,
)
from .context import reduce_owned, reduce_parts, replicated_part
from .expert_tokens import ExpertNodes, expert_nodes, joined_nodes, num_token_blocks
from .holdings import (
    PART_LAYERS,
    KnownPart,
    held_gradients,
    known_part,
    local_elements,
    num_copies,
    num_routers,
    num_shards,
    partial_elements,
    rank_stages,
)
from .tensors import sequences_are_cut
from .work import (
    EXACT_SCALAR_BYTES,
    FAST_SCALAR_BYTES,
    PARTIAL_BYTES,
    Collective,
    Operation,
    scattered_bytes,
    weight_bytes,
)

if TYPE_CHECKING:
    from ..plan.plan import Plan


EXPERT_BIAS = "expert_bias"
"""What the counts of chosen experts in REDUCE_GRAD are for: the layer of their collectives."""
STEP_COUNT_BYTES = 8
"""How many tokens of a whole step chose an expert."""


def copies_axis(plan: Plan, stage: int) -> str:
    """The axis over which the copies of a stage add their gradients: `dp`, or `replica` (dp and
    pipeline replicas together)."""
    return "dp" if len(plan.placement.ranks[stage]) == 1 else "replica"


def own_token_parameters(plan: Plan, stage: int) -> tuple[Parameter, ...]:
    """The parameters of a stage whose gradients a tensor-parallel rank knows for its own tokens only, until
    REDUCE_GRAD adds them over tp.

    With sequence parallelism these are what no rank cuts and what is applied to own tokens: norms, biases after a
    row-parallel layer, and in fast numerics routers and the down-projections of latent attention. All other gradients
    come from products over all tokens, and the tables of the embedding from the tokens that its backward gathers. Norms
    of query and key heads are always among them: a rank knows their gradients for its own heads only (Megatron-Core
    sums these with the layer norms', `finalize_model_grads.py`).
    """
    split, exact = plan.layout.sequence_parallel, plan.numerics.mode == "exact"
    if plan.layout.tp == 1 or not (split or plan.model.qk_norm):
        return ()
    held = stage_parameters(plan.model, plan.stages[stage])
    return tuple(each for each in held if known_part(each, sequence_parallel=split, exact=exact) is not None)


def gradient_bytes(plan: Plan) -> int:
    """Bytes per element of a gradient as it is reduced: 4, or 2 with `precision.gradient_dtype = "bf16"`."""
    return 2 if plan.precision.gradient_dtype == "bf16" else PARTIAL_BYTES


def reduce_gradients(plan: Plan, stage: int, tp_rank: int, copy: int) -> Iterator[Operation]:
    """The gradients of a stage, flat: over tensor parallelism what each rank knows for its tokens only, then over all
    copies, those of experts over theirs.

    With ZeRO 1 and above each copy keeps a part of the sum, so the second half of the reduction falls away;
    with hybrid sharding the parts are then added over the groups that hold a copy each (Zhao et al. 2023,
    PyTorch FSDP, section 3.2.2).
    """
    layout = plan.layout
    if layout.tp > 1 and (partial := partial_elements(plan, stage)):
        yield from _over_parts(plan, partial, tp_rank, copy % layout.cp, plan.copy_samples(stage, copy))
    if plan.numerics.mode == "exact":
        yield from _exactly_reduced(plan, stage, tp_rank, copy)
        return
    if not are_bucketed(plan):
        for axis, elements, size, _ in _copied(plan, stage, held_gradients(plan, stage, tp_rank)):
            payload = elements * gradient_bytes(plan)
            yield Collective("", "all_reduce", axis, size, -(-2 * (size - 1) * payload // size))
        return
    each_microbatch = sums_are_sharded(plan)
    for layer, axis, elements, size, parts in _bucketed(plan, stage, bucket_sizes(plan, stage, tp_rank)):
        if not layout.zero:
            payload = elements * gradient_bytes(plan)
            yield Collective(layer, "all_reduce", axis, size, -(-2 * (size - 1) * payload // size))
            continue
        payload = -(-elements // parts) * parts * gradient_bytes(plan)  # parts of one length
        if parts > 1 and not (each_microbatch and not waits_for_parts(plan, layer)):
            yield Collective(
                layer,
                "reduce_scatter",
                axis if parts == size else f"{axis}_shard",
                parts,
                scattered_bytes(payload, parts),
            )
        if parts < size:
            others = size // parts
            yield Collective(
                layer, "all_reduce", f"{axis}_replicate", others, -(-2 * (others - 1) * (payload // parts) // others)
            )


def reduce_microbatch(plan: Plan, stage: int, tp_rank: int = 0) -> Iterator[Collective]:
    """What follows the weight gradients of a microbatch where sums are sharded: every rank keeps
    its part of each bucket."""
    if not sums_are_sharded(plan):
        return
    for layer, axis, elements, size, parts in _bucketed(plan, stage, bucket_sizes(plan, stage, tp_rank)):
        if parts > 1 and not waits_for_parts(plan, layer):
            payload = -(-elements // parts) * parts * gradient_bytes(plan)
            yield Collective(
                layer,
                "reduce_scatter",
                axis if parts == size else f"{axis}_shard",
                parts,
                scattered_bytes(payload, parts),
            )


def step_counts(plan: Plan, stage: int) -> Iterator[Operation]:
    """REDUCE_GRAD where experts have a bias: how many of a step's tokens chose each, over all ranks that
    saw different tokens."""
    model, layout = plan.model, plan.layout
    if not model.expert_bias:
        return
    num_bytes = num_routers(plan, stage) * model.num_experts * STEP_COUNT_BYTES
    over_tp = layout.tp if layout.sequence_parallel else 1
    for axis, size in (("tp", over_tp), (copies_axis(plan, stage), plan.num_copies(stage))):
        if size > 1 and num_bytes:
            yield Collective(EXPERT_BIAS, "all_gather", axis, size, num_bytes * (size - 1))


def gather_parameters(plan: Plan, stage: int, tp_rank: int) -> Iterator[Operation]:
    """Brings the whole stage's weights to every copy, from parts of one length."""
    for layer, axis, elements, size, parts in _bucketed(plan, stage, gathered_sizes(plan, stage, tp_rank)):
        if parts > 1:
            part = -(-elements // parts) * weight_bytes("fp32" if layer == ROUTERS else plan.precision.dtype)
            yield Collective(layer, "all_gather", axis if parts == size else f"{axis}_shard", parts, part * (parts - 1))


def tied_ends(plan: Plan, pp_rank: int) -> tuple[int, ...]:
    """The pipeline ranks of first and last stage that add up a table both use together with this rank; ()
    where nothing is to be sent.

    The output head is not the token table and nothing else on the last stage reads it, the rank holds neither stage, or
    it holds both and, where ZeRO cuts their sums, in one replica.
    """
    if not plan.model.shares_table:
        return ()
    return plan.placement.ends_of(pp_rank) or (plan.placement.crossed_ends_of(pp_rank) if plan.layout.zero else ())


def step(plan: Plan, pp_rank: int, tp_rank: int, copy: int = 0) -> Iterator[Operation]:
    """The two sums of a table that first and last stage share, the gradient norm, the loss, what routers add to it, and
    with ZeRO 1 or 2 the updated weights. `copy` counts the copies of the pipeline rank's stages."""
    layout = plan.layout
    copies, model_ranks = layout.dp * layout.cp, layout.tp * layout.pp
    if tied_ends(plan, pp_rank):
        table = exchanged_of_table(plan, pp_rank, tp_rank, copy)
        yield Collective("embedding.tokens", "all_gather", "embedding", 2, table * PARTIAL_BYTES)
    if layout.zero:  # each copy then holds the squares of its part only
        yield from _scalar(plan, "grad_norm", "dp", copies)
    elif plan.model.is_moe:  # and each rank those of its experts
        yield from _scalar(plan, "grad_norm", "ep", layout.ep)
        yield from _scalar(plan, "grad_norm", "etp", layout.expert_tp)
    yield from _scalar(plan, "grad_norm", "model", model_ranks)
    yield from _scalar(plan, "loss", "dp", copies)
    yield from _scalar(plan, "loss", "model", model_ranks)
    if plan.train.adds_router_losses:
        yield from _scalar(plan, "aux_loss", "dp", copies)
        yield from _scalar(plan, "aux_loss", "model", model_ranks)
    if num_losses(plan.model) > 1:
        yield from _scalar(plan, "mtp_loss", "dp", copies)
        yield from _scalar(plan, "mtp_loss", "model", model_ranks)
    if layout.zero in (1, 2):
        for own_stage in rank_stages(plan, pp_rank):
            yield from gather_parameters(plan, own_stage, tp_rank)


def exchanged_of_table(plan: Plan, pp_rank: int, tp_rank: int, copy: int) -> int:
    """Elements of a table's sum that a rank sends to the other end of the model; 0 where it shares none."""
    if not tied_ends(plan, pp_rank):
        return 0
    table = local_elements(plan, token_table(plan.model), tp_rank)
    if not plan.layout.zero:
        return table
    # of each end that it holds a rank has a part of the sum
    return sum(
        _owned_of_table(plan, table, stage, pp_rank, copy)
        for stage in {0, len(plan.stages) - 1} & {*rank_stages(plan, pp_rank)}
    )


def _owned_of_table(plan: Plan, elements: int, stage: int, pp_rank: int, copy: int) -> int:
    """How many elements of a table's sum a rank keeps of a stage; `copy` counts the copies of
    its data-parallel group."""
    dp_rank, cp_rank = divmod(copy, plan.layout.cp)
    own, parts = plan.copy_of(stage, dp_rank=dp_rank, pp_rank=pp_rank, cp_rank=cp_rank), num_shards(plan, stage).dense
    lo, hi = owned_interval(elements, parts, plan.layout.cp if sequences_are_cut(plan) else 1, own % parts)
    return hi - lo


def _copied(plan: Plan, stage: int, held: tuple[int, int]) -> Iterator[tuple[str, int, int, int]]:
    """(axis, elements, copies, ZeRO parts) of what a stage holds in several copies: dense parameters, then experts."""
    replicated = len(plan.placement.ranks[stage]) > 1
    axes = ("replica", "expert_replica") if replicated else ("dp", "edp")
    for axis, elements, size, parts in zip(axes, held, num_copies(plan, stage), num_shards(plan, stage), strict=True):
        if size > 1 and elements:
            yield axis, elements, size, parts


def _bucketed(plan: Plan, stage: int, sizes: Sequence[BucketSize]) -> Iterator[tuple[str, str, int, int, int]]:
    """(layer, axis, elements, copies, ZeRO parts) of the buckets that a stage holds in several copies."""
    replicated = len(plan.placement.ranks[stage]) > 1
    axes = ("replica", "expert_replica") if replicated else ("dp", "edp")
    copies, shards = num_copies(plan, stage), num_shards(plan, stage)
    for layer, elements, is_expert in sizes:
        if copies[is_expert] > 1:
            yield layer, axes[is_expert], elements, copies[is_expert], shards[is_expert]


def _over_parts(
    plan: Plan, partial: Mapping[KnownPart, int], tp_rank: int, cp_rank: int, samples: tuple[int, int]
) -> Iterator[Operation]:
    """The sum over tensor-parallel ranks of what each knows for its own tokens, or its own heads.

    Exact numerics nest this tree in the batch's: a rank keeps the nodes of its tokens (or heads) for every sample, and
    here each rank finishes the samples, and the batch's tree over them, for an even part of the elements.
    """
    tp, cp = plan.layout.tp, plan.layout.cp
    if plan.numerics.mode == "fast":
        yield Collective("", "all_reduce", "tp", tp, -(-2 * (tp - 1) * sum(partial.values()) * PARTIAL_BYTES // tp))
        return
    for known, elements in partial.items():
        lo, hi = cut(elements, tp * cp, cp_rank * tp + tp_rank)
        nodes = plan.leaf_sizes.nodes_of(known, plan.batch.sequence, tp, tp_rank, cp=cp, cp_rank=cp_rank)
        num_rows, axis = (samples[1] - samples[0]) * len(nodes), "tp" if cp == 1 else "tp_cp"
        yield Collective(
            PART_LAYERS[known], "all_to_all", axis, tp * cp, num_rows * (elements - (hi - lo)) * PARTIAL_BYTES
        )
        num_nodes = len(maximal_nodes(plan.batch.global_size, *samples))
        yield Collective(
            PART_LAYERS[known], "all_gather", axis, tp * cp, num_nodes * (hi - lo) * PARTIAL_BYTES * (tp * cp - 1)
        )


def _exactly_reduced(plan: Plan, stage: int, tp_rank: int, copy: int) -> Iterator[Operation]:
    """Partial sums of all copies, each of which finishes an equal part of the tree; dense parameters, then experts."""
    size, axis, held = plan.num_copies(stage), copies_axis(plan, stage), held_gradients(plan, stage, tp_rank)
    num_nodes = len(maximal_nodes(plan.batch.global_size, *plan.copy_samples(stage, copy)))
    parts = num_shards(plan, stage)
    first = copy - copy % parts.dense
    samples = plan.copy_samples(stage, first)[0], plan.copy_samples(stage, first + parts.dense - 1)[1]
    nodes = num_nodes, len(maximal_nodes(plan.batch.global_size, *samples))
    if sequences_are_cut(plan):
        yield from (reduce_owned if plan.layout.zero else reduce_parts)(plan, stage, tp_rank, copy, axis)
    elif are_bucketed(plan):
        for each in bucket_sizes(plan, stage, tp_rank):
            if not each.is_expert:
                yield from _tree_over(plan, axis, (size, parts.dense), copy, each.elements, nodes, each.layer)
    else:
        yield from _tree_over(plan, axis, (size, size), copy, held.dense, nodes)
    if not held.expert:
        return
    num_replicas = len(plan.placement.ranks[stage])
    dp_rank, replica = divmod(copy // plan.layout.cp, num_replicas)
    pp_rank = plan.placement.ranks[stage][replica]
    here = plan.layout.global_rank(tp=tp_rank, cp=copy % plan.layout.cp, dp=dp_rank, pp=pp_rank)
    own = plan.layout.expert_coordinates(here)["dp"] * num_replicas + replica
    axis, size = "edp" if num_replicas == 1 else "expert_replica", plan.layout.expert_dp * num_replicas
    num_nodes = len(expert_nodes(plan, stage, here))
    joint = len(_nodes_of_shard(plan, stage, here, own, parts.expert)) if parts.expert < size else num_nodes
    yield from _tree_over(plan, axis, (size, parts.expert), own, held.expert, (num_nodes, joint))


def _nodes_of_shard(plan: Plan, stage: int, global_rank: int, member: int, parts: int) -> ExpertNodes:
    """What the copies of the experts have together of which each keeps a part (hybrid sharding); `member` is the
    rank's place among all."""
    owners, here = plan.placement.ranks[stage], plan.layout.coordinates(global_rank)
    by_pp: dict[int, list[int]] = {owner: [] for owner in owners}
    for rank in plan.layout.expert_group_of(global_rank, "dp-pp" if len(owners) > 1 else "dp"):
        by_pp.setdefault(plan.layout.coordinates(rank)["pp"], []).append(rank)
    columns = [by_pp[owner] for owner in owners] if len(owners) > 1 else [by_pp[here["pp"]]]
    everyone = [rank for copy in zip(*columns, strict=True) for rank in copy]
    first = member - member % parts
    nodes = [expert_nodes(plan, stage, rank) for rank in everyone[first : first + parts]]
    return joined_nodes(plan.batch.global_size, num_token_blocks(plan), nodes)


def _tree_over(
    plan: Plan,
    axis: str,
    sizes: tuple[int, int],
    member: int,
    elements: int,
    num_nodes: tuple[int, int],
    layer: str = "",
) -> Iterator[Operation]:
    """The tree over (all copies, those that keep a part each), for what has so many nodes on (one of them,
    the latter together)."""
    size, parts = sizes
    if size == 1 or not elements:  # a stage without layers has none
        return
    lo, hi = cut(elements, parts, member % parts)
    if parts > 1:
        shard_axis = axis if parts == size else f"{axis}_shard"
        yield Collective(layer, "all_to_all", shard_axis, parts, num_nodes[0] * (elements - (hi - lo)) * PARTIAL_BYTES)
    if not plan.layout.zero:
        yield Collective(layer, "all_gather", axis, size, (hi - lo) * PARTIAL_BYTES * (size - 1))
    elif parts < size:
        yield from replicated_part(axis, size // parts, member // parts, hi - lo, num_nodes[1], layer)


def _scalar(plan: Plan, layer: str, axis: str, size: int) -> Iterator[Operation]:
    if size == 1:
        return
    if plan.numerics.mode == "exact":
        yield Collective(layer, "all_gather", axis, size, EXACT_SCALAR_BYTES * (size - 1))
    else:
        yield Collective(layer, "all_reduce", axis, size, -(-2 * (size - 1) * FAST_SCALAR_BYTES // size))
