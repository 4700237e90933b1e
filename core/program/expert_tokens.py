"""Which leaves of the expert gradients one copy of the experts makes of the tokens that it sees
(`core.layout.routed_tokens`).

In exact numerics the copies of tokens are multiplied in groups of one (sample, token block, expert), and a leaf of an
expert's gradient is what one group gives. A *copy of the experts* is the ranks of one etp x ep grid: together they see
all tokens that these ranks hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..base.reduction import CarryTree, NestedTree, Node, maximal_nodes
from ..layout.routed_tokens import RoutedTokens

if TYPE_CHECKING:
    from ..plan.plan import Plan


def routed_tokens(plan: Plan) -> RoutedTokens:
    """Those of a plan."""
    sizes, layout = plan.leaf_sizes, plan.layout
    return RoutedTokens(
        plan.batch.sequence,
        layout.tp,
        layout.cp,
        plan.numerics.mode == "exact",
        sizes.gradient_token_block,
        sizes.reduction_token_block,
    )


def num_token_blocks(plan: Plan) -> int:
    """Token blocks of a sequence."""
    return -(-plan.batch.sequence // plan.leaf_sizes.gradient_token_block)


@dataclass(frozen=True)
class ExpertNodes:
    """What a copy of the experts has of an expert gradient when all its microbatches are in: `whole` are nodes of the
    batch's tree over samples, `parts` nodes `(sample, node)` of the tree over token blocks of samples whose other
    blocks went to other copies."""

    whole: tuple[Node, ...]
    parts: tuple[tuple[int, Node], ...]

    def __len__(self) -> int:
        return len(self.whole) + len(self.parts)


def joined_nodes(num_samples: int, num_blocks: int, nodes: Iterable[ExpertNodes]) -> ExpertNodes:
    """What several copies of the experts have together, when what they have is added up as far as it goes."""
    joined: NestedTree[None] = NestedTree(num_samples, num_blocks, lambda left, right: None)
    for each in nodes:
        for node in each.whole:
            joined.samples.insert(node, None)
        for sample, node in each.parts:
            joined.insert(sample, node, None)
    return ExpertNodes(joined.samples.nodes, joined.parts)


def expert_nodes(plan: Plan, stage: int, global_rank: int) -> ExpertNodes:
    """The nodes that the copy of the experts on a rank holds of a stage's gradients before REDUCE_GRAD."""
    key = (
        "expert_nodes",
        stage,
        plan.layout.expert_coordinates(global_rank)["dp"],
        plan.layout.coordinates(global_rank)["pp"],
    )
    if key not in plan.memo:
        plan.memo[key] = _expert_nodes(plan, stage, global_rank)
    found: ExpertNodes = plan.memo[key]
    return found


def _expert_nodes(plan: Plan, stage: int, global_rank: int) -> ExpertNodes:
    pp_rank, num_samples, num_blocks = (
        plan.layout.coordinates(global_rank)["pp"],
        plan.batch.global_size,
        num_token_blocks(plan),
    )
    whole: CarryTree[None] = CarryTree(num_samples, lambda left, right: None)
    parts: list[tuple[int, Node]] = []
    for dp_rank, pieces in routed_tokens(plan).seen(plan.layout, global_rank).items():
        samples = plan.copy_samples(stage, plan.copy_of(stage, dp_rank=dp_rank, pp_rank=pp_rank))
        blocks: CarryTree[None] = CarryTree(num_blocks, lambda left, right: None)
        for number in sorted({piece.block for piece in pieces}):
            blocks.insert((number, number + 1), None)
        if blocks.nodes == ((0, num_blocks),):
            for node in maximal_nodes(num_samples, *samples):
                whole.insert(node, None)
        else:
            parts += [(sample, node) for sample in range(*samples) for node in blocks.nodes]
    return ExpertNodes(whole.nodes, tuple(sorted(parts)))
