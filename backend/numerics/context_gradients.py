"""Exact gradients under context parallelism: every rank has a part of each sequence, and finishes a part of
the gradients' elements.

After the backward of a microbatch one exchange over the context-parallel ranks (an all-to-all) finishes the trees over
each sequence, for an even part of the elements of all gradients together. The batch's tree is accumulated on that part;
REDUCE_GRAD finishes it over the copies of the stage and brings the parts together again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ...core.base.reduction import CarryTree, Node, cut, maximal_nodes
from ..transport.base import Group
from .copies import Copies
from .exact_gradients import ExactAccumulator
from .open_sums import OpenSums
from .summands import Summands, sum_over
from .tree import add_in_place

_ORDER = ("blocks", "tokens", "heads", "whole")
"""Gradients lie in the flat vector by kind; whole are those that every context-parallel rank has."""


Given = OpenSums | Sequence[Tensor]
"""One microbatch's contribution: open, or one finished tensor per sample, the same on every context-parallel rank."""


class ContextGradients:
    """The gradients of one stage on one context-parallel rank over a step: `add` each, `finish` each
    microbatch, `reduce` at the end."""

    def __init__(self, cp: Group, num_samples: int):
        self.cp = cp
        self.num_samples = num_samples
        self._given: dict[int, dict[str, dict[int, Given]]] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._batch = ExactAccumulator(num_samples)

    def add(self, key: str, use: int, first_sample: int, contribution: Given) -> None:
        """Takes what one use of a parameter gives for the microbatch that starts at `first_sample`."""
        uses = self._given.setdefault(first_sample, {}).setdefault(key, {})
        assert use not in uses, f"use {use} of {key} arrived twice"
        uses[use] = contribution

    @property
    def held(self) -> list[Tensor]:
        """Every tensor held now."""
        waiting = [each for given in self._given.values() for uses in given.values() for each in uses.values()]
        return [*self._batch.held, *(value for each in waiting for values in _samples(each) for value in values)]

    def finish(self, first_sample: int, order: Iterable[str], buckets: Sequence[Sequence[str]] | None = None) -> None:
        """Finishes the sequences of a microbatch whose gradients have all come; `order` is that of all keys.

        With `buckets`, the keys of gradients that lie together and are cut apart from others, these say the order.
        """
        given = {key: [uses[use] for use in sorted(uses)] for key, uses in self._given.pop(first_sample, {}).items()}
        if not given:
            return  # a stage without parameters
        place = {key: index for index, key in enumerate(order)}
        if buckets is None:
            buckets = [sorted(given, key=lambda key: (*_order(given[key]), place[key]))]
        self._shapes = {key: _samples(given[key][0])[0][0].shape for keys in buckets for key in keys}
        tables = [{key: self._shapes[key] for key in keys} for keys in buckets]
        pieces = [
            [piece for table in tables for piece in _pieces(table, self.cp.size, member)]
            for member in range(self.cp.size)
        ]
        num_samples = len(_samples(next(iter(given.values()))[0]))
        arrived = self._exchange(given, pieces, num_samples)
        for sample in range(num_samples):
            finished = [
                _added([_finished(each, sample, (lo, hi), arrived) for each in given[key]])
                for key, lo, hi in pieces[self.cp.rank]
            ]
            self._batch.add(first_sample + sample, [torch.cat(finished)])

    def reduce(
        self, copies: Group, samples_of: Callable[[int], tuple[int, int]], others: Mapping[str, ExactAccumulator]
    ) -> dict[str, Tensor]:
        """Finished sums over the global batch by key, the same on every member of `copies`: copies of the stage in the
        order of the samples they see, and of each copy its context-parallel ranks in order. `others` are gradients that
        all of a copy's ranks have whole.

        Raises ValueError while a microbatch has not contributed.
        """
        size, num_copies = self.cp.size, copies.size // self.cp.size
        copy, part = divmod(copies.rank, size)
        assert part == self.cp.rank, "the context-parallel ranks of a copy are neighbours, in order"
        nodes = [maximal_nodes(self.num_samples, *samples_of(member * size)) for member in range(num_copies)]
        trees = [each.tree for each in ([self._batch] if self._shapes else []) + list(others.values())]
        if not trees:
            return {}
        if any(tree.nodes != nodes[copy] for tree in trees):
            raise ValueError(
                f"the gradients hold the nodes {trees[0].nodes} of the batch's tree, and not yet {nodes[copy]}."
            )
        shapes = {key: each.tree.value(nodes[copy][0]).shape for key, each in others.items()}
        widths = [sum(shape.numel() for shape in table.values()) for table in (self._shapes, shapes)]
        values = torch.stack([self._own_part(node, others, widths[1]) for node in nodes[copy]])
        lengths = [sum(hi - lo for lo, hi in (cut(width, size, member) for width in widths)) for member in range(size)]
        own = _over_copies(copies, values, nodes, self.num_samples, size).root()
        pieces = [cut(lengths[member], num_copies, index) for index in range(num_copies) for member in range(size)]
        gathered = copies.all_gather(own, [(hi - lo,) for lo, hi in pieces])
        parts = [torch.cat(gathered[member::size]) for member in range(size)]
        return _unflattened(parts, widths, (self._shapes, shapes))

    def reduce_owned(
        self,
        copies: Copies,
        samples_of: Callable[[int], tuple[int, int]],
        buckets: Sequence[Sequence[str]],
        waiting: Sequence[ExactAccumulator],
    ) -> list[Tensor]:
        """As `reduce`, but each member keeps of every bucket an even part of what it has finished; last comes
        that of `waiting`, gradients that all of a copy's ranks have whole, if there are any. A shard of the
        copies has whole copies."""
        size, shard = self.cp.size, copies.shard
        num_copies, copy = shard.size // size, shard.rank // size
        seen = copies.of_shard(samples_of)
        nodes = [maximal_nodes(self.num_samples, *seen(member * size)) for member in range(num_copies)]
        elements = [sum(self._shapes[key].numel() for key in keys) for keys in buckets]
        values = [[self._batch.tree.value(node)] if elements else [] for node in nodes[copy]]
        if waiting:
            elements.append(sum(each.tree.value(nodes[copy][0]).numel() for each in waiting))
            lo, hi = cut(elements[-1], size, self.cp.rank)
            for node, parts in zip(nodes[copy], values, strict=True):
                parts.append(torch.cat([each.tree.value(node).reshape(-1) for each in waiting])[lo:hi])
        widths = [hi - lo for lo, hi in (cut(each, size, self.cp.rank) for each in elements)]
        owned = [[cut(width, num_copies, index) for width in widths] for index in range(num_copies)]
        tree = _over_copies(
            shard, torch.stack([torch.cat(parts) for parts in values]), nodes, self.num_samples, size, widths
        )
        if copies.replicate is None:
            finished = tree.root()
        else:
            held = tuple(maximal_nodes(self.num_samples, *samples) for samples in copies.of_replicate(samples_of))
            own = torch.stack([tree.value(node) for node in tree.nodes])
            finished = sum_over(copies.replicate, own, Summands(self.num_samples, held))
        return list(finished.split([hi - lo for lo, hi in owned[copy]]))

    def _own_part(self, node: Node, others: Mapping[str, ExactAccumulator], width: int) -> Tensor:
        """This rank's part of a node of the batch's tree: of what it has finished, and of what all have."""
        lo, hi = cut(width, self.cp.size, self.cp.rank)
        whole = [each.tree.value(node).reshape(-1) for each in others.values()]
        parts = ([self._batch.tree.value(node)] if self._shapes else []) + ([torch.cat(whole)[lo:hi]] if whole else [])
        return torch.cat(parts)

    def _exchange(
        self, given: Mapping[str, Sequence[Given]], pieces: Sequence[Sequence[_Piece]], num_samples: int
    ) -> list[Iterator[Tensor]]:
        """From every member its values of each (sample, gradient, use, node), one after the other, for this rank's
        part of the elements."""
        samples = range(num_samples)
        outgoing = [
            [
                value.reshape(-1)[lo:hi]
                for sample in samples
                for key, lo, hi in part
                for value in _open_values(given[key], sample)
            ]
            for part in pieces
        ]
        own = [
            (each, hi - lo) for key, lo, hi in pieces[self.cp.rank] for each in given[key] if isinstance(each, OpenSums)
        ]
        sizes = [
            [width for each, width in own for _ in each.nodes[member]] * num_samples for member in range(self.cp.size)
        ]
        vectors = [torch.cat(values) if values else torch.empty(0, device=_device(given)) for values in outgoing]
        arrived = self.cp.all_to_all(vectors, [(sum(each),) for each in sizes])
        return [iter(vector.split(each)) for vector, each in zip(arrived, sizes, strict=True)]


