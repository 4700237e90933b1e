"""The layers of a stage run on expressions: each tensor-parallel rank does what `core.program` lists, and every result
is compared with one device.

A layer is judged on its own: after a difference is noted, the right value takes its place, so each finding is a cause
and none a consequence. Blocks (embedding, transformer layer, head) take and give hidden states that are complete, so a
stage of right blocks is right, for every microbatch, since its samples are symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Literal

from ...core.base.reduction import cut, maximal_nodes
from ...core.layout.leaves import Leaves
from ...core.layout.stage_parameters import Usage
from ...core.model.parameters import TOKEN_TABLE, Parameter
from ...core.plan.plan import Plan
from ...core.program import (
    Collective,
    Message,
    Op,
    Operation,
    Operations,
    Product,
    copies_do_the_same,
    operations,
    own_token_parameters,
    stage_ops,
)
from ...core.schedule.action import Kind
from .expressions import MODULUS, Expression, apply, digest, exactly_summed, interval, summed, symbol, tree
from .tensors import MisfitError, Part, collective, on_another_copy, over_context, over_heads

Phase = Literal["forward", "recomputation", "input gradient", "weight gradient"]


@dataclass(frozen=True)
class Program:
    """What ranks do: `core.program`, or in tests something else.

    `works` are a stage's layers on a tensor-parallel rank, the same for every microbatch and on every
    data-parallel rank; `actions` the operations of REDUCE_GRAD and STEP; `own_tokens` the parameters that the
    tensor-parallel sum of REDUCE_GRAD is for.
    """

    works: Callable[[Plan, int, int], Sequence[Op]] = stage_ops
    actions: Callable[..., Operations] = operations
    own_tokens: Callable[[Plan, int], Sequence[Parameter]] = own_token_parameters

    def of_copies(
        self, plan: Plan, kind: Kind, stage: int, tp_rank: int, replica: int = 0
    ) -> list[tuple[int, Operations]]:
        """What the data-parallel ranks of a stage do in an action, without repeating: (the first rank that
        does it, its operations)."""
        same_on_copies = self.actions is operations and copies_do_the_same(
            plan, kind, plan.placement.ranks[stage][replica]
        )
        found: dict[int, tuple[int, Operations]] = {}
        for dp_rank in range(1 if same_on_copies else plan.layout.dp):
            own = self.actions(plan, kind, stage, tp_rank, dp_rank, replica=replica)
            found.setdefault(id(own), (dp_rank, own))
        return list(found.values())


@dataclass(frozen=True)
class Difference:
    """One place where ranks and one device part: in what is computed (`value`) or only in which order
    sums are made (`order`)."""

    phase: Phase
    layer: str
    kind: Literal["value", "order"]
    tp_rank: int
    what: str


@dataclass
class Ranks:
    """The tensor-parallel ranks of one block in lock-step.

    `reference` holds one device's values by (phase, layer); while it is None this is the one
    device, and fills `values`.
    """

    plan: Plan
    reference: dict[tuple[Phase, str], Expression] | None = None
    values: dict[tuple[Phase, str], Expression] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    _note: str = ""

    @property
    def tp(self) -> int:
        """Number of ranks."""
        return self.plan.layout.tp

    @property
    def exact(self) -> bool:
        """True when sums are canonical trees."""
        return self.plan.numerics.mode == "exact"

    @property
    def sequence(self) -> int:
        """Tokens of a sample that a context-parallel rank has. All have equally many, and do the same with theirs: what
        runs here is the first of them, whose tokens count from 0; what it gets of others counts on."""
        return self.plan.batch.sequence // self.plan.layout.cp

    @property
    def queries(self) -> int:
        """Tokens of a sample that a rank attends from: those of all its neighbours of `layout.cp_inner`."""
        return self.sequence * self.plan.layout.cp_inner

    @property
    def keys(self) -> int:
        """Tokens of a whole sample, which a query may see."""
        return self.plan.batch.sequence

    def own_tokens(self, tp_rank: int) -> tuple[int, int]:
        """The tokens whose hidden states a rank holds between blocks."""
        return self.plan.tokens_of(tp_rank)

    def token_cut(self, num_ranks: int) -> list[tuple[int, int]]:
        """The tokens of every member of a group; one that is not over tensor parallelism would cut them evenly."""
        if num_ranks == self.tp and self.plan.layout.sequence_parallel:
            return [self.own_tokens(tp_rank) for tp_rank in range(num_ranks)]
        return [cut(self.sequence, num_ranks, member) for member in range(num_ranks)]

    def hidden(self, value: Expression) -> list[Part]:
        """A complete hidden state."""
        return [Part(value, self.own_tokens(tp_rank)) for tp_rank in range(self.tp)]

    def leaves(self, parameter: Parameter) -> Leaves:
        """The leaves of the dimension that is cut."""
        assert parameter.cut is not None
        return self.plan.leaf_sizes.feature(parameter.cut[1])

    def own_leaves(self, parameter: Parameter, tp_rank: int) -> tuple[str, int, int]:
        """The leaves of a cut dimension that a rank holds."""
        assert parameter.cut is not None
        degree = self.plan.layout.expert_tp if parameter.expert else self.tp
        return (parameter.cut[1], *self.leaves(parameter).owned(degree, tp_rank % degree))

    def note(self, what: str) -> None:
        """Says why the next result is wrong; the first reason counts."""
        self._note = self._note or what

    def in_order_of(self, value: Expression, *shape: int) -> Expression:
        """Fast numerics: the library's order of additions is that of a shape."""
        return value if self.exact else replace(value, ordered=digest(value.ordered, *shape))

    def each(self, function: Callable[[int, Part], Part], parts: Sequence[Part]) -> list[Part]:
        """A function of every rank's part; a part that does not fit is noted and becomes a symbol of its own."""
        results = []
        for tp_rank, part in enumerate(parts):
            try:
                results.append(function(tp_rank, part))
            except MisfitError as error:
                self._note = self._note or str(error)
                results.append(replace(part, value=symbol("misfit", tp_rank), leaves=None, nodes=()))
        return results

    def walk(
        self,
        operations: Sequence[Operations],
        parts: list[Part],
        products: Sequence[Callable[[int, Part, Product], Part]],
    ) -> tuple[list[Part], list[Part]]:
        """The ranks' operations one after the other; returns (parts before the last product, parts at the end).

        `products` are what a layer's products compute, in order.
        """
        before, done = parts, 0
        there = min(sum(isinstance(operation, Product) for operation in own) for own in operations)
        if there < len(products):
            self._note = self._note or (
                f"the layer has {_count(len(products), 'product')}, and the program lists {there}"
            )
        for row in zip_longest(*operations):
            kinds = {_kind_of(operation) for operation in row}
            if len(kinds) > 1 or isinstance(row[0], Message):
                texts = [_operation_text(operation) for operation in row]
                other = next(rank for rank, text in enumerate(texts) if text != texts[0])
                parts = self._spoiled(parts, f"tp rank 0 {texts[0]} where tp rank {other} {texts[other]}")
            elif isinstance(row[0], Collective):
                parts = self._communicate(row[0], parts)
            elif done == len(products):
                parts = self._spoiled(parts, "there is a product more than the layer has")
            else:
                before, parts, done = parts, self._multiplied(products[done], row, parts), done + 1
        if done < len(products):
            parts = self._spoiled(parts, f"only {_count(done, 'product')} of {len(products)} are computed")
        return before, parts

    def _multiplied(
        self, compute: Callable[[int, Part, Product], Part], row: Sequence[Any], parts: list[Part]
    ) -> list[Part]:
        def one(tp_rank: int, part: Part) -> Part:
            return compute(tp_rank, part, row[tp_rank])

        return self.each(one, parts)

    def _communicate(self, operation: Collective, parts: list[Part]) -> list[Part]:
        axis, layout = operation.axis, self.plan.layout
        size = layout.tp * layout.pp if axis == "model" else getattr(layout, axis, operation.group_size)
        if operation.group_size != size:
            self._note = self._note or f"{operation.op} over {axis} names {operation.group_size} ranks of {size}"
        by_tokens = layout.sequence_parallel
        if axis == "cp_inner":
            return self.each(lambda _, part: over_heads(operation.op, part, self.sequence, layout.cp_inner), parts)
        if axis in ("cp", "cp_outer"):
            own = self.queries if axis == "cp_outer" else self.sequence
            return self.each(lambda _, part: over_context(operation.op, part, own, size), parts)
        try:
            if axis == "tp":
                return collective(operation.op, parts, self.token_cut(len(parts)), by_tokens=by_tokens)
            groups = [[part, *(on_another_copy(part, axis, index) for index in range(1, size))] for part in parts]
            cuts = self.token_cut(size)
            return [
                collective(operation.op, group, cuts, by_tokens=by_tokens)[0] for group in groups if len(group) > 1
            ] or parts
        except MisfitError as error:
            return self._spoiled(parts, str(error))

    def _spoiled(self, parts: Sequence[Part], note: str) -> list[Part]:
        self._note = self._note or note
        return [
            Part(symbol("spoiled", tp_rank, note), part.tokens, part.features) for tp_rank, part in enumerate(parts)
        ]

    def settle(self, phase: Phase, layer: str, parts: Sequence[Part], wanted: Sequence[Part]) -> list[Part]:
        """Compares what the ranks hold after a layer with one device, and goes on with what they should hold.

        `wanted` gives the extents; its values are not read.
        """
        note, self._note = self._note, ""
        key = (phase, layer)
        if self.reference is None:
            self.values[key] = parts[0].value
            return list(parts)
        right = self.reference[key]
        self._compare(
            key,
            [(part.value, right, _unfit(part, want)) for part, want in zip(parts, wanted, strict=True)],
            parts,
            note,
        )
        return [replace(want, value=right) for want in wanted]

    def settle_gradient(self, usage: Usage, parts: Sequence[Part]) -> list[Part]:
        """The same for a weight gradient, which may cover a rank's own tokens only; `parts` hold the
        whole sum's term as value."""
        note, self._note = self._note, ""
        key: tuple[Phase, str] = ("weight gradient", usage.key)
        if self.reference is None:
            self.values[key] = parts[0].value
            return list(parts)
        right = self.reference[key]
        triples = []
        for tp_rank, part in enumerate(parts):
            own = None if usage.parameter.cut is None else self.own_leaves(usage.parameter, tp_rank)
            unfit = "" if part.features == own else f"it holds {part.features} of the cut dimension instead of {own}"
            triples.append((interval(part.value, *part.tokens), interval(right, *part.tokens), unfit))
        self._compare(key, triples, parts, note)
        return [replace(part, value=right) for part in parts]

    def _compare(
        self,
        key: tuple[Phase, str],
        triples: Sequence[tuple[Expression, Expression, str]],
        parts: Sequence[Part],
        note: str,
    ) -> None:
        wrong = [
            rank for rank, (value, right, unfit) in enumerate(triples) if value.unordered != right.unordered or unfit
        ]
        if wrong:
            rank = wrong[0]
            value, right, unfit = triples[rank]
            what = note or _how(value, right, parts[rank]) or unfit or "it is another expression than on one device"
            self.differences.append(Difference(*key, "value", rank, what))
        elif reordered := [rank for rank, (value, right, _) in enumerate(triples) if value.ordered != right.ordered]:
            self.differences.append(
                Difference(*key, "order", reordered[0], ("the same sum in another order than on one device"))
            )


