"""Which part of every sequence a context-parallel rank holds, as integer mathematics.

A sequence is cut into 2*cp equal chunks, of which rank r holds chunks r and 2cp - 1 - r: an early and a late one, so
that all ranks have equal work under a causal mask (Dubey et al. 2024, Llama 3, arXiv 2407.21783, section 3.3.2). What
is counted is whatever is cut: tokens, or the blocks of tokens that a sum is made of.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..base.reduction import Node, maximal_nodes

Span = tuple[int, int]
"""Items `[lo, hi)` of the whole."""


@dataclass(frozen=True)
class Chunks:
    """The items that one rank holds of `num_items` in a row; with cp=1 all of them. 2*cp divides the
    items where cp is above 1.

    >>> Chunks(12, 3, 1).spans, Chunks(12, 3, 2).spans
    (((2, 4), (8, 10)), ((4, 8),))
    """

    num_items: int
    cp: int = 1
    cp_rank: int = 0

    @property
    def size(self) -> int:
        """Items of a chunk."""
        return self.num_items if self.cp == 1 else self.num_items // (2 * self.cp)

    @property
    def num_own(self) -> int:
        """Items of this rank."""
        return self.num_items // self.cp

    @property
    def starts(self) -> tuple[int, ...]:
        """The first item of each own chunk."""
        return (0,) if self.cp == 1 else (self.cp_rank * self.size, (2 * self.cp - 1 - self.cp_rank) * self.size)

    @property
    def spans(self) -> tuple[Span, ...]:
        """This rank's items in the whole, in order; two chunks that touch are one span."""
        return self.places(0, self.num_own)

    def places(self, lo: int, hi: int) -> tuple[Span, ...]:
        """Where the own items `[lo, hi)`, counted on this rank, lie in the whole."""
        found: list[Span] = []
        for chunk, start in enumerate(self.starts):
            first, last = max(lo, chunk * self.size), min(hi, (chunk + 1) * self.size)
            if first < last:
                place = start + first - chunk * self.size, start + last - chunk * self.size
                found[-1:] = [(found[-1][0], place[1])] if found and found[-1][1] == place[0] else [*found[-1:], place]
        return tuple(found)

    def rows_before(self, start: int, end: int) -> int:
        """Items of the chunk that begins at `start` which lie before item `end`."""
        return min(max(end - start, 0), self.size)

    def local(self, item: int) -> int:
        """The place on this rank of an item that it holds; the inverse of `places`."""
        chunk, offset = divmod(item, self.size)
        return (0 if chunk == self.cp_rank else self.size) + offset

    def nodes(self, lo: int = 0, hi: int | None = None) -> tuple[Node, ...]:
        """The largest nodes of the canonical tree over all items that lie in the own items
        `[lo, hi)`, left to right."""
        places = self.places(lo, self.num_own if hi is None else hi)
        return tuple(node for place in places for node in maximal_nodes(self.num_items, *place))
