"""`ExpertNumerics`: the products of experts over rows that are copies of tokens, grouped by expert; exact and fast.

Shape suffixes: N copies of tokens on this rank, one after the other by local expert; E local experts; C this rank's
part of an expert's width, F a whole feature dimension. Weights are stored [E, C, F], the cut dimension before the
whole one, as in `base`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...core.base.reduction import NestedTree, cut
from ...core.program.expert_tokens import ExpertNodes, joined_nodes
from ..base.observe import SumObserver
from ..transport.base import Group
from .contributions import Accumulator, Contribution, ExpertContribution, Leaf
from .copies import Copies
from .observed import observed
from .owned_leaves import OwnedLeaves
from .products import Products
from .row_groups import ExpertRows
from .token_product import ExpertProduct
from .tree import add_in_place, fold


class ExpertNumerics(ABC):
    """The operations that experts need of `Numerics`."""

    observer: SumObserver | None

    @abstractmethod
    def project_experts(self, x_NF: Tensor, weight_ECF: Tensor, rows: ExpertRows, leaves: OwnedLeaves) -> Tensor:
        """x W^T with every row's expert, [n, c]."""

    @abstractmethod
    def contract_experts(self, x_NC: Tensor, weight_ECF: Tensor, rows: ExpertRows, leaves: OwnedLeaves) -> Tensor:
        """x W, a value for each node this rank has of the sum over the expert's width, [nodes, n, f];
        `sum_members_part` finishes it."""

    @abstractmethod
    def expert_weight_gradient(
        self, x_NC: Tensor, y_NF: Tensor, rows: ExpertRows, leaves: OwnedLeaves
    ) -> ExpertContribution:
        """Sums over every expert's rows of the outer products, [e, c, f]."""

    @abstractmethod
    def expert_row_sums(self, x_NF: Tensor, rows: ExpertRows) -> ExpertContribution:
        """Sums over every expert's rows, [e, f], for biases."""

    @abstractmethod
    def row_dots(self, x_NF: Tensor, y_NF: Tensor) -> Tensor:
        """The dot product of every row of x with that of y, fp32 [n]."""

    @abstractmethod
    def expert_accumulator(self, num_samples: int, num_blocks: int) -> Accumulator:
        """An empty gradient of experts over a global batch of `num_samples` sequences of `num_blocks` token blocks."""

    @abstractmethod
    def reduce_experts(
        self, gradients: Mapping[str, Accumulator], group: Group, nodes: Sequence[ExpertNodes]
    ) -> dict[str, Tensor]:
        """Finished sums over the global batch by name, the same on every member of a group of copies of the experts.

        `nodes[member]` is what a member holds (exact numerics). The accumulators are used up.
        """

    @abstractmethod
    def reduce_experts_part(
        self, gradients: Mapping[str, Accumulator], copies: Copies, nodes: Sequence[ExpertNodes]
    ) -> Tensor:
        """This member's even part of `reduce_experts` over `copies.whole`, of all elements one gradient after the
        other, cut over `copies.shard`: without hybrid sharding its first half."""


class ExactExpertNumerics(ExpertNumerics):
    """One product per (sample, token block, expert): how many rows it has follows from the routing, not from the
    layout."""

    products: Mapping[str, Products]

    def project_experts(self, x_NF: Tensor, weight_ECF: Tensor, rows: ExpertRows, leaves: OwnedLeaves) -> Tensor:
        return self.products["experts"].project_experts(x_NF, weight_ECF, rows, leaves)

    @observed
    def contract_experts(self, x_NC: Tensor, weight_ECF: Tensor, rows: ExpertRows, leaves: OwnedLeaves) -> Tensor:
        return self.products["experts"].contract_experts(x_NC, weight_ECF, rows, leaves)

    def expert_weight_gradient(
        self, x_NC: Tensor, y_NF: Tensor, rows: ExpertRows, leaves: OwnedLeaves
    ) -> Iterator[tuple[Leaf, Tensor]]:
        return self.products["experts"].expert_weight_gradient(x_NC, y_NF, rows, leaves)

    def expert_row_sums(self, x_NF: Tensor, rows: ExpertRows) -> Iterator[tuple[Leaf, Tensor]]:
        x = x_NF.float()
        for leaf, groups in zip(rows.leaves, rows.by_leaf, strict=True):
            total = x.new_zeros(rows.num_experts, x.shape[1])
            for group in filter(None, groups):
                total[group.expert] = fold(x[group.first : group.last], 0)
            yield leaf, total

    def row_dots(self, x_NF: Tensor, y_NF: Tensor) -> Tensor:
        """By elementwise additions, whose bits cannot depend on the number of rows."""
        return fold(x_NF.float() * y_NF, 1)

    def expert_accumulator(self, num_samples: int, num_blocks: int) -> Accumulator:
        return ExpertAccumulator(num_samples, num_blocks)

    def reduce_experts(
        self, gradients: Mapping[str, Accumulator], group: Group, nodes: Sequence[ExpertNodes]
    ) -> dict[str, Tensor]:
        trees = {name: each.tree for name, each in gradients.items() if isinstance(each, ExpertAccumulator)}
        if group.size == 1 or not trees:
            return {name: tree.root() for name, tree in trees.items()}
        shapes = [_held(tree, nodes[group.rank])[0].shape for tree in trees.values()]
        flat = _flat(trees.values(), nodes[group.rank])
        whole = _whole(_joined(flat, group, nodes, trees), group, flat.shape[1])
        parts = whole.split([shape.numel() for shape in shapes])
        return {name: part.view(shape) for name, part, shape in zip(trees, parts, shapes, strict=True)}

    def reduce_experts_part(
        self, gradients: Mapping[str, Accumulator], copies: Copies, nodes: Sequence[ExpertNodes]
    ) -> Tensor:
        trees = {name: each.tree for name, each in gradients.items() if isinstance(each, ExpertAccumulator)}
        shard, own = copies.shard, copies.whole.rank - copies.shard.rank
        tree = _joined(_flat(trees.values(), nodes[copies.whole.rank]), shard, nodes[own : own + shard.size], trees)
        if copies.replicate is None:
            return tree.root()
        some, size = next(iter(trees.values())), shard.size
        gathered = [
            joined_nodes(some.samples.num_leaves, some.num_blocks, nodes[first : first + size])
            for first in range(0, len(nodes), size)
        ]
        flat = _flat([tree], gathered[copies.replicate.rank])
        return _whole(_joined(flat, copies.replicate, gathered, trees), copies.replicate, flat.shape[1])