def _unfit(part: Part, want: Part) -> str:
    if part.extents == want.extents:
        return ""
    lo, hi = part.tokens
    held = (
        "only a part of the elements"
        if part.elements is not None
        else (f"tokens [{lo}, {hi}) of {part.features or 'all features'}")
    )
    return (
        f"it holds {held} where tokens [{want.tokens[0]}, {want.tokens[1]}) of {want.features or 'all features'} "
        "are needed"
    )


def _how(value: Expression, right: Expression, part: Part) -> str:
    if part.leaves is not None and value != right:
        lo, hi, num_leaves = part.leaves
        return f"it is the sum over leaves [{lo}, {hi}) of {num_leaves} only: nothing has added the other ranks' parts"
    for times in range(2, 65):
        if value.unordered == times * right.unordered % MODULUS:
            return f"it is {times} times the value on one device"
    return ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _kind_of(operation: Operation | None) -> tuple[object, ...]:
    return (operation.op, operation.axis) if isinstance(operation, Collective) else (type(operation),)


def _operation_text(operation: Operation | None) -> str:
    match operation:
        case None:
            return "does nothing"
        case Collective(op=op, axis=axis):
            return f"calls {op} over {axis}"
        case _:
            return f"computes a {type(operation).__name__.lower()}"


def check_shape(product: Product, m: int, n: int, k: int, count: int = 1) -> None:
    """Raises `MisfitError` when a product's sizes are not those of the parts at hand."""
    if (product.m, product.n, product.k, product.count) != (m, n, k, count):
        raise MisfitError(
            f"the product {product.count} x [{product.m}, {product.k}] x [{product.k}, {product.n}] does not fit the "
            "tensors held, "
            f"{count} x [{m}, {k}] x [{k}, {n}]"
        )


