"""The parts of a stage: embedding, transformer layers, multi-token prediction, head."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal

from ..base.reduction import cut
from ..model.blocks import Block, embedding_block, head_block, layer_blocks, prediction_blocks, stage_blocks
from ..model.model import ModelSpec
from ..model.operators import Kind, Operator
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
    """`count` parts of a stage that are equal but for their names, of which `blocks` are the first: one block, or the
    three of a module of multi-token prediction.

    `recomputed` means that only their input is kept, `offloaded` that what they keep rests in host memory.
    """

    blocks: tuple[Block, ...]
    count: int = 1
    recomputed: bool = False
    offloaded: bool = False

    @property
    def kind(self) -> Literal["embedding", "layer", "prediction", "head"]:
        """That of its first block."""
        return self.blocks[0].kind

    @cached_property
    def operators(self) -> tuple[Operator, ...]:
        """Those of its blocks."""
        return tuple(operator for block in self.blocks for operator in block.operators)

    def num(self, role: Role) -> int:
        """How many operators of a role one of its parts has."""
        return sum(operator.role is role for operator in self.operators)

    @cached_property
    def has_experts(self) -> bool:
        """Whether tokens go to experts in its parts, which so depend on how experts are cut."""
        return self.num(Role.ROUTER) > 0

    @cached_property
    def part(self) -> int:
        """A number that its parts share with those of other groups that are equal but for their names."""
        return _PARTS.setdefault((self.operators, self.recomputed), next(_NUMBERS))

    @cached_property
    def weights(self) -> int:
        """A number that its parts share with those of other groups that have the same weights, recomputed or not."""
        return _PARTS.setdefault((self.operators, False), next(_NUMBERS))


class Groups(tuple[Group, ...]):
    """The groups of a stage, in forward order."""

    @cached_property
    def composition(self) -> tuple[object, ...]:
        """Equal for stages that hold as many parts of each kind."""
        return tuple((group.part, group.count, group.offloaded) for group in self)

    @cached_property
    def weights(self) -> tuple[object, ...]:
        """Equal for stages that hold as many weights of each kind, whatever is recomputed."""
        return tuple((group.weights, group.count) for group in self)


_PARTS: dict[tuple[tuple[Operator, ...], bool], int] = {}
_NUMBERS = itertools.count()


def stage_groups(plan: Plan, stage: int) -> Groups:
    """What a stage holds, in forward order, with equal parts counted together: what prices one part
    has priced the stage."""
    key = ("stage_groups", stage)
    if key not in plan.memo:
        content = plan.stages[stage]
        runs, everything = recomputed_runs(plan, content.first_layer, content.last_layer), recomputes_all(plan)
        layers = (content.first_layer, content.last_layer)
        offloaded = content.first_layer + plan.offload.activations
        plan.memo[key] = _groups(plan.model, layers, content.embedding, content.head, runs, everything, offloaded)
    found: Groups = plan.memo[key]
    return found


@lru_cache(maxsize=4096)
def _groups(
    model: ModelSpec,
    layers: tuple[int, int],
    embedding: bool,
    head: bool,
    runs: tuple[tuple[int, int], ...],
    everything: bool,
    offloaded: int,
) -> Groups:
    """The groups of a stage whose `runs` of layers are recomputed, or with `everything` all layers, and whose layers
    before `offloaded` keep theirs in host memory; kept, because a search asks for the same ones over and over."""

    def kind(block: Block) -> tuple[tuple[Operator, ...], bool, bool]:
        return block.operators, any(start <= block.layer < end for start, end in runs), block.layer < offloaded

    groups = [Group((embedding_block(model),))] if embedding else []
    for (_, recomputed, away), equal in itertools.groupby(layer_blocks(model)[slice(*layers)], kind):
        first, *others = equal
        groups.append(Group((first,), 1 + len(others), recomputed, away))
    if head:
        if modules := prediction_blocks(model):
            groups.append(Group(modules[:3], len(modules) // 3, everything))
        groups.append(Group((head_block(model),)))
    return Groups(groups)


def composition(groups: Groups) -> tuple[object, ...]:
    """Equal for stages that hold as many parts of each kind."""
    return groups.composition


def group_ops(plan: Plan, group: Group, tp_rank: int = 0) -> tuple[Op, ...]:
    """What a rank does of the first part of a group, in forward order."""
    return tuple(op for block in group.blocks for op in block_ops(plan, block, tp_rank))


def stage_ops(plan: Plan, stage: int, tp_rank: int = 0, cp_rank: int = 0) -> tuple[Op, ...]:
    """What a rank does of a stage, in forward order."""
    tp_rank = _first_with_same_cut(plan, tp_rank)
    key = ("stage_ops", stage, tp_rank, cp_rank)
    if key not in plan.memo:
        content = plan.stages[stage]
        blocks = stage_blocks(plan.model, content.layers, embedding=content.embedding, head=content.head)
        plan.memo[key] = tuple(op for block in blocks for op in block_ops(plan, block, tp_rank, cp_rank))
    found: tuple[Op, ...] = plan.memo[key]
    return found


def _first_with_same_cut(plan: Plan, tp_rank: int) -> int:
    """The lowest tensor-parallel rank whose layers compute and send what this one's do.

    Only dense layers of fast numerics are compared, by the sizes they are made of: of exact sums
    every rank has other nodes.
    """
    if plan.numerics.mode == "exact" or plan.model.num_experts:
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


def layer_ops(plan: Plan, layer: int, tp_rank: int = 0, cp_rank: int = 0) -> tuple[Op, ...]:
    """What a rank does of one transformer layer, those of multi-token prediction counting on."""
    later = layer - plan.model.num_layers
    block = layer_blocks(plan.model)[layer] if later < 0 else prediction_blocks(plan.model)[3 * later + 1]
    return block_ops(plan, block, tp_rank, cp_rank)


def block_ops(plan: Plan, block: Block, tp_rank: int = 0, cp_rank: int = 0) -> tuple[Op, ...]:
    """What a rank does of one block, operators left out that neither multiply nor send."""
    tensors = Tensors(plan, tp_rank, cp_rank)
    ops = (_op(tensors, operator, operator.role.named(block.prefix)) for operator in block.operators)
    found = tuple(op for op in ops if op is not None)
    return with_recomputation(tensors, block.layer, found) if block.kind == "layer" else found


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
        case Kind.NORM if operator.role is Role.ALL_QUERIES_NORM and tensors.tp > 1:
            return _whole_norms(tensors, operator, layer)
        case Kind.LOOK_UP if operator.axis is not None:
            return _token_lookup(tensors, operator, layer)
        case Kind.CROSS_ENTROPY:
            assert operator.axis is not None
            return Op(layer, operator.role, tensors.softmax(layer, tensors.leaves(operator.axis)), (), ())
        case _:
            return None


def _whole_norms(tensors: Tensors, operator: Operator, layer: str) -> Op:
    """The norms of all queries and of all keys, whose heads are cut: each is a sum over the features of a token, and
    its input gradient another. Both go in one exchange."""
    assert operator.axis is not None
    sums = tensors.row_sums(layer, tensors.leaves(operator.axis), 2)
    return Op(layer, operator.role, sums, sums, ())


def _token_lookup(tensors: Tensors, operator: Operator, layer: str) -> Op:
    """Each rank brings the rows it owns, and the sum over ranks picks the one that is there. The gradient of its rows
    needs all tokens."""
    hidden = operator.makes.size
    gathers = (*tensors.gather(layer, hidden), *tensors.gather_sequence(layer, hidden))
    return Op(layer, operator.role, tensors.reduce(layer, None, hidden), gathers, ())
