"""Which tokens a rank sends to experts, and which leaves of the expert gradients one copy of the experts makes of them.

In exact numerics the copies of tokens are multiplied in groups of one (sample, token block, expert), and a leaf of an expert's gradient is
what one group gives. A *copy of the experts* is the ranks of one etp x ep grid: together they see all tokens that these ranks hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .chunks import Chunks
from .layout import Layout
from .leaves import Leaves
from .reduction import CarryTree, NestedTree, Node, cut, maximal_nodes

if TYPE_CHECKING:
    from .plan import Plan

Run = tuple[int, int]
"""Tokens `[lo, hi)` of a sequence."""


@dataclass(frozen=True)
class Piece:
    """Tokens `[first, last)` of a sequence inside one token block. Fast numerics know one block, all tokens that a rank holds."""

    block: int
    first: int
    last: int


@dataclass(frozen=True)
class RoutedTokens:
    """Which tokens of a sequence each rank sends to experts: its own under sequence parallelism, otherwise an even part of what all
    tensor-parallel ranks hold alike. Exact numerics cut between blocks of `reduction_block` tokens and count `gradient_block`s."""

    sequence: int
    tp: int
    cp: int
    exact: bool
    gradient_block: int
    reduction_block: int

    def own(self, tp_rank: int) -> Run:
        """Those of a tensor-parallel rank, of the tokens that its context-parallel rank holds."""
        length = self.sequence // self.cp
        if self.exact:
            return Leaves(length, self.reduction_block).owned_items(self.tp, tp_rank)
        return cut(length, self.tp, tp_rank)

    def pieces(self, tp_rank: int, cp_rank: int) -> tuple[Piece, ...]:
        """Those by their places in the whole sequence, in the order in which the rank holds them, cut at token blocks; in fast numerics
        all that the rank holds are one piece."""
        lo, hi = self.own(tp_rank)
        if lo == hi or not self.exact:
            return (Piece(0, lo, hi),) if lo < hi else ()
        runs, block = Chunks(self.sequence, self.cp, cp_rank).places(lo, hi), self.gradient_block
        return tuple(
            Piece(number, max(first, number * block), min(last, (number + 1) * block))
            for first, last in runs
            for number in range(first // block, -(-last // block))
        )

    def seen(self, layout: Layout, global_rank: int) -> dict[int, tuple[Piece, ...]]:
        """The pieces that the copy of the experts on a rank sees, by data-parallel rank."""
        found: dict[int, tuple[Piece, ...]] = {}
        for member in layout.expert_group_of(global_rank, "tp-ep"):
            here = layout.coordinates(member)
            found[here["dp"]] = (*found.get(here["dp"], ()), *self.pieces(here["tp"], here["cp"]))
        return found

    def split_piece(self, layout: Layout) -> Piece | None:
        """A piece of a token block of which another copy of the experts sees the rest; None where every copy sees whole blocks."""
        if layout.expert_tp * layout.ep % self.tp == 0 and layout.order.startswith("tp-"):
            return None  # every copy has whole tensor-parallel groups, and context parallelism cuts between blocks
        for group in layout.expert_groups("tp-ep"):
            for pieces in self.seen(layout, group[0]).values():
                sizes: dict[int, int] = {}
                for piece in pieces:
                    sizes[piece.block] = sizes.get(piece.block, 0) + piece.last - piece.first
                for piece in pieces:
                    first = piece.block * self.gradient_block
                    if sizes[piece.block] != min(first + self.gradient_block, self.sequence) - first:
                        return piece
        return None


def routed_tokens(plan: Plan) -> RoutedTokens:
    """Those of a plan."""
    sizes, layout = plan.leaf_sizes, plan.layout
    return RoutedTokens(
        plan.batch.sequence, layout.tp, layout.cp, plan.numerics.mode == "exact", sizes.gradient_token_block, sizes.reduction_token_block
    )


def num_token_blocks(plan: Plan) -> int:
    """Token blocks of a sequence."""
    return -(-plan.batch.sequence // plan.leaf_sizes.gradient_token_block)


@dataclass(frozen=True)
class ExpertNodes:
    """What a copy of the experts has of an expert gradient when all its microbatches are in: `whole` are nodes of the batch's tree over
    samples, `parts` nodes `(sample, node)` of the tree over token blocks of samples whose other blocks went to other copies."""

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
    key = ("expert_nodes", stage, plan.layout.expert_coordinates(global_rank)["dp"], plan.layout.coordinates(global_rank)["pp"])
    if key not in plan.memo:
        plan.memo[key] = _expert_nodes(plan, stage, global_rank)
    found: ExpertNodes = plan.memo[key]
    return found


def _expert_nodes(plan: Plan, stage: int, global_rank: int) -> ExpertNodes:
    pp_rank, num_samples, num_blocks = plan.layout.coordinates(global_rank)["pp"], plan.batch.global_size, num_token_blocks(plan)
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