class Linear:
    """A linear layer cut by its output (column) or input (row) features, as `core.model.parameters` says;
    `weight` is its parameter.

    `project` goes from whole features to cut ones, `contract` back, which sums over the cut ones
    (`backend.numerics.base`).
    """

    def __init__(self, ranks: Ranks, name: str, usage: Usage, bias: Usage | None):
        self.ranks, self.name, self.usage, self.bias = ranks, name, usage, bias
        self.weight = usage.parameter
        assert self.weight.cut is not None
        self.column = self.weight.cut[0] == 0
        self.whole_size = self.weight.shape[1 - self.weight.cut[0]]

    def forward(self, operations: Sequence[Operations], x: list[Part], phase: Phase = "forward") -> list[Part]:
        """The layer's output, and its bias where it has one."""
        _, y = self.ranks.walk(operations, x, [self._project if self.column else self._contract])
        y = self.ranks.settle(phase, self.name, y, self.cut_parts() if self.column else self._whole_parts())
        return (
            y
            if self.bias is None
            else [replace(part, value=apply("bias", part.value, self.bias.parameter.name)) for part in y]
        )

    def backward(
        self, operations: Sequence[Operations], weight_operations: Sequence[Operations], dy: list[Part], x: list[Part]
    ) -> tuple[list[Part], dict[str, list[Part]]]:
        """(gradient of the input, gradients of weight and bias by `Usage.key`)."""
        arrived = dy
        dy, dx = self.ranks.walk(operations, dy, [self._contract if self.column else self._project])
        dx = self.ranks.settle(
            "input gradient", self.name, dx, self._whole_parts() if self.column else self.cut_parts()
        )

        def outer(tp_rank: int, x_part: Part, product: Product) -> Part:
            return self._outer(tp_rank, x_part, dy[tp_rank], product)

        _, gradient = self.ranks.walk(weight_operations, x, [outer])
        gradients = {self.usage.key: self.ranks.settle_gradient(self.usage, gradient)}
        if self.bias is not None:
            gradients[self.bias.key] = vector_gradient(self.ranks, self.bias, arrived, arrived)
        return dx, gradients

    def cut_parts(self) -> list[Part]:
        """The extents of the cut side."""
        whole = (0, self.ranks.sequence)
        return [Part(_NOTHING, whole, self.ranks.own_leaves(self.weight, tp_rank)) for tp_rank in range(self.ranks.tp)]

    def _whole_parts(self) -> list[Part]:
        return self.ranks.hidden(_NOTHING)

    def _cut_size(self, tp_rank: int) -> int:
        lo, hi = self.ranks.leaves(self.weight).owned_items(self.ranks.tp, tp_rank)
        return (hi - lo) * self.weight.unit

    def _tokens(self, part: Part) -> int:
        if part.elements is not None or part.leaves is not None:
            raise MisfitError("the product is given an unfinished sum")
        return (part.tokens[1] - part.tokens[0]) * self.ranks.plan.batch.micro_size

    def _project(self, tp_rank: int, x: Part, product: Product) -> Part:
        shape = self._tokens(x), self._cut_size(tp_rank), self.whole_size
        check_shape(product, *shape)
        if x.features is not None:
            raise MisfitError("a product over whole features is given cut ones")
        value = self.ranks.in_order_of(apply("linear", x.value, self.weight.name), *shape)
        return replace(x, value=value, features=self.ranks.own_leaves(self.weight, tp_rank))

    def _contract(self, tp_rank: int, x: Part, product: Product) -> Part:
        shape = self._tokens(x), self.whole_size, self._cut_size(tp_rank)
        check_shape(product, *shape)
        own = self.ranks.own_leaves(self.weight, tp_rank)
        if x.features != own:
            raise MisfitError(f"a sum over leaves {own} is given {x.features or 'whole features'}")
        terms = {leaf: apply("term", x.value, self.weight.name, leaf) for leaf in range(*own[1:])}
        return summed_leaves(self.ranks, x.tokens, terms, self.ranks.leaves(self.weight).num_leaves, shape)

    def _outer(self, tp_rank: int, x: Part, dy: Part, product: Product) -> Part:
        if x.tokens != dy.tokens or dy.leaves is not None or x.leaves is not None:
            raise MisfitError(
                f"a weight gradient is given tokens {x.tokens} of the input and {dy.tokens} of the output's gradient"
            )
        shape = self._cut_size(tp_rank), self.whole_size, self._tokens(x)
        check_shape(product, *shape)
        value = self.ranks.in_order_of(apply("outer", x.value, dy.value, self.usage.key), *shape)
        return Part(value, x.tokens, dy.features if self.column else x.features)


