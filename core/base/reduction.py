"""Canonical reduction trees, as integer mathematics.

A sum over n leaves, numbered by a global index, is one fixed binary tree: `[lo, hi)` splits after the largest power of
two that is below its length. A rank that owns an interval of leaves computes the *maximal nodes* inside it and ships
those; whoever finishes the tree gets the same bits, whatever the cuts were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Node = tuple[int, int]
"""A tree node by the leaves `[lo, hi)` under it."""

Value = TypeVar("Value")


def split(node: Node) -> tuple[Node, Node]:
    """The two children of a node of at least two leaves.

    >>> split((0, 6)), split((4, 6))
    (((0, 4), (4, 6)), ((4, 5), (5, 6)))
    """
    lo, hi = node
    middle = lo + (1 << (hi - lo - 1).bit_length() - 1)
    return (lo, middle), (middle, hi)


def maximal_nodes(num_leaves: int, lo: int, hi: int) -> tuple[Node, ...]:
    """The largest nodes of the tree over `num_leaves` that lie inside `[lo, hi)`, left to right: at most 2 log2 n.

    >>> maximal_nodes(6, 0, 4), maximal_nodes(6, 3, 6)
    (((0, 4),), ((3, 4), (4, 6)))
    """
    assert 0 <= lo <= hi <= num_leaves
    found: list[Node] = []
    pending = [(0, num_leaves)] if num_leaves else []
    while pending:
        node = pending.pop()
        if node[1] <= lo or node[0] >= hi:
            continue
        if lo <= node[0] and node[1] <= hi:
            found.append(node)
        else:
            left, right = split(node)
            pending += [right, left]
    return tuple(found)


def sibling(num_leaves: int, node: Node) -> Node | None:
    """The other child of a node's parent; None for the root. Raises ValueError for an interval that is no node."""
    current = (0, num_leaves)
    other: Node | None = None
    while current != node:
        if current[1] - current[0] < 2:
            raise ValueError(f"{node} is no node of the tree over {num_leaves} leaves.")
        left, right = split(current)
        current, other = (left, right) if node[1] <= left[1] else (right, left)
    return other


def merges_of(num_leaves: int, nodes: Sequence[Node]) -> tuple[int, ...]:
    """How often the last two values held are added, left plus right, after each of the nodes that arrive from left to
    right. Nodes that cover all leaves leave one value.

    >>> merges_of(6, [(0, 2), (2, 3), (3, 4), (4, 6)])
    (0, 0, 2, 1)
    """
    held: list[Node] = []
    found = []
    for node in nodes:
        count, here = 0, node
        while held and sibling(num_leaves, here) == held[-1]:
            here = (held.pop()[0], here[1])
            count += 1
        held.append(here)
        found.append(count)
    return tuple(found)


class CarryTree(Generic[Value]):
    """Finishes a tree from nodes that arrive in any order, holding no more partial values than
    the arrivals force it to.

    `add(left, right)` combines two values; it is called with the left child first. In order and
    aligned, log2 n + 1 are held.
    """

    def __init__(self, num_leaves: int, add: Callable[[Value, Value], Value]):
        self.num_leaves = num_leaves
        self._add = add
        self._held: dict[Node, Value] = {}

    def insert(self, node: Node, value: Value) -> None:
        """Takes the value of a node; merges with siblings as long as they are there."""
        assert node not in self._held, f"node {node} arrived twice"
        while (other := sibling(self.num_leaves, node)) is not None and other in self._held:
            theirs = self._held.pop(other)
            value = self._add(value, theirs) if node < other else self._add(theirs, value)
            node = (min(node[0], other[0]), max(node[1], other[1]))
        self._held[node] = value

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes held now, left to right."""
        return tuple(sorted(self._held))

    def value(self, node: Node) -> Value:
        """The value of a held node."""
        return self._held[node]

    def take(self, node: Node) -> Value:
        """The value of a held node, which is held no longer."""
        return self._held.pop(node)

    def root(self) -> Value:
        """The finished sum. Raises ValueError while leaves are missing."""
        if self.nodes != ((0, self.num_leaves),):
            raise ValueError(f"the tree over {self.num_leaves} leaves is unfinished: it holds {list(self.nodes)}.")
        return self._held[(0, self.num_leaves)]


class NestedTree(Generic[Value]):
    """A carry tree over samples, each of which is itself the root of a tree over `num_blocks` token blocks."""

    def __init__(self, num_samples: int, num_blocks: int, add: Callable[[Value, Value], Value]):
        self.samples: CarryTree[Value] = CarryTree(num_samples, add)
        self._blocks: dict[int, CarryTree[Value]] = {}
        self.num_blocks = num_blocks
        self._add = add

    def insert(self, sample: int, node: Node, value: Value) -> None:
        """Takes the value of a node of one sample's tree; a finished sample becomes a leaf of the tree over samples."""
        blocks = self._blocks.setdefault(sample, CarryTree(self.num_blocks, self._add))
        blocks.insert(node, value)
        if blocks.nodes == ((0, self.num_blocks),):
            del self._blocks[sample]
            self.samples.insert((sample, sample + 1), blocks.root())

    @property
    def parts(self) -> tuple[tuple[int, Node], ...]:
        """The nodes `(sample, node)` held now of samples that are not finished, in order."""
        return tuple((sample, node) for sample in sorted(self._blocks) for node in self._blocks[sample].nodes)

    def part(self, sample: int, node: Node) -> Value:
        """The value of a held node of an unfinished sample."""
        return self._blocks[sample].value(node)

    def root(self) -> Value:
        """The finished sum. Raises ValueError while leaves are missing."""
        if self._blocks:
            raise ValueError(
                f"the trees over {self.num_blocks} token blocks of samples {sorted(self._blocks)} are unfinished."
            )
        return self.samples.root()


def cut(num_items: int, num_parts: int, part: int) -> tuple[int, int]:
    """The interval `[lo, hi)` of `part` when items are cut as evenly as possible, longer parts first.

    >>> [cut(10, 3, part) for part in range(3)]
    [(0, 4), (4, 7), (7, 10)]
    """
    quotient, remainder = divmod(num_items, num_parts)
    lo = part * quotient + min(part, remainder)
    return lo, lo + quotient + (part < remainder)
