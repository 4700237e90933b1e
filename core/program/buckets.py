"""The buckets in which the gradients of a stage are reduced, and which elements of each a copy keeps with ZeRO.

The elements of a bucket lie one parameter after the other, the last one first, as backward finishes them, each in
storage orientation. Every copy of the stage keeps one interval of each bucket (`cut`). The sums of a tied table are
buckets of their own, so that both ends of the model cut it in the same way and add their parts. Where context-parallel
ranks finish sequences after every microbatch, what waits for tensor-parallel ranks until REDUCE_GRAD is a bucket of its
own too, and the others lie by kind (`context.open_gradients`); so it is where buckets are reduced before REDUCE_GRAD.
With `data_parallel.bucket_bytes` the dense parameters make several buckets, none of which cuts a parameter. Routers,
which compute in fp32, are a bucket of their own where the other weights come together in another format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..base.reduction import cut
from ..layout.stage_parameters import Usage, stage_usages
from ..model.parameters import TOKEN_TABLE, token_table
from .holdings import held_gradients, known_part, local_elements, num_routers, partial_elements
from .open_kinds import open_kind
from .tensors import sequences_are_cut
from .work import PARTIAL_BYTES

if TYPE_CHECKING:
    from ..plan.plan import Plan

DENSE, ROUTERS, WAITING, EXPERTS = "", "routers", "waiting", "experts"
NUMBERED = "bucket."
"""What the names of several buckets of dense parameters begin with."""


class Bucket(NamedTuple):
    """Gradient sums that are cut together. `name` is "" for dense parameters (`bucket.0` and so on where they make
    several), `routers`, `waiting`, `experts`, or the key of a tied table's sum."""

    name: str
    usages: tuple[Usage, ...]

    @property
    def layer(self) -> str:
        """What the bucket's collectives are called: those of experts differ by their axis."""
        return "" if self.name == EXPERTS else self.name

    @property
    def is_expert(self) -> bool:
        """Whether the copies of these parameters are those of experts."""
        return self.name == EXPERTS


class BucketSize(NamedTuple):
    """A bucket by its number of elements on one rank."""

    layer: str
    elements: int
    is_expert: bool = False


def gradient_buckets(plan: Plan, stage: int) -> tuple[Bucket, ...]:
    """All buckets of a stage, in the order in which they are reduced: dense ones, tied tables, routers, what waits,
    experts. Empty ones are left out."""
    groups: dict[str, list[Usage]] = {DENSE: []}
    for usage in reversed(stage_usages(plan.model, plan.stages[stage])):
        groups.setdefault(_bucket_of(plan, usage), []).append(usage)
    if sequences_are_cut(plan):
        groups[DENSE].sort(key=lambda usage: open_kind(plan, usage))
    last = [(name, groups.pop(name, [])) for name in (ROUTERS, WAITING, EXPERTS)]
    dense = filled_buckets(plan, groups.pop(DENSE))
    return tuple(Bucket(name, tuple(usages)) for name, usages in [*dense, *groups.items(), *last] if usages)


def are_bucketed(plan: Plan) -> bool:
    """Whether gradients are reduced in buckets, and not those of a stage all at once."""
    return plan.layout.zero > 0 or _bucket_bytes(plan) is not None


def bucket_layers(plan: Plan, stage: int) -> dict[str, str]:
    """What the collectives are called that reduce a gradient, by `Usage.key`."""
    if not are_bucketed(plan) or sequences_are_cut(plan):
        return {}
    return {usage.key: bucket.layer for bucket in gradient_buckets(plan, stage) for usage in bucket.usages}


def bucket_sizes(plan: Plan, stage: int, tp_rank: int) -> tuple[BucketSize, ...]:
    """The sizes of `gradient_buckets`, without looking at each parameter."""
    key = ("bucket_sizes", stage, tp_rank)
    if key not in plan.memo:
        plan.memo[key] = _bucket_sizes(plan, stage, tp_rank)
    found: tuple[BucketSize, ...] = plan.memo[key]
    return found


def _bucket_sizes(plan: Plan, stage: int, tp_rank: int) -> tuple[BucketSize, ...]:
    held, content = held_gradients(plan, stage, tp_rank), plan.stages[stage]
    tables: list[BucketSize] = []
    if plan.model.shares_table:
        table = local_elements(plan, token_table(plan.model), tp_rank)
        roles = (*(["output"] if content.head else []), *(["embedding"] if content.embedding else []))
        tables = [BucketSize(f"{TOKEN_TABLE}@{role}", table) for role in roles]
    routers = BucketSize(ROUTERS, router_elements(plan, stage))
    waiting = BucketSize(WAITING, sum(partial_elements(plan, stage).values()) if _waits(plan) else 0)
    # routers are known by tokens then
    if waiting.elements and plan.layout.sequence_parallel and plan.numerics.mode == "fast":
        waiting = waiting._replace(elements=waiting.elements - routers.elements)
    dense = [BucketSize(DENSE, held.dense - sum(each.elements for each in (*tables, routers, waiting)))]
    if _bucket_bytes(plan) is not None:
        filled = [
            each for each in gradient_buckets(plan, stage) if each.name == DENSE or each.name.startswith(NUMBERED)
        ]
        dense = [
            BucketSize(name, sum(local_elements(plan, each.parameter, tp_rank) for each in usages))
            for name, usages in filled
        ]
    return tuple(
        each
        for each in (*dense, *tables, routers, waiting, BucketSize("", held.expert, is_expert=True))
        if each.elements
    )