_NOTHING = symbol("nothing")


def summed_leaves(
    ranks: Ranks, tokens: tuple[int, int], terms: dict[int, Expression], num_leaves: int, shape: tuple[int, ...]
) -> Part:
    """A rank's sum over its own leaves, kept as tree nodes by exact numerics."""
    lo, hi = min(terms), max(terms) + 1
    unfinished = None if hi - lo == num_leaves else (lo, hi, num_leaves)
    if not ranks.exact:
        return Part(ranks.in_order_of(summed("library", terms.values()), *shape), tokens, leaves=unfinished)
    own = {(leaf, leaf + 1): term for leaf, term in terms.items()}
    nodes = tuple((node, _node_value(node, own)) for node in maximal_nodes(num_leaves, lo, hi))
    value = nodes[0][1] if len(nodes) == 1 else summed("unfinished", (each for _, each in nodes))
    return Part(value, tokens, leaves=unfinished, nodes=nodes if unfinished else ())


def _node_value(node: tuple[int, int], own: dict[tuple[int, int], Expression]) -> Expression:
    """A node of the canonical tree; the tree over a node's own length splits as the whole tree does below it."""
    first, last = node
    value = tree(
        last - first, {(lo - first, hi - first): term for (lo, hi), term in own.items() if first <= lo and hi <= last}
    )
    assert value is not None
    return value


