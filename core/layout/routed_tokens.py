"""Which tokens of a sequence a rank sends to experts, and which of them one copy of the experts sees.

A *copy of the experts* is the ranks of one etp x ep grid: together they see all tokens that these ranks hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..base.reduction import cut
from .chunks import Chunks
from .layout import Layout
from .leaves import Leaves

Run = tuple[int, int]
"""Tokens `[lo, hi)` of a sequence."""


@dataclass(frozen=True)
class Piece:
    """Tokens `[first, last)` of a sequence inside one token block. Fast numerics know one block, all
    tokens that a rank holds."""

    block: int
    first: int
    last: int


@dataclass(frozen=True)
class RoutedTokens:
    """Which tokens of a sequence each rank sends to experts: its own under sequence parallelism, otherwise an even part
    of what all tensor-parallel ranks hold copies of. Exact numerics cut between blocks of `reduction_block` tokens and
    count `gradient_block`s."""

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
        """Those by their places in the whole sequence, in the order in which the rank holds them, cut at token blocks;
        in fast numerics all that the rank holds are one piece."""
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
        """A piece of a token block of which another copy of the experts sees the rest; None where every
        copy sees whole blocks."""
        if layout.expert_tp * layout.ep % self.tp == 0 and layout.order.startswith("tp-"):
            return None  # every copy has whole tensor-parallel groups, and context parallelism cuts between blocks
        for group in layout.expert_groups("tp-ep"):
            if layout.coordinates(group[0])["pp"]:
                continue  # every pipeline rank has these groups
            for pieces in self.seen(layout, group[0]).values():
                sizes: dict[int, int] = {}
                for piece in pieces:
                    sizes[piece.block] = sizes.get(piece.block, 0) + piece.last - piece.first
                for piece in pieces:
                    first = piece.block * self.gradient_block
                    if sizes[piece.block] != min(first + self.gradient_block, self.sequence) - first:
                        return piece
        return None
