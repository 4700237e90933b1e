"""Small pieces that the halves of a transformer layer are made of on expressions; see `symbolic_layers`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from ...core.layout.stage_parameters import Usage
from ...core.model.parameters import Parameter
from ...core.program import Collective, Operations, Product
from .expressions import apply, symbol
from .layers import Phase, Ranks, check_shape, vector_gradient
from .tensors import MisfitError, Part

Gradients = dict[str, list[Part]]
"""Weight gradients by `Usage.key`, one part per tensor-parallel rank."""

OperationsOf = Callable[[str, str], list[Operations]]
"""Every rank's operations of a layer, by its name in the transformer layer and the phase
(`forward`, `recomputed`, ...)."""


class LayerHalf(ABC):
    """Attention or MLP of a transformer layer: from the normed hidden state to what is added to the residual stream.

    `parameters` are those of the transformer layer `prefix`, without it.
    """

    def __init__(self, ranks: Ranks, prefix: str, parameters: Mapping[str, Parameter], operations: OperationsOf):
        self.ranks, self.prefix, self.parameters, self.operations = ranks, prefix, parameters, operations
        self.saved: dict[str, list[Part]] = {}
        self.gradients: Gradients = {}

    @property
    @abstractmethod
    def layers(self) -> tuple[str, ...]:
        """The layers that have operations."""

    @abstractmethod
    def forward(self, x: list[Part], phase: Phase) -> list[Part]:
        """What the half makes of a hidden state."""

    @abstractmethod
    def repeat(self, modules: Collection[str]) -> None:
        """What selective recomputation makes again."""

    @abstractmethod
    def backward(self, dy: list[Part]) -> list[Part]:
        """The gradient of the input; those of the weights go to `gradients`."""

    def _usages(self, name: str) -> tuple[Usage, Usage | None]:
        bias = self.parameters.get(f"{name}.bias")
        return Usage(self.parameters[f"{name}.weight"]), None if bias is None else Usage(bias)

    def _operations(self, name: str, phase: Phase) -> list[Operations]:
        return self.operations(name, "forward" if phase == "forward" else "recomputed")


class WholeLinear:
    """A linear layer that no rank cuts, on the tokens that a rank holds; exact numerics gather them
    for its weight gradient."""

    def __init__(self, ranks: Ranks, name: str, usage: Usage, bias: Usage | None):
        self.ranks, self.name, self.usage, self.bias = ranks, name, usage, bias
        self.shape = usage.parameter.shape

    def forward(self, operations: Sequence[Operations], x: list[Part], phase: Phase = "forward") -> list[Part]:
        """The layer's output, and its bias where it has one."""
        return self.biased(self.product(operations, x, phase))

    def product(self, operations: Sequence[Operations], x: list[Part], phase: Phase) -> list[Part]:
        """The output without the bias."""
        _, y = self.ranks.walk(
            operations, x, [lambda _, part, product: self._multiplied("linear", part, product, self.shape)]
        )
        return self.ranks.settle(phase, self.name, y, self.ranks.hidden(symbol("nothing")))

    def biased(self, y: list[Part]) -> list[Part]:
        """With the bias, where the layer has one."""
        if self.bias is None:
            return y
        return [replace(part, value=apply("bias", part.value, self.bias.parameter.name)) for part in y]

    def backward(
        self, operations: Sequence[Operations], weight_operations: Sequence[Operations], dy: list[Part], x: list[Part]
    ) -> tuple[list[Part], Gradients]:
        """(gradient of the input, gradients of weight and bias by `Usage.key`). Of two gathers the first is for
        the output's gradient."""
        n, k = self.shape
        _, dx = self.ranks.walk(
            operations, dy, [lambda _, part, product: self._multiplied("transposed", part, product, (k, n))]
        )
        dx = self.ranks.settle("input gradient", self.name, dx, self.ranks.hidden(symbol("nothing")))
        first = [own[: sum(isinstance(each, Collective) for each in own) // 2] for own in weight_operations]
        _, all_dy = self.ranks.walk(first, dy, [])
        rest = [own[len(head) :] for own, head in zip(weight_operations, first, strict=True)]
        _, gradient = self.ranks.walk(
            rest, x, [lambda tp_rank, part, product: self._outer(part, all_dy[tp_rank], product)]
        )
        gradients = {self.usage.key: self.ranks.settle_gradient(self.usage, gradient)}
        if self.bias is not None:
            gradients[self.bias.key] = vector_gradient(self.ranks, self.bias, dy, dy)
        return dx, gradients

    def _multiplied(self, function: str, x: Part, product: Product, shape: tuple[int, ...]) -> Part:
        n, k = shape
        check_shape(product, self._tokens(x), n, k)
        return replace(
            x, value=self.ranks.in_order_of(apply(function, x.value, self.usage.parameter.name), self._tokens(x), n, k)
        )

    def _outer(self, x: Part, dy: Part, product: Product) -> Part:
        if x.tokens != dy.tokens:
            raise MisfitError(
                f"a weight gradient is given tokens {x.tokens} of the input and {dy.tokens} of the output's gradient"
            )
        n, k = self.shape
        check_shape(product, n, k, self._tokens(x))
        return Part(
            self.ranks.in_order_of(apply("outer", x.value, dy.value, self.usage.key), n, k, self._tokens(x)), x.tokens
        )

    def _tokens(self, part: Part) -> int:
        if part.elements is not None or part.leaves is not None or part.features is not None:
            raise MisfitError("the product is given an unfinished sum, or cut features")
        return (part.tokens[1] - part.tokens[0]) * self.ranks.plan.batch.micro_size


def head_gradient(ranks: Ranks, usage: Usage, dy: list[Part], x: list[Part]) -> list[Part]:
    """The gradient of the norm of every head: a sum over the heads that a rank holds, which take the
    place of tokens here."""
    parts = []
    for part, other in zip(dy, x, strict=True):
        assert part.features is not None, "heads are cut"
        heads = ranks.plan.leaf_sizes.heads.items(*part.features[1:])
        value = ranks.in_order_of(apply("head sums", part.value, other.value, usage.key), *heads)
        parts.append(Part(value, heads))
    return ranks.settle_gradient(usage, parts)


def normed(parameters: Sequence[Parameter], x: list[Part]) -> list[Part]:
    """A norm of rows that are whole: hidden states, low-rank vectors, heads."""
    return [replace(part, value=apply("norm", part.value, *(parameter.name for parameter in parameters))) for part in x]


def norm_gradients(ranks: Ranks, parameters: Sequence[Parameter], dy: list[Part], x: list[Part]) -> Gradients:
    """The gradients of a norm's weights."""
    usages = [Usage(parameter) for parameter in parameters]
    return {usage.key: vector_gradient(ranks, usage, dy, x) for usage in usages}


def residual(x: list[Part], y: list[Part]) -> list[Part]:
    """The sum of two hidden states."""
    return mapped("residual", x, y)


def mapped(function: str, x: list[Part], *others: list[Part]) -> list[Part]:
    """An elementwise function of parts that hold the same elements."""
    results = []
    for part, *rest in zip(x, *others, strict=True):
        assert all(other.extents == part.extents for other in rest), "settled parts hold the same elements"
        results.append(replace(part, value=apply(function, part.value, *(other.value for other in rest))))
    return results