_Piece = tuple[str, int, int]
"""A gradient and the elements `[lo, hi)` of it that lie in a part of the flat vector."""


def _order(uses: Sequence[Given]) -> tuple[int, int]:
    """Where a gradient lies: by its kind, then by how many of its sums are open."""
    kinds = [each.kind for each in uses if isinstance(each, OpenSums)]
    return _ORDER.index(kinds[0] if kinds else "whole"), len(kinds)


def _samples(given: Given) -> list[list[Tensor]]:
    return given.samples if isinstance(given, OpenSums) else [[value] for value in given]


def _open_values(uses: Sequence[Given], sample: int) -> list[Tensor]:
    """The values that are sent."""
    return [value for each in uses if isinstance(each, OpenSums) for value in each.samples[sample]]


def _device(given: Mapping[str, Sequence[Given]]) -> torch.device:
    return next(_samples(uses[0])[0][0].device for uses in given.values())


def _added(uses: Sequence[Tensor]) -> Tensor:
    """What all uses of a parameter give, added in their order."""
    total, *rest = uses
    for other in rest:
        total = total + other
    return total


def _pieces(shapes: Mapping[str, torch.Size], size: int, member: int) -> Iterator[_Piece]:
    """What of each gradient lies in a member's even part of all of them, one after the other."""
    ends = list(accumulate((shape.numel() for shape in shapes.values()), initial=0))
    lo, hi = cut(ends[-1], size, member)
    for key, first, last in zip(shapes, ends, ends[1:], strict=False):
        if max(lo, first) < min(hi, last):
            yield key, max(lo, first) - first, min(hi, last) - first


