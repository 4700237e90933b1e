"""The parts of a stage: embedding, transformer layers, multi-token prediction, head."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..base.reduction import cut
from ..model.operators import (
    Kind,
    Operator,
    embedding_operators,
    head_operators,
    layer_operators,
    prediction_operators,
)
from ..model.parameters import layer_prefix, mtp_prefix
from ..model.roles import Role
from .attention import attention_core
from .experts import combine, dispatch
from .linear import linear
from .recompute import recomputed_runs, recomputes_all, with_recomputation
from .router import router
from .tensors import Tensors
from .work import Op

if TYPE_CHECKING:
    from ..plan.plan import Plan


@dataclass(frozen=True)
class Group:
    """`count` parts of a stage that are equal but for their names; `layer` is the first of them, or the
    number of the MTP module.

    `recomputed` means that only their input is kept.
    """

    kind: Literal["embedding", "dense", "moe", "mtp", "head"]
    count: int = 1
    layer: int = 0
    recomputed: bool = False


def stage_groups(plan: Plan, stage: int) -> tuple[Group, ...]:
    """What a stage holds, in forward order, with equal parts counted together: what prices one part
    has priced the stage."""
    key = ("stage_groups", stage)
    if key not in plan.memo:
        plan.memo[key] = _groups(plan, stage)
    found: tuple[Group, ...] = plan.memo[key]
    return found


def _groups(plan: Plan, stage: int) -> tuple[Group, ...]:
    content, model = plan.stages[stage], plan.model
    first, last = content.first_layer, content.last_layer
    groups = [Group("embedding")] if content.embedding else []
    runs = recomputed_runs(plan, first, last)
    moe_start = max(first, min(model.first_dense_layers, last)) if model.is_moe else last
    bounds = sorted({first, *itertools.chain(*runs), moe_start, last})
    for lo, hi in itertools.pairwise(bounds):
        recomputed = any(start <= lo < end for start, end in runs)
        groups.append(Group("moe" if lo >= moe_start else "dense", hi - lo, lo, recomputed))
    if content.head:
        if model.num_mtp_layers:
            groups.append(Group("mtp", model.num_mtp_layers, 0, recomputes_all(plan)))
        groups.append(Group("head"))
    return tuple(groups)


def group_ops(plan: Plan, group: Group, tp_rank: int = 0) -> tuple[Op, ...]:
    """The layers of the first part of a group, in forward order."""
    match group.kind:
        case "embedding":
            return embedding_ops(plan, tp_rank)
        case "head":
            return head_ops(plan, tp_rank)
        case "mtp":
            return mtp_ops(plan, group.layer, tp_rank)
        case _:
            return layer_ops(plan, group.layer, tp_rank)


def stage_ops(plan: Plan, stage: int, tp_rank: int = 0, cp_rank: int = 0) -> tuple[Op, ...]:
    """The layers of a stage in forward order."""
    tp_rank = _first_with_same_cut(plan, tp_rank)
    key = ("stage_ops", stage, tp_rank, cp_rank)
    if key not in plan.memo:
        plan.memo[key] = _stage_ops(plan, stage, tp_rank, cp_rank)
    found: tuple[Op, ...] = plan.memo[key]
    return found


def _stage_ops(plan: Plan, stage: int, tp_rank: int, cp_rank: int) -> tuple[Op, ...]:
    content = plan.stages[stage]
    ops: list[Op] = list(embedding_ops(plan, tp_rank)) if content.embedding else []
    for layer in content.layers:
        ops += layer_ops(plan, layer, tp_rank, cp_rank)
    if content.head:
        for depth in range(plan.model.num_mtp_layers):
            ops += mtp_ops(plan, depth, tp_rank, cp_rank)
        ops += head_ops(plan, tp_rank)
    return tuple(ops)


def _first_with_same_cut(plan: Plan, tp_rank: int) -> int:
    """The lowest tensor-parallel rank whose layers compute and send what this one's do.

    Only dense layers of fast numerics are compared, by the sizes they are made of: of exact sums
    every rank has other nodes.
    """
    if plan.numerics.mode == "exact" or plan.model.is_moe:
        return tp_rank
    if "tp_shares" not in plan.memo:
        plan.memo["tp_shares"] = [_share(plan, each) for each in range(plan.layout.tp)]
    shares: list[tuple[int, ...]] = plan.memo["tp_shares"]
    return shares.index(shares[tp_rank])


def _share(plan: Plan, tp_rank: int) -> tuple[int, ...]:
    tp, sizes = plan.layout.tp, plan.leaf_sizes
    tokens = Tensors(plan, tp_rank).own_tokens
    spans = [leaves.owned_items(tp, tp_rank) for leaves in (sizes.heads, sizes.ffn, sizes.vocab)]
    return (tokens, *(hi - lo for lo, hi in (*spans, cut(tokens * plan.model.hidden_size, tp, tp_rank))))


def embedding_ops(plan: Plan, tp_rank: int = 0, prefix: str = "") -> tuple[Op, ...]:
    """Token lookup, and that of positions."""
    return _on_rank(Tensors(plan, tp_rank), embedding_operators(plan.model), prefix)


def layer_ops(plan: Plan, layer: int, tp_rank: int = 0, cp_rank: int = 0) -> tuple[Op, ...]:
    """One transformer layer: attention, then a dense MLP or one with experts. Layers of one `Group`
    differ in their names only."""
    tensors = Tensors(plan, tp_rank, cp_rank)
    ops = _on_rank(tensors, layer_operators(plan.model, layer), layer_prefix(layer))
    return with_recomputation(tensors, layer, ops)


def mtp_ops(plan: Plan, depth: int, tp_rank: int = 0, cp_rank: int = 0) -> tuple[Op, ...]:
    """One module of multi-token prediction: the embedding of the next token joins the hidden state through a projection
    of both, then come a transformer layer and the model's own output head."""
    model, prefix = plan.model, mtp_prefix(depth)
    return (
        *embedding_ops(plan, tp_rank, prefix),
        *_on_rank(Tensors(plan, tp_rank), prediction_operators(model), prefix),
        *layer_ops(plan, model.num_layers + depth, tp_rank, cp_rank),
        *head_ops(plan, tp_rank, prefix),
    )