def router_elements(plan: Plan, stage: int) -> int:
    """Elements of a stage's routers where they are a bucket of their own: with ZeRO weights of one format come together
    at a time, and those of routers stay fp32 in every precision."""
    if not plan.layout.zero or plan.precision.dtype == "fp32":
        return 0
    return num_routers(plan, stage) * plan.model.num_experts * plan.model.hidden_size


def sums_are_sharded(plan: Plan) -> bool:
    """Whether gradients are reduced after the backward of every microbatch, so that a rank holds a part of their
    sums only (ZeRO 2 and 3).

    Exact numerics put every sample in its place of the batch's tree, of which a part of the elements would have to hold
    as many nodes from each copy as all elements have on one: there, and where copies of a stage do not run the same
    microbatches one after the other, sums are whole until REDUCE_GRAD.
    """
    in_step = len(plan.microbatch_counts) == 1 and all(len(ranks) == 1 for ranks in plan.placement.ranks)
    return plan.layout.zero >= 2 and plan.numerics.mode == "fast" and in_step


def waits_for_parts(plan: Plan, layer: str) -> bool:
    """Whether what a bucket holds has to be added over tensor-parallel ranks at REDUCE_GRAD, before copies add it."""
    by_tokens = plan.layout.tp > 1 and plan.layout.sequence_parallel and plan.numerics.mode == "fast"
    return layer == WAITING or (layer == ROUTERS and by_tokens)


def gathered_sizes(plan: Plan, stage: int, tp_rank: int) -> tuple[BucketSize, ...]:
    """The buckets that weights come together in: those of gradients, but a table whose two sums one
    stage has comes once."""
    sizes = bucket_sizes(plan, stage, tp_rank)
    tables = [each for each in sizes if each.layer.startswith(TOKEN_TABLE)]
    return tuple(each for each in sizes if each not in tables[1:])


def owned_interval(elements: int, copies: int, cp: int, copy: int) -> tuple[int, int]:
    """The elements `[lo, hi)` of a bucket that a copy keeps: an even part; where context-parallel ranks finish
    sequences (`cp`) an even part of what its rank among them has finished.

    >>> [owned_interval(10, 4, 1, copy) for copy in range(4)], [owned_interval(10, 4, 2, copy) for copy in range(4)]
    ([(0, 3), (3, 6), (6, 8), (8, 10)], [(0, 3), (5, 8), (3, 5), (8, 10)])
    """
    index, part = divmod(copy, cp)
    first, last = cut(elements, cp, part)
    lo, hi = cut(last - first, copies // cp, index)
    return first + lo, first + hi


def _bucket_bytes(plan: Plan) -> int | None:
    return None if sequences_are_cut(plan) else plan.data_parallel.bucket_bytes


def filled_buckets(plan: Plan, usages: list[Usage]) -> list[tuple[str, list[Usage]]]:
    """Buckets that are closed as soon as they have `bucket_bytes`, by the sizes of the first
    tensor-parallel rank, the same on all."""
    limit = _bucket_bytes(plan)
    if limit is None:
        return [(DENSE, usages)]
    filled: list[list[Usage]] = [[]]
    num_bytes = 0
    for usage in usages:
        if num_bytes >= limit:
            filled.append([])
            num_bytes = 0
        filled[-1].append(usage)
        num_bytes += local_elements(plan, usage.parameter) * PARTIAL_BYTES
    return [(DENSE if len(filled) == 1 else f"{NUMBERED}{index}", each) for index, each in enumerate(filled)]


def _bucket_of(plan: Plan, usage: Usage) -> str:
    if usage.parameter.expert:
        return EXPERTS
    if usage.role:
        return usage.key
    if ".mlp.router." in usage.parameter.name and plan.layout.zero and plan.precision.dtype != "fp32":
        return ROUTERS
    known = known_part(
        usage.parameter, sequence_parallel=plan.layout.sequence_parallel, exact=plan.numerics.mode == "exact"
    )
    return WAITING if known is not None and _waits(plan) else DENSE


def _waits(plan: Plan) -> bool:
    early = _bucket_bytes(plan) is not None and bool(plan.data_parallel.overlap_grad_reduce)
    return plan.layout.tp > 1 and (sequences_are_cut(plan) or early or sums_are_sharded(plan))