def _finished(given: Given, sample: int, elements: tuple[int, int], arrived: Sequence[Iterator[Tensor]]) -> Tensor:
    """A sample's sum over its sequence, for some elements; takes what it needs from `arrived`."""
    if not isinstance(given, OpenSums):
        return given[sample].reshape(-1)[slice(*elements)]
    tree: CarryTree[Tensor] = CarryTree(given.num_leaves, add_in_place)
    for nodes, values in zip(given.nodes, arrived, strict=True):
        for node in nodes:
            tree.insert(node, next(values))
    return tree.root()


def _over_copies(
    copies: Group,
    values: Tensor,
    nodes: Sequence[Sequence[Node]],
    num_samples: int,
    cp: int,
    widths: Sequence[int] | None = None,
) -> CarryTree[Tensor]:
    """The batch's tree over all copies, for this copy's even part of `values` [nodes, n], which ranks with equal parts
    have; where these are several vectors of `widths` one after the other, for its part of each."""
    num_copies, (copy, part) = len(nodes), divmod(copies.rank, cp)
    tree: CarryTree[Tensor] = CarryTree(num_samples, add_in_place)
    if num_copies == 1:
        arrived = [values]
    else:
        vectors = values.split([values.shape[1]] if widths is None else list(widths), 1)
        parts = [
            torch.cat([each[:, slice(*cut(each.shape[1], num_copies, index))] for each in vectors], 1)
            for index in range(num_copies)
        ]
        own = parts[copy].shape[1]
        everyone = [(index, member) for index in range(num_copies) for member in range(cp)]
        outgoing = [parts[index] if member == part else values[:0, :0] for index, member in everyone]
        shapes = [(len(nodes[index]), own) if member == part else (0, 0) for index, member in everyone]
        arrived = copies.all_to_all(outgoing, shapes)[part::cp]
    for theirs, rows in zip(nodes, arrived, strict=True):
        for node, row in zip(theirs, rows, strict=True):
            tree.insert(node, row)
    return tree


def _unflattened(
    parts: Sequence[Tensor], widths: Sequence[int], tables: Sequence[Mapping[str, torch.Size]]
) -> dict[str, Tensor]:
    """Gradients by key from every context-parallel rank's part, which has a piece of each of the flat vectors."""
    found: dict[str, Tensor] = {}
    starts = [0] * len(parts)
    for width, shapes in zip(widths, tables, strict=True):
        pieces = []
        for member, part in enumerate(parts):
            lo, hi = cut(width, len(parts), member)
            pieces.append(part[starts[member] : starts[member] + hi - lo])
            starts[member] += hi - lo
        values = torch.cat(pieces).split([shape.numel() for shape in shapes.values()])
        found |= {key: value.view(shape) for (key, shape), value in zip(shapes.items(), values, strict=True)}
    return found
