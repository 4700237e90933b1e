"""`Expression`: a number of a program as the way it is computed, kept as two digests of 64 bits.

- `ordered` changes with everything: functions, arguments, and the order and grouping of every sum;
- `unordered` does not see the order of sums: a sum's digest is the sum of its terms' digests modulo 2^64, that of any
  other function a hash of the function's name and its arguments' digests.

So two expressions with equal `unordered` are the same mathematics, with equal `ordered` too the same bits. Terms
are counted: one that is missing or there twice changes the sum. (Sums of hashes modulo a number as fingerprints of
multisets: Clarke et al. 2003, "Incremental Multiset Hash Functions and Their Application to Memory Integrity
Checking", section 5, MSet-Add-Hash.) Unequal mathematics have equal digests by accident only, with probability
2^-64 for each comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from ...core.base.digest import GOLDEN, mix
from ...core.base.reduction import Node, split

MODULUS = 1 << 64


def digest(*parts: object) -> int:
    """64 bits of a tuple of texts and integers."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def digests(shape: Sequence[int], *name: object) -> np.ndarray:
    """One digest for every cell of a grid (uint64), of the name and the cell's place: the numbers that splitmix64
    draws from the name's."""
    return mix(np.uint64(digest("cells", *name)) + np.arange(math.prod(shape), dtype=np.uint64).reshape(shape) * GOLDEN)


@dataclass(frozen=True)
class Expression:
    """Two digests of one value; see the module."""

    ordered: int
    unordered: int


def symbol(*name: object) -> Expression:
    """A value that nothing is known about but its name: an input or a parameter."""
    both = digest("symbol", *name)
    return Expression(both, both)


def apply(function: str, *arguments: Expression | str | int) -> Expression:
    """Any function but a sum."""
    ordered, unordered = (
        digest(function, *(getattr(each, side) if isinstance(each, Expression) else each for each in arguments))
        for side in ("ordered", "unordered")
    )
    return Expression(ordered, unordered)


def add(left: Expression, right: Expression) -> Expression:
    """One addition."""
    return Expression(digest("add", left.ordered, right.ordered), (left.unordered + right.unordered) % MODULUS)


def summed(how: str, terms: Iterable[Expression]) -> Expression:
    """A sum in an order that `how` names: whose result is another one for other terms, or for the
    same in another grouping."""
    terms = tuple(terms)
    return Expression(digest(how, *(term.ordered for term in terms)), sum(term.unordered for term in terms) % MODULUS)


def exactly_summed(terms: Iterable[Expression]) -> Expression:
    """A sum without rounding, whose order cannot matter: all terms but one are zero, or the sum is kept exactly."""
    terms = tuple(terms)
    return Expression(sum(term.ordered for term in terms) % MODULUS, sum(term.unordered for term in terms) % MODULUS)


def interval(term: Expression, lo: int, hi: int) -> Expression:
    """The part of a sum over positions that comes from `[lo, hi)`. Parts that tile an interval add
    up to that interval's."""
    if lo == hi:
        return Expression(digest("nothing"), 0)
    unordered = (_prefix(term, hi) - _prefix(term, lo)) % MODULUS
    return Expression(digest("interval", term.ordered, lo, hi), unordered)


def tree(num_leaves: int, nodes: Mapping[Node, Expression]) -> Expression | None:
    """The canonical tree finished from some of its nodes; None when they do not tile the leaves."""
    if sum(hi - lo for lo, hi in nodes) != num_leaves:
        return None
    return _finish((0, num_leaves), nodes)


def _finish(node: Node, nodes: Mapping[Node, Expression]) -> Expression | None:
    if node in nodes:
        return nodes[node]
    if node[1] - node[0] < 2:
        return None
    left, right = (_finish(child, nodes) for child in split(node))
    return None if left is None or right is None else add(left, right)


def _prefix(term: Expression, position: int) -> int:
    return digest("prefix", term.unordered, position) if position else 0
