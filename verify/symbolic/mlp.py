"""The MLP half of a transformer layer on expressions: dense, or a router with experts and shared
experts; see `symbolic_layers`.

Where a token goes is one symbol, the routing, that its scores decide. What is proved is that copies reach their experts
and come back: that every expert gets the copies of all tokens that the ranks of its copy hold, and every token the
finished sums over an expert's width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from ...core.model.parameters import Parameter
from ...core.program import Collective, Operation, Operations, Product
from ...core.program.expert_tokens import routed_tokens
from .expressions import Expression, apply, summed, symbol, tree
from .layers import Linear, Phase, Ranks, check_shape, summed_leaves, vector_gradient
from .parts import LayerHalf, OperationsOf, WholeLinear, mapped
from .tensors import MisfitError, Part, collective

_NOTHING = symbol("nothing")
_GATE = "mlp.shared.gate"


class DenseMlp(LayerHalf):
    """Up, activation, down, with layers named behind `name`; `module` is what selective recomputation calls it."""

    def __init__(
        self,
        ranks: Ranks,
        prefix: str,
        parameters: Mapping[str, Parameter],
        operations: OperationsOf,
        *,
        name: str = "mlp",
        module: str = "mlp",
    ):
        super().__init__(ranks, prefix, parameters, operations)
        self.name, self.module = name, module
        self.up, self.down = (Linear(ranks, f"{prefix}{each}", *self._usages(each)) for each in self.layers)
        self.saved: dict[str, list[Part]] = {}

    @property
    def layers(self) -> tuple[str, ...]:
        return f"{self.name}.up", f"{self.name}.down"

    def forward(self, x: list[Part], phase: Phase) -> list[Part]:
        up, down = self.layers
        self.saved = {"x": x, "up": self.up.forward(self._operations(up, phase), x, phase)}
        self.saved["activation"] = mapped("activation", self.saved["up"])
        return self.down.forward(self._operations(down, phase), self.saved["activation"], phase)

    def repeat(self, modules: Collection[str]) -> None:
        if self.module in modules:
            self.forward(self.saved["x"], "recomputation")

    def backward(self, dy: list[Part]) -> list[Part]:
        dup = mapped(
            "activation gradient", self._back(self.layers[1], self.down, dy, self.saved["activation"]), self.saved["up"]
        )
        return self._back(self.layers[0], self.up, dup, self.saved["x"])

    def _back(self, name: str, layer: Linear, dy: list[Part], x: list[Part]) -> list[Part]:
        dx, own = layer.backward(
            self.operations(name, "input_gradient"), self.operations(name, "weight_gradient"), dy, x
        )
        self.gradients.update(own)
        return dx


@dataclass(frozen=True)
class _Copies:
    """Copies of tokens, or what experts make of them, by the tensor-parallel rank that holds the tokens.

    `counted` are the axes over which counts have gone ahead, `spread` says that copies are with their experts' ranks,
    `gathered` that those of all members of `etp` are. While a sum over an expert's width waits for these, `members` are
    what each of them has, by rank.
    """

    parts: list[Part]
    counted: frozenset[str]
    spread: bool = False
    gathered: bool = False
    members: tuple[tuple[Part, ...], ...] = ()


class SparseMlp(LayerHalf):
    """A router, dispatch, the two products of the local experts, combine, and shared experts."""

    def __init__(self, ranks: Ranks, prefix: str, parameters: Mapping[str, Parameter], operations: OperationsOf):
        super().__init__(ranks, prefix, parameters, operations)
        self.layout, self.model = ranks.plan.layout, ranks.plan.model
        self.axes = {"ep": self.layout.ep, "etp": self.layout.expert_tp}
        self.routed = routed_tokens(ranks.plan)
        self.cuts = [self.routed.own(tp_rank) for tp_rank in range(ranks.tp)]
        self.router = WholeLinear(ranks, f"{prefix}mlp.router", *self._usages("mlp.router"))
        self.gate: WholeLinear | None = None
        if self.model.shared_expert_gate:
            self.gate = WholeLinear(ranks, f"{prefix}{_GATE}", *self._usages(_GATE))
        self.shared: DenseMlp | None = None
        if self.model.num_shared_experts:
            self.shared = DenseMlp(ranks, prefix, parameters, operations, name="mlp.shared", module="shared_experts")
        self.saved: dict[str, list[Part]] = {}

    @property
    def layers(self) -> tuple[str, ...]:
        own = ("router", "dispatch", "experts.up", "experts.down", "combine")
        gate = (_GATE,) if self.gate else ()
        return (*(f"mlp.{name}" for name in own), *(self.shared.layers if self.shared else ()), *gate)

    def forward(self, x: list[Part], phase: Phase) -> list[Part]:
        saved = self.saved = {"x": x, "routing": mapped("routing", self._scores(x, phase))}
        copies = self._own(mapped("copies", x, saved["routing"]))
        trivial = frozenset(axis for axis, size in self.axes.items() if size == 1)
        rows = self._exchange(self._operations("mlp.dispatch", phase), _Copies(copies, trivial))
        rows = self._settled(phase, "mlp.dispatch", rows, self._own(x))
        saved["rows"] = rows.parts
        saved["up"] = self._up(self._operations("mlp.experts.up", phase), rows, phase)
        saved["activation"] = mapped("activation", saved["up"])
        operations = self._operations("mlp.experts.down", phase)
        sums = self._contract(operations, "mlp.experts.down", replace(rows, parts=saved["activation"]))
        exchanges, gather = _apart(self._operations("mlp.combine", phase))
        rows = self._settled(phase, "mlp.combine", self._exchange(exchanges, sums), self._own(x), home=True)
        saved["results"] = self._biased(rows.parts, "mlp.experts.down")
        y = self._gathered(gather, mapped("combine", saved["results"], self._own(saved["routing"])))
        y = self.ranks.settle(phase, f"{self.prefix}mlp.combine tokens", y, x)
        return y if self.shared is None else mapped("residual", y, self._shared(x, phase))

    def _shared(self, x: list[Part], phase: Phase) -> list[Part]:
        """What the shared experts make, weighed by their gate."""
        assert self.shared is not None
        y = self.shared.forward(x, phase)
        if self.gate is None:
            return y
        self.saved["shared"], self.saved["gate"] = y, self.gate.forward(self._operations(_GATE, phase), x, phase)
        return mapped("gated", y, self.saved["gate"])

    def _shared_back(self, dy: list[Part]) -> Iterator[list[Part]]:
        """The gradients of what the shared experts take, and their gate."""
        assert self.shared is not None
        if self.gate is None:
            yield self.shared.backward(dy)
        else:
            yield self.shared.backward(mapped("gated", dy, self.saved["gate"]))
            operations = self.operations(_GATE, "input_gradient"), self.operations(_GATE, "weight_gradient")
            dgate = mapped("gate gradient", dy, self.saved["shared"], self.saved["gate"])
            dx, own = self.gate.backward(*operations, dgate, self.saved["x"])
            self.gradients.update(own)
            yield dx
        self.gradients.update(self.shared.gradients)

    def repeat(self, modules: Collection[str]) -> None:
        if "moe" in modules:
            self.forward(self.saved["x"], "recomputation")
        elif self.shared is not None:
            self.shared.repeat(modules)

    def backward(self, dy: list[Part]) -> list[Part]:
        saved, own_dy = self.saved, self._own(dy)
        phase: Phase = "input gradient"
        exchanges, gather = _apart(self.operations("mlp.combine", "input_gradient"))
        weights = self._gathered(gather, mapped("row dots", own_dy, saved["results"]))
        weights = self.ranks.settle(phase, f"{self.prefix}mlp.combine weights", weights, dy)
        counted = frozenset(self.axes)
        rows = self._exchange(exchanges, _Copies(mapped("weighted", own_dy, self._own(saved["routing"])), counted))
        rows = self._settled(phase, "mlp.combine", rows, own_dy)
        dactivation = self._project(self.operations("mlp.experts.down", "input_gradient"), "mlp.experts.down", rows)
        dactivation = self._settle_cut(phase, "mlp.experts.down", dactivation)
        self._weight_gradients("mlp.experts.down", dactivation, saved["activation"], rows.parts)
        dup = mapped("activation gradient", dactivation, saved["up"])
        self._weight_gradients("mlp.experts.up", dup, dup, saved["rows"])
        sums = self._contract(
            self.operations("mlp.experts.up", "input_gradient"), "mlp.experts.up", replace(rows, parts=dup)
        )
        exchanges, gather = _apart(self.operations("mlp.dispatch", "input_gradient"))
        rows = self._settled(phase, "mlp.dispatch", self._exchange(exchanges, sums), own_dy, home=True)
        dx = self._gathered(gather, mapped("sum of copies", rows.parts))
        dx = self.ranks.settle(phase, f"{self.prefix}mlp.dispatch tokens", dx, dy)
        operations = self.operations("mlp.router", "input_gradient"), self.operations("mlp.router", "weight_gradient")
        drouted, own = self.router.backward(
            *operations, mapped("routing gradient", weights, saved["routing"]), saved["x"]
        )
        self.gradients.update(own)
        uses = [drouted, dx]
        if self.shared is not None:
            uses += self._shared_back(dy)
        return mapped("uses", *uses)

    def _scores(self, x: list[Part], phase: Phase) -> list[Part]:
        """What the router says of a rank's tokens. Where it compares the tokens of a sequence, the ranks that
        hold others of that sequence then exchange theirs: those of tensor parallelism first, then those
        of context parallelism."""
        operations = [_until_product(own) for own in self._operations("mlp.router", phase)]
        scores = self.router.product([product for product, _ in operations], x, phase)
        axes = (self.ranks.tp > 1 and self.layout.sequence_parallel) + (self.layout.cp > 1)
        compared = bool(self.ranks.plan.train.router_aux_loss) + (self.model.expert_capacity_factor is not None)
        needed = axes * compared
        later = [rest for _, rest in operations]
        if any(len(own) != needed or not all(isinstance(each, Collective) for each in own) for own in later):
            what = f"{len(later[0])} operations follow the scores, and ranks exchange their tokens {needed} times"
            self.ranks.note(what)
            unknown = [replace(part, value=symbol("not exchanged", what)) for part in scores]
            return self.ranks.settle(phase, f"{self.prefix}mlp.router", unknown, x)
        for first in range(0, needed, max(1, axes)):
            _, whole = self.ranks.walk([own[first : first + axes] for own in later], scores, [])
            wanted = [Part(_NOTHING, (0, self.ranks.keys)) for _ in scores]
            self.ranks.settle(phase, f"{self.prefix}mlp.router", whole, wanted)
        return self.router.biased(scores)

    def _own(self, x: list[Part]) -> list[Part]:
        """Of hidden states the tokens that a rank sends."""
        return [replace(part, tokens=cut) for part, cut in zip(x, self.cuts, strict=True)]

    # Copies on their way

    def _exchange(self, operations: Sequence[Operations], rows: _Copies) -> _Copies:
        """The collectives of copies over `ep` and `etp`, one after the other."""
        for row in zip_longest(*operations):
            try:
                rows = self._moved(row, rows)
            except MisfitError as error:
                self.ranks.note(str(error))
                spoiled = [
                    replace(part, value=symbol("spoiled", str(error)), leaves=None, nodes=()) for part in rows.parts
                ]
                rows = replace(rows, parts=spoiled, members=())
        return rows

    def _moved(self, row: Sequence[Operation | None], rows: _Copies) -> _Copies:
        kinds = {(each.op, each.axis, each.group_size) if isinstance(each, Collective) else None for each in row}
        kind = kinds.pop()
        if kinds or kind is None:
            raise MisfitError("the ranks do not all call the same collective")
        op, axis, size = kind
        if self.axes.get(axis) != size:
            raise MisfitError(f"{op} over {axis} names {size} ranks of {self.axes.get(axis, 'none')}")
        if axis not in rows.counted:
            return replace(rows, counted=rows.counted | {axis})
        if axis == "ep":
            if op != "all_to_all" or rows.members or (rows.gathered and self.axes["etp"] > 1):
                raise MisfitError(f"{op} over ep is given rows that the members of etp have brought together")
            return replace(rows, spread=not rows.spread)
        if op == "all_gather":
            if rows.gathered or rows.members:
                raise MisfitError("all_gather over etp is given rows that are together already")
            return replace(rows, gathered=True)
        if not rows.members:
            raise MisfitError(f"{op} over etp is given rows that are no partial sums")
        finished = [
            replace(members[0], value=_finished(op, members), leaves=None, nodes=()) for members in rows.members
        ]
        return replace(rows, parts=finished, gathered=False, members=())

    def _settled(self, phase: Phase, layer: str, rows: _Copies, wanted: list[Part], *, home: bool = False) -> _Copies:
        """The rows where they are needed, with their experts or at home."""
        apart = [
            axis
            for axis, there in (("ep", rows.spread), ("etp", rows.gathered))
            if self.axes[axis] > 1 and there == home
        ]
        if rows.members and self.axes["etp"] > 1:
            self.ranks.note("the sum over an expert's width is not finished")
        elif apart:
            where = "still with the experts' ranks" if home else "not with all ranks of their experts"
            self.ranks.note(f"copies are {where}: nothing has moved them over {' and '.join(apart)}")
            rows = replace(rows, parts=[replace(part, value=symbol("elsewhere", layer, *apart)) for part in rows.parts])
        parts = self.ranks.settle(phase, f"{self.prefix}{layer}", rows.parts, wanted)
        return replace(rows, parts=parts, spread=not home, gathered=not home, members=())

    def _gathered(self, operations: Sequence[Operations], parts: list[Part]) -> list[Part]:
        """Tokens of all tensor-parallel ranks, where each has sent an even part of what all hold."""
        for row in zip_longest(*operations):
            first = row[0]
            assert isinstance(first, Collective), "these are the collectives over tp"
            try:
                parts = collective(first.op, parts, self.cuts, by_tokens=True)
            except MisfitError as error:
                self.ranks.note(str(error))
                parts = [replace(part, value=symbol("spoiled", str(error))) for part in parts]
        return parts

    # Products

    def _up(self, operations: Sequence[Operations], rows: _Copies, phase: Phase) -> list[Part]:
        up = self._settle_cut(phase, "mlp.experts.up", self._project(operations, "mlp.experts.up", rows))
        return self._biased(up, "mlp.experts.up")

    def _project(self, operations: Sequence[Operations], name: str, rows: _Copies) -> list[Part]:
        """Whole features of copies to this rank's leaves of their experts' width."""
        weight = self.parameters[f"{name}.weight"]

        def compute(tp_rank: int, part: Part, product: Product) -> Part:
            shape = self._mean_rows, self._cut_size(weight, tp_rank), self.model.hidden_size
            check_shape(product, *shape, self._count)
            value = self.ranks.in_order_of(apply("expert linear", part.value, weight.name), *shape)
            return replace(part, value=value, features=self.ranks.own_leaves(weight, tp_rank))

        return self.ranks.walk(operations, rows.parts, [compute])[1]

    def _contract(self, operations: Sequence[Operations], name: str, rows: _Copies) -> _Copies:
        """The other way: what every member of `etp` brings to the sum over their experts' width."""
        weight, etp = self.parameters[f"{name}.weight"], self.axes["etp"]
        leaves = self.ranks.leaves(weight)

        def compute(tp_rank: int, part: Part, product: Product) -> Part:
            shape = self._mean_rows, self.model.hidden_size, self._cut_size(weight, tp_rank)
            check_shape(product, *shape, self._count)
            return replace(part, features=None)

        _, parts = self.ranks.walk(operations, rows.parts, [compute])
        members = []
        for part in parts:
            own = []
            for member in range(etp):
                lo, hi = leaves.owned(etp, member)
                terms = {leaf: apply("expert term", part.value, weight.name, leaf) for leaf in range(lo, hi)}
                own.append(summed_leaves(self.ranks, part.tokens, terms, leaves.num_leaves, (self._mean_rows, hi - lo)))
            members.append(tuple(own))
        mine = [own[tp_rank % etp] for tp_rank, own in enumerate(members)]
        return replace(rows, parts=mine, members=tuple(members) if etp > 1 else ())

    def _weight_gradients(self, name: str, cut: list[Part], cut_input: list[Part], whole: list[Part]) -> None:
        """Of the copies of a rank's own tokens: REDUCE_GRAD counts the tokens of all ranks whose
        copies meet at an expert."""
        weight, bias = self._usages(name)

        def outer(tp_rank: int, part: Part, product: Product) -> Part:
            shape = self._cut_size(weight.parameter, tp_rank), self.model.hidden_size, self._mean_rows
            check_shape(product, *shape, self._count)
            value = self.ranks.in_order_of(apply("outer", part.value, whole[tp_rank].value, weight.key), *shape)
            return Part(value, part.tokens, self.ranks.own_leaves(weight.parameter, tp_rank))

        _, gradient = self.ranks.walk(self.operations(name, "weight_gradient"), cut_input, [outer])
        self.gradients[weight.key] = self.ranks.settle_gradient(weight, gradient)
        if bias is not None:
            summed_over = cut if bias.parameter.cut is not None else whole
            self.gradients[bias.key] = vector_gradient(self.ranks, bias, summed_over, summed_over)

    def _biased(self, y: list[Part], name: str) -> list[Part]:
        _, bias = self._usages(name)
        return (
            y if bias is None else [replace(part, value=apply("bias", part.value, bias.parameter.name)) for part in y]
        )

    def _settle_cut(self, phase: Phase, name: str, parts: list[Part]) -> list[Part]:
        weight = self.parameters[f"{name}.weight"]
        wanted = [Part(_NOTHING, cut, self.ranks.own_leaves(weight, tp_rank)) for tp_rank, cut in enumerate(self.cuts)]
        return self.ranks.settle(phase, f"{self.prefix}{name}", parts, wanted)

    @property
    def _count(self) -> int:
        return self.model.num_experts // self.axes["ep"]

    @property
    def _mean_rows(self) -> int:
        """Rows of an expert, of equal shares."""
        copies = (
            self.ranks.sequence * self.ranks.plan.batch.micro_size * self.model.experts_per_token * self.axes["etp"]
        )
        return -(-copies // (self.ranks.tp * self._count))

    def _cut_size(self, weight: Parameter, tp_rank: int) -> int:
        etp = self.axes["etp"]
        lo, hi = self.ranks.leaves(weight).owned_items(etp, tp_rank % etp)
        return (hi - lo) * weight.unit


def _apart(operations: Sequence[Operations]) -> tuple[list[Operations], list[Operations]]:
    """What moves copies, and what gathers tokens over tensor parallelism."""
    over_tp = [tuple(each for each in own if getattr(each, "axis", "") == "tp") for own in operations]
    return [tuple(each for each in own if getattr(each, "axis", "") != "tp") for own in operations], over_tp


def _until_product(operations: Operations) -> tuple[Operations, Operations]:
    """Everything up to the product, and what comes after."""
    products = [index for index, each in enumerate(operations) if isinstance(each, Product)]
    end = products[0] + 1 if products else 0
    return operations[:end], operations[end:]


def _finished(how: str, members: Sequence[Part]) -> Expression:
    """The sum of all members' partial sums: the canonical tree from their nodes, or the library's sum."""
    nodes = {node: value for member in members for node, value in member.nodes}
    num_leaves = members[0].leaves[2] if members[0].leaves else 0
    finished = tree(num_leaves, nodes) if nodes and how == "all_to_all" else None
    total = summed(how, [member.value for member in members])
    return total if finished is None else Expression(finished.ordered, total.unordered)
