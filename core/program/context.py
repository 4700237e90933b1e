"""Context parallelism in the program of exact numerics: every rank has a part of each sequence, and finishes a part of the gradients.

After the backward of a microbatch one all-to-all finishes the trees over its sequences, for an even part of the elements of all gradients
together; REDUCE_GRAD adds these parts over the copies of the stage and brings them together again (`backend.numerics.context_gradients`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..chunks import Chunks
from ..parameters import Parameter, Usage, stage_usages
from ..reduction import cut, maximal_nodes
from .holdings import known_part, local_elements, partial_elements
from .tensors import sequences_are_cut
from .work import PARTIAL_BYTES, Collective, Operation

if TYPE_CHECKING:
    from ..plan import Plan

OpenKind = Literal["blocks", "tokens", "heads", "whole"]
OPEN_KINDS: tuple[OpenKind, ...] = ("blocks", "tokens", "heads", "whole")
"""What a gradient's sum over a sequence is made of: token blocks, the finer ones of norms and biases, those of every head; whole are
gradients that every context-parallel rank has, because it knows the whole sequence. In the order in which they lie in the flat vector."""


class OpenGradients(NamedTuple):
    """Elements of the gradients of one kind; each of their `uses` leaves a sum of its own open (heads of multi-token prediction)."""

    kind: OpenKind
    uses: int
    elements: int


def open_gradients(plan: Plan, stage: int, tp_rank: int) -> tuple[OpenGradients, ...]:
    """The gradients of a stage that context-parallel ranks finish, in the order of the flat vector: not those of experts, nor those of
    which tensor-parallel ranks know parts until REDUCE_GRAD."""
    key = ("open_gradients", stage, tp_rank)
    if key not in plan.memo:
        totals: dict[tuple[int, int], int] = {}
        for usage in stage_usages(plan.model, plan.stages[stage]):
            if not usage.parameter.expert and not _is_partial(plan, usage.parameter):
                kind, uses = _kind(plan, usage)
                place = OPEN_KINDS.index(kind), uses
                totals[place] = totals.get(place, 0) + local_elements(plan, usage.parameter, tp_rank)
        plan.memo[key] = tuple(OpenGradients(OPEN_KINDS[kind], uses, totals[kind, uses]) for kind, uses in sorted(totals))
    found: tuple[OpenGradients, ...] = plan.memo[key]
    return found


def finish_sequences(plan: Plan, stage: int, tp_rank: int, cp_rank: int) -> Iterator[Operation]:
    """What follows the last weight gradient of a microbatch."""
    cp, given = plan.layout.cp, open_gradients(plan, stage, tp_rank)
    if not sequences_are_cut(plan) or not given:
        return
    lo, hi = cut(sum(each.elements for each in given), cp, cp_rank)
    sent = first = 0
    for each in given:
        own = max(0, min(hi, first + each.elements) - max(lo, first))
        sent += _num_nodes(plan, each.kind, cp_rank) * each.uses * (each.elements - own)
        first += each.elements
    yield Collective("", "all_to_all", "cp", cp, plan.batch.micro_size * sent * PARTIAL_BYTES)


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
    if not plan.layout.zero:
        yield Collective("", "all_gather", axis, size, (hi - lo) * PARTIAL_BYTES * (size - 1))


def _is_partial(plan: Plan, parameter: Parameter) -> bool:
    known = known_part(parameter, sequence_parallel=plan.layout.sequence_parallel, exact=True)
    return plan.layout.tp > 1 and known is not None


def _kind(plan: Plan, usage: Usage) -> tuple[OpenKind, int]:
    name, heads = usage.parameter.name, 1 + plan.model.num_mtp_layers
    if name.startswith("embedding."):
        return ("blocks", heads) if usage.role == "output" and plan.model.tied_embeddings else ("whole", 0)
    if name == "head.output.weight":
        return "blocks", heads
    if len(usage.parameter.shape) > 1:
        return "blocks", 1
    return ("heads", 1) if ".query_norm." in name or ".key_norm." in name else ("tokens", 1)


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