def head_ops(plan: Plan, tp_rank: int = 0, prefix: str = "") -> tuple[Op, ...]:
    """Output product over the local vocabulary, and the cross-entropy over the cut one."""
    return _on_rank(Tensors(plan, tp_rank), head_operators(plan.model), prefix)


def _on_rank(tensors: Tensors, operators: Iterable[Operator], prefix: str) -> tuple[Op, ...]:
    """What a rank does of operators, those left out that neither multiply nor send."""
    ops = (_op(tensors, operator, operator.role.named(prefix)) for operator in operators)
    return tuple(op for op in ops if op is not None)


def _op(tensors: Tensors, operator: Operator, layer: str) -> Op | None:
    match operator.kind:
        case Kind.LINEAR:
            return (router if operator.role is Role.ROUTER else linear)(tensors, operator, layer)
        case Kind.ATTEND:
            return attention_core(tensors, operator, layer)
        case Kind.DISPATCH:
            return dispatch(tensors, operator, layer)
        case Kind.COMBINE:
            return combine(tensors, operator, layer)
        case Kind.LOOK_UP if operator.axis is not None:
            return _token_lookup(tensors, operator, layer)
        case Kind.CROSS_ENTROPY:
            assert operator.axis is not None
            return Op(layer, operator.role, tensors.softmax(layer, tensors.leaves(operator.axis)), (), ())
        case _:
            return None


def _token_lookup(tensors: Tensors, operator: Operator, layer: str) -> Op:
    """Each rank brings the rows it owns, and the sum over ranks picks the one that is there. The gradient of its rows
    needs all tokens."""
    hidden = operator.makes.size
    gathers = (*tensors.gather(layer, hidden), *tensors.gather_sequence(layer, hidden))
    return Op(layer, operator.role, tensors.reduce(layer, None, hidden), gathers, ())
