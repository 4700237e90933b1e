"""How many parameters and gradients a rank holds, and over how many copies they are cut or added up."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..layout.leaves import LeafSizes
from ..model.model import ModelSpec
from ..model.operators import Operator
from ..model.parameters import TABLES, Parameter, operator_parameters, token_table
from ..model.roles import Role
from .layers import stage_groups

if TYPE_CHECKING:
    from ..layout.layout import Layout
    from ..plan.plan import Plan


KnownPart = Literal["tokens", "heads"]
KNOWN_PARTS: tuple[KnownPart, ...] = ("tokens", "heads")
"""In the order in which REDUCE_GRAD adds them up."""

PART_LAYERS: dict[KnownPart, str] = {"tokens": "", "heads": "heads"}
"""What exact numerics call the exchange of parts."""


class Held(NamedTuple):
    """A number for dense parameters and one for experts, which have other copies."""

    dense: int
    expert: int


def local_elements(plan: Plan, parameter: Parameter, tp_rank: int = 0) -> int:
    """Elements of a parameter that a tensor-parallel rank holds, before any ZeRO cut."""
    return _local(parameter, plan.leaf_sizes, _grid(plan.layout), tp_rank)


def held_elements(plan: Plan, stage: int, tp_rank: int = 0) -> Held:
    """Parameter elements that a tensor-parallel rank of a stage holds, before any ZeRO cut; a shared
    table once per stage."""
    key = ("held_elements", stage, tp_rank)
    if key not in plan.memo:
        plan.memo[key] = _held(plan, stage, tp_rank)
    found: Held = plan.memo[key]
    return found


def _held(plan: Plan, stage: int, tp_rank: int) -> Held:
    content, model = plan.stages[stage], plan.model
    dense = expert = 0
    for group in stage_groups(plan, stage):
        own = _part(model, group.operators, plan.leaf_sizes, _grid(plan.layout), tp_rank)
        dense, expert = dense + group.count * own.dense, expert + group.count * own.expert
    if content.head and not content.embedding and model.shares_table:
        dense += local_elements(plan, token_table(model), tp_rank)
    return Held(dense, expert)


def num_routers(plan: Plan, stage: int) -> int:
    """Layers with experts of a stage, those of multi-token prediction among them."""
    return sum(group.count * group.num(Role.ROUTER) for group in stage_groups(plan, stage))


def held_gradients(plan: Plan, stage: int, tp_rank: int = 0) -> Held:
    """Gradient elements that a stage accumulates: as its parameters, but a table used at both ends of
    one stage counts twice."""
    held, content = held_elements(plan, stage, tp_rank), plan.stages[stage]
    if plan.model.shares_table and content.embedding and content.head:
        return Held(held.dense + local_elements(plan, token_table(plan.model), tp_rank), held.expert)
    return held


def known_part(parameter: Parameter, *, sequence_parallel: bool, exact: bool) -> KnownPart | None:
    """What a tensor-parallel rank knows of a parameter's gradient: what comes from its own tokens, or its own
    heads; None is all of it.

    Exact numerics multiply the matrices that no rank cuts with all tokens (`linear.whole`).
    """
    if parameter.cut is not None or parameter.expert:
        return None
    if knows_heads(parameter):
        return "heads"
    if not sequence_parallel or parameter.name in TABLES or (exact and len(parameter.shape) > 1):
        return None
    return "tokens"


def knows_heads(parameter: Parameter) -> bool:
    """True for the norms of query and key heads, of which tensor parallelism cuts the heads."""
    return ".query_norm." in parameter.name or ".key_norm." in parameter.name


def partial_elements(plan: Plan, stage: int) -> dict[KnownPart, int]:
    """Elements of a stage whose gradients REDUCE_GRAD adds up over tensor parallelism, by what a rank knows
    of them (`known_part`)."""
    model, split = plan.model, plan.layout.sequence_parallel
    found: dict[KnownPart, int] = {}
    for kind in KNOWN_PARTS if split or model.qk_norm else ():
        parts = (
            _elements_of(model, group.operators, kind, split, plan.numerics.mode == "exact")
            for group in stage_groups(plan, stage)
        )
        counts = [group.count for group in stage_groups(plan, stage)]
        if total := sum(count * elements for count, elements in zip(counts, parts, strict=True)):
            found[kind] = total
    return found


def num_copies(plan: Plan, stage: int) -> Held:
    """Ranks that add up the gradients of a stage: dp*cp for dense parameters, the experts' own data parallelism for
    theirs, times two where the placement has replicas of the stage."""
    replicas = len(plan.placement.ranks[stage])
    return Held(plan.layout.dp * plan.layout.cp * replicas, plan.layout.expert_dp * replicas)


def num_shards(plan: Plan, stage: int) -> Held:
    """Parts into which ZeRO cuts what it cuts: one per copy, or as many as `data_parallel.shard` says (hybrid
    sharding), of which experts, spread over ep*etp ranks already, have that many times fewer."""
    copies, shard = num_copies(plan, stage), plan.data_parallel.shard
    if shard is None:
        return copies
    return Held(min(shard, copies.dense), min(plan.layout.expert_shard(shard), copies.expert))


def stage_elements(plan: Plan, stage: int, tp_rank: int = 0) -> int:
    """Parameter elements that a tensor-parallel rank of a stage holds, before any ZeRO cut; a shared
    table once per stage."""
    return sum(held_elements(plan, stage, tp_rank))


def gradient_elements(plan: Plan, stage: int, tp_rank: int = 0) -> int:
    """Gradient elements that a stage accumulates: as its parameters, but a table used at both ends of
    one stage counts twice."""
    return sum(held_gradients(plan, stage, tp_rank))


def rank_stages(plan: Plan, pp_rank: int) -> tuple[int, ...]:
    """The stages of a pipeline rank, ascending."""
    return plan.placement.stages_of(pp_rank)


def rank_elements(plan: Plan, pp_rank: int, tp_rank: int = 0) -> int:
    """Parameter elements of all stages of a pipeline rank, before any ZeRO cut."""
    return sum(stage_elements(plan, stage, tp_rank) for stage in rank_stages(plan, pp_rank))


class _Grid(NamedTuple):
    tp: int
    etp: int
    ep: int


def _grid(layout: Layout) -> _Grid:
    return _Grid(layout.tp, layout.expert_tp, layout.ep)


def _local(parameter: Parameter, leaf_sizes: LeafSizes, grid: _Grid, tp_rank: int) -> int:
    elements, degree = parameter.num_elements, grid.tp
    if parameter.expert:
        elements, degree = elements // grid.ep, grid.etp
    if parameter.cut is None:
        return elements
    dim, feature = parameter.cut
    lo, hi = leaf_sizes.feature(feature).owned_items(degree, tp_rank % degree)
    return elements // parameter.shape[dim] * (hi - lo) * parameter.unit


@lru_cache(maxsize=4096)
def _part(model: ModelSpec, operators: tuple[Operator, ...], leaf_sizes: LeafSizes, grid: _Grid, tp_rank: int) -> Held:
    """What one part of a stage holds."""
    held = [0, 0]
    for parameter in operator_parameters(model, operators):
        held[parameter.expert] += _local(parameter, leaf_sizes, grid, tp_rank)
    return Held(*held)


@lru_cache(maxsize=1024)
def _elements_of(model: ModelSpec, operators: tuple[Operator, ...], known: KnownPart, split: bool, exact: bool) -> int:
    return sum(
        parameter.num_elements
        for parameter in operator_parameters(model, operators)
        if known_part(parameter, sequence_parallel=split, exact=exact) == known
    )