class FastExpertNumerics(ExpertNumerics):
    """One product per expert, or one of all in the library's own kernel where there is one."""

    def project_experts(self, x_NF: Tensor, weight_ECF: Tensor, rows: ExpertRows, leaves: OwnedLeaves) -> Tensor:
        y_NC = x_NF.new_empty(len(x_NF), weight_ECF.shape[1])
        for group in rows.groups:
            torch.mm(x_NF[group.first : group.last], weight_ECF[group.expert].t(), out=y_NC[group.first : group.last])
        return y_NC

    def contract_experts(self, x_NC: Tensor, weight_ECF: Tensor, rows: ExpertRows, leaves: OwnedLeaves) -> Tensor:
        y_NF = x_NC.new_empty(len(x_NC), weight_ECF.shape[2])
        for group in rows.groups:
            torch.mm(x_NC[group.first : group.last], weight_ECF[group.expert], out=y_NF[group.first : group.last])
        return y_NF.unsqueeze(0)

    def expert_weight_gradient(
        self, x_NC: Tensor, y_NF: Tensor, rows: ExpertRows, leaves: OwnedLeaves
    ) -> ExpertContribution:
        spans = [(group.expert, group.first, group.last) for group in rows.groups]
        return ExpertProduct(x_NC, y_NF, spans, rows.num_experts)

    def expert_row_sums(self, x_NF: Tensor, rows: ExpertRows) -> ExpertContribution:
        total = torch.zeros(rows.num_experts, x_NF.shape[1], device=x_NF.device)
        for group in rows.groups:
            total[group.expert] = x_NF[group.first : group.last].sum(0, dtype=torch.float32)
        return total

    def row_dots(self, x_NF: Tensor, y_NF: Tensor) -> Tensor:
        return (x_NF.float() * y_NF).sum(1)


class ExpertAccumulator:
    """The gradient of the local experts as a carry tree over samples, of trees over their token blocks."""

    def __init__(self, num_samples: int, num_blocks: int):
        self.tree: NestedTree[Tensor] = NestedTree(num_samples, num_blocks, add_in_place)

    def add(self, first_sample: int, contribution: Contribution) -> None:
        """Each leaf by its own place: experts see samples of several data-parallel ranks. Leaves are made one by
        one as they are added."""
        assert isinstance(contribution, Iterator), "exact numerics give the leaves of experts one by one"
        for (sample, block), value in contribution:
            self.tree.insert(sample, (block, block + 1), value)

    @property
    def held(self) -> list[Tensor]:
        """A few partial sums for each data-parallel rank whose samples come here, and what waits for other
        copies of the experts."""
        samples = self.tree.samples
        return [*(samples.value(node) for node in samples.nodes), *(self.tree.part(*part) for part in self.tree.parts)]


def _held(tree: NestedTree[Tensor], nodes: ExpertNodes) -> list[Tensor]:
    """The values of the nodes that this member has."""
    return [tree.samples.value(node) for node in nodes.whole] + [tree.part(*part) for part in nodes.parts]


def _flat(trees: Iterable[NestedTree[Tensor]], nodes: ExpertNodes) -> Tensor:
    """The values of a member's nodes, of all gradients side by side: [nodes, n]."""
    held = [_held(tree, nodes) for tree in trees]
    return torch.stack([torch.cat([value.reshape(-1) for value in values]) for values in zip(*held, strict=True)])


def _joined(
    flat: Tensor, group: Group, nodes: Sequence[ExpertNodes], trees: Mapping[str, NestedTree[Tensor]]
) -> NestedTree[Tensor]:
    """What all members have of this one's even part of the elements, added up; `flat` is what this one has of all,
    `nodes` who has what."""
    some = next(iter(trees.values()))
    bounds = [cut(flat.shape[1], group.size, member) for member in range(group.size)]
    width = bounds[group.rank][1] - bounds[group.rank][0]
    arrived = group.all_to_all([flat[:, lo:hi] for lo, hi in bounds], [(len(theirs), width) for theirs in nodes])
    joined: NestedTree[Tensor] = NestedTree(some.samples.num_leaves, some.num_blocks, add_in_place)
    for theirs, values in zip(nodes, arrived, strict=True):
        for node, value in zip(theirs.whole, values[: len(theirs.whole)], strict=True):
            joined.samples.insert(node, value)
        for (sample, node), value in zip(theirs.parts, values[len(theirs.whole) :], strict=True):
            joined.insert(sample, node, value)
    return joined


def _whole(tree: NestedTree[Tensor], group: Group, elements: int) -> Tensor:
    """The finished sums of all members' parts."""
    bounds = [cut(elements, group.size, member) for member in range(group.size)]
    return torch.cat(group.all_gather(tree.root(), [(hi - lo,) for lo, hi in bounds]))
