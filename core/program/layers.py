"""The parts of a stage: embedding, transformer layers, multi-token prediction, head."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..base.reduction import cut
from ..model.parameters import layer_prefix, mtp_prefix
from ..model.roles import Role
from .attention import attention_work
from .linear import column, whole
from .mlp import mlp_work
from .recompute import recomputed_runs, recomputes_all, with_recomputation
from .tensors import Tensors
from .work import LayerWork

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


def group_work(plan: Plan, group: Group, tp_rank: int = 0) -> tuple[LayerWork, ...]:
    """The layers of the first part of a group, in forward order."""
    match group.kind:
        case "embedding":
            return (embedding_work(plan, tp_rank),)
        case "head":
            return head_work(plan, tp_rank)
        case "mtp":
            return mtp_work(plan, group.layer, tp_rank)
        case _:
            return transformer_work(plan, group.layer, tp_rank)


def stage_work(plan: Plan, stage: int, tp_rank: int = 0, cp_rank: int = 0) -> tuple[LayerWork, ...]:
    """The layers of a stage in forward order."""
    tp_rank = _first_with_same_cut(plan, tp_rank)
    key = ("stage_work", stage, tp_rank, cp_rank)
    if key not in plan.memo:
        plan.memo[key] = _stage_work(plan, stage, tp_rank, cp_rank)
    found: tuple[LayerWork, ...] = plan.memo[key]
    return found


def _stage_work(plan: Plan, stage: int, tp_rank: int, cp_rank: int) -> tuple[LayerWork, ...]:
    content = plan.stages[stage]
    works: list[LayerWork] = [embedding_work(plan, tp_rank)] if content.embedding else []
    for layer in content.layers:
        works += transformer_work(plan, layer, tp_rank, cp_rank)
    if content.head:
        for depth in range(plan.model.num_mtp_layers):
            works += mtp_work(plan, depth, tp_rank, cp_rank)
        works += head_work(plan, tp_rank)
    return tuple(works)


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


def embedding_work(plan: Plan, tp_rank: int = 0, prefix: str = "") -> LayerWork:
    """Token lookup: each rank brings the rows it owns, and the sum over ranks picks the one that is there. The gradient
    of its rows needs all tokens."""
    tensors, hidden, layer = Tensors(plan, tp_rank), plan.model.hidden_size, Role.TOKENS.named(prefix)
    return LayerWork(
        layer,
        Role.TOKENS,
        tensors.reduce(layer, None, hidden),
        (*tensors.gather(layer, hidden), *tensors.gather_sequence(layer, hidden)),
        (),
    )


def transformer_work(plan: Plan, layer: int, tp_rank: int = 0, cp_rank: int = 0) -> tuple[LayerWork, ...]:
    """One transformer layer: attention, then a dense MLP or one with experts. Layers of one `Group`
    differ in their names only."""
    tensors, prefix = Tensors(plan, tp_rank, cp_rank), layer_prefix(layer)
    works = (*attention_work(tensors, prefix), *mlp_work(tensors, prefix, moe=plan.model.layer_is_moe(layer)))
    return with_recomputation(tensors, layer, works)


def mtp_work(plan: Plan, depth: int, tp_rank: int = 0, cp_rank: int = 0) -> tuple[LayerWork, ...]:
    """One module of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2, equations 21-23): the
    embedding of the next token joins the hidden state through a projection of both, then come a transformer layer
    and the model's own output head.

    The projection is held whole, each rank multiplying its own tokens.
    """
    hidden, prefix = plan.model.hidden_size, mtp_prefix(depth)
    return (
        embedding_work(plan, tp_rank, prefix),
        whole(Tensors(plan, tp_rank), prefix, Role.PROJECTION, hidden, 2 * hidden),
        *transformer_work(plan, plan.model.num_layers + depth, tp_rank, cp_rank),
        *head_work(plan, tp_rank, prefix),
    )


def head_work(plan: Plan, tp_rank: int = 0, prefix: str = "") -> tuple[LayerWork, ...]:
    """Output product over the local vocabulary, and the cross-entropy over the cut one."""
    tensors, vocab, loss = Tensors(plan, tp_rank), plan.leaf_sizes.vocab, Role.LOSS.named(prefix)
    return (
        column(tensors, prefix, Role.HEAD, vocab, 1),
        LayerWork(loss, Role.LOSS, tensors.softmax(loss, vocab), (), ()),
    )
