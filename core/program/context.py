"""Context parallelism in the program of exact numerics: every rank has a part of each sequence, and
finishes a part of the gradients.

After the backward of a microbatch one all-to-all finishes the trees over its sequences, for an even part of the
elements of all gradients together; REDUCE_GRAD adds these parts over the copies of the stage and brings them together
again (`backend.numerics.context_gradients`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..base.reduction import cut, maximal_nodes
from ..layout.chunks import Chunks
from ..layout.stage_parameters import stage_usages
from ..model.parameters import Parameter
from .buckets import bucket_sizes, owned_interval, router_elements
from .holdings import known_part, local_elements, num_shards, partial_elements
from .open_kinds import OPEN_KINDS, OpenKind, open_kind
from .tensors import sequences_are_cut
from .work import PARTIAL_BYTES, Collective, Operation

if TYPE_CHECKING:
    from ..plan.plan import Plan


class OpenGradients(NamedTuple):
    """Elements of the gradients of one kind; each of their `uses` leaves a sum of its own open (heads of
    multi-token prediction)."""

    kind: OpenKind
    uses: int
    elements: int


def open_gradients(plan: Plan, stage: int, tp_rank: int) -> tuple[OpenGradients, ...]:
    """The gradients of a stage that context-parallel ranks finish, in the order of the flat vector: not those of
    experts, nor those of which tensor-parallel ranks know parts until REDUCE_GRAD."""
    key = ("open_gradients", stage, tp_rank)
    if key not in plan.memo:
        totals: dict[tuple[int, int], int] = {}
        for usage in stage_usages(plan.model, plan.stages[stage]):
            if not usage.parameter.expert and not _is_partial(plan, usage.parameter):
                place = open_kind(plan, usage)
                totals[place] = totals.get(place, 0) + local_elements(plan, usage.parameter, tp_rank)
        plan.memo[key] = tuple(
            OpenGradients(OPEN_KINDS[kind], uses, totals[kind, uses]) for kind, uses in sorted(totals)
        )
    found: tuple[OpenGradients, ...] = plan.memo[key]
    return found


def finish_sequences(plan: Plan, stage: int, tp_rank: int = 0, cp_rank: int = 0) -> Iterator[Collective]:
    """What follows the last weight gradient of a microbatch."""
    if not sequences_are_cut(plan):
        return
    cp, given = plan.layout.cp, open_gradients(plan, stage, tp_rank)
    if not given:
        return
    sent = 0
    for group in _groups_cut_as_one(plan, stage, tp_rank, given):
        lo, hi = cut(sum(each.elements for each in group), cp, cp_rank)
        first = 0
        for each in group:
            own = max(0, min(hi, first + each.elements) - max(lo, first))
            sent += _num_nodes(plan, each.kind, cp_rank) * each.uses * (each.elements - own)
            first += each.elements
    yield Collective("", "all_to_all", "cp", cp, plan.batch.micro_size * sent * PARTIAL_BYTES)


def _groups_cut_as_one(
    plan: Plan, stage: int, tp_rank: int, given: Sequence[OpenGradients]
) -> list[list[OpenGradients]]:
    """All gradients, of which every rank finishes an even part; with ZeRO each bucket, of which tied tables
    and routers are some."""
    if not plan.layout.zero:
        return [list(given)]
    dense, tables = list(given), []
    for usage in stage_usages(plan.model, plan.stages[stage]):
        if usage.role:
            kind, uses = open_kind(plan, usage)
            table = OpenGradients(OPEN_KINDS[kind], uses, local_elements(plan, usage.parameter, tp_rank))
            dense = [
                each._replace(elements=each.elements - table.elements) if each[:2] == table[:2] else each
                for each in dense
            ]
            tables.append([table])
    if not (routers := router_elements(plan, stage)):
        return [dense, *tables]
    dense = [each._replace(elements=each.elements - routers) if each[:2] == ("blocks", 1) else each for each in dense]
    return [dense, *tables, [OpenGradients("blocks", 1, routers)]]


def reduce_parts(plan: Plan, stage: int, tp_rank: int, copy: int, axis: str) -> Iterator[Operation]:
    """REDUCE_GRAD of dense gradients: over the copies that hold the same part of them, then all parts to all."""
    cp, size = plan.layout.cp, plan.num_copies(stage)
    totals = [sum(each.elements for each in open_gradients(plan, stage, tp_rank))]
    totals.append(sum(partial_elements(plan, stage).values()) if plan.layout.tp > 1 else 0)
    if not any(totals):
        return
    (index, cp_rank), num_copies = divmod(copy, cp), size // cp
    part = sum(hi - lo for lo, hi in (cut(total, cp, cp_rank) for total in totals))
    lo, hi = cut(part, num_copies, index)
    if num_copies > 1:
        num_nodes = len(maximal_nodes(plan.batch.global_size, *plan.copy_samples(stage, copy)))
        yield Collective("", "all_to_all", axis, size, num_nodes * (part - (hi - lo)) * PARTIAL_BYTES)
    yield Collective("", "all_gather", axis, size, (hi - lo) * PARTIAL_BYTES * (size - 1))


def reduce_owned(plan: Plan, stage: int, tp_rank: int, copy: int, axis: str) -> Iterator[Operation]:
    """REDUCE_GRAD of dense gradients with ZeRO: over the copies that hold the same part of them, each of which
    keeps a part of that."""
    cp, size, parts = plan.layout.cp, plan.num_copies(stage), num_shards(plan, stage).dense
    sizes = [each.elements for each in bucket_sizes(plan, stage, tp_rank) if not each.is_expert]
    if not sizes:
        return
    part = sum(hi - lo for lo, hi in (cut(elements, cp, copy % cp) for elements in sizes))
    owned = sum(hi - lo for lo, hi in (owned_interval(elements, parts, cp, copy % parts) for elements in sizes))
    if parts > cp:
        num_nodes = len(maximal_nodes(plan.batch.global_size, *plan.copy_samples(stage, copy)))
        shard_axis = axis if parts == size else f"{axis}_shard"
        yield Collective("", "all_to_all", shard_axis, parts, num_nodes * (part - owned) * PARTIAL_BYTES)
    if parts < size:
        first = copy - copy % parts
        samples = plan.copy_samples(stage, first)[0], plan.copy_samples(stage, first + parts - 1)[1]
        num_nodes = len(maximal_nodes(plan.batch.global_size, *samples))
        yield from replicated_part(axis, size // parts, copy // parts, owned, num_nodes)


def replicated_part(
    axis: str, size: int, member: int, elements: int, num_nodes: int, layer: str = ""
) -> Iterator[Collective]:
    """The tree over those that keep equal parts of so many elements (hybrid sharding), each with so many
    nodes: all get the sum."""
    lo, hi = cut(elements, size, member)
    yield Collective(layer, "all_to_all", f"{axis}_replicate", size, num_nodes * (elements - (hi - lo)) * PARTIAL_BYTES)
    yield Collective(layer, "all_gather", f"{axis}_replicate", size, (hi - lo) * PARTIAL_BYTES * (size - 1))


def _is_partial(plan: Plan, parameter: Parameter) -> bool:
    known = known_part(parameter, sequence_parallel=plan.layout.sequence_parallel, exact=True)
    return plan.layout.tp > 1 and known is not None


def _num_nodes(plan: Plan, kind: OpenKind, cp_rank: int) -> int:
    """Nodes of one sequence's tree that a rank has."""
    sizes, cp, sequence = plan.leaf_sizes, plan.layout.cp, plan.batch.sequence
    match kind:
        case "blocks":
            return len(Chunks(sequence // sizes.gradient_token_block, cp, cp_rank).nodes())
        case "tokens":
            return len(Chunks(sizes.tokens(sequence).num_leaves, cp, cp_rank).nodes())
        case "heads":
            return len(sizes.nodes_of("heads", sequence, 1, 0, cp=cp, cp_rank=cp_rank))
        case "whole":
            return 0