def vector_gradient(ranks: Ranks, usage: Usage, dy: list[Part], x: list[Part]) -> list[Part]:
    """The gradient of a bias or a norm's weights: a sum over the tokens that a rank holds."""

    def gradient(_: int, part: Part, other: Part) -> Part:
        if part.elements is not None or part.tokens != other.tokens:
            raise MisfitError("a sum over tokens is given parts that do not match")
        value = ranks.in_order_of(
            apply("token sums", part.value, other.value, usage.key), part.tokens[1] - part.tokens[0]
        )
        return Part(value, part.tokens, part.features)

    return ranks.settle_gradient(usage, ranks.each(lambda tp_rank, part: gradient(tp_rank, part, x[tp_rank]), dy))


def lookup_part(ranks: Ranks, tp_rank: int) -> Part:
    """The embedding rows of all tokens that a rank has, and zeros for the others: their sum over ranks cannot round."""
    leaves = ranks.plan.leaf_sizes.vocab
    lo, hi = leaves.owned(ranks.tp, tp_rank)
    value = exactly_summed(apply("lookup", symbol("tokens"), TOKEN_TABLE, leaf) for leaf in range(lo, hi))
    unfinished = None if ranks.tp == 1 else (lo, hi, leaves.num_leaves)
    return Part(value, (0, ranks.sequence), leaves=unfinished, exactly=True)


def named(prefix: str, works: Sequence[Sequence], what: str) -> Callable[[str], list[Operations]]:
    """Every rank's operations of a layer in one phase, by the layer's name behind `prefix`."""
    tables: list[dict[str, Operations]] = []
    for rank_works in works:
        table: dict[str, Operations] = {}
        for work in rank_works:
            name = work.layer.removeprefix(prefix)
            table[name] = table.get(name, ()) + getattr(work, what)
        tables.append(table)
    return lambda name: [table.get(name, ()) for table in tables]
