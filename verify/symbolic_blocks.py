"""Embedding, transformer layer and head as sequences of layers, forward and backward, on expressions; see `symbolic_layers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..core.parameters import (
    Parameter,
    Usage,
    embedding_parameters,
    head_parameters,
    layer_parameters,
    layer_prefix,
)
from ..core.plan import Plan
from ..core.program import Collective, LayerWork, Operations, Product, recomputed_modules, recomputes_whole
from ..core.stages import StageLayers
from .expressions import Expression, apply, exactly_summed, symbol
from .symbolic_layers import (
    Difference,
    Linear,
    Phase,
    Ranks,
    check_shape,
    lookup_part,
    named,
    summed_leaves,
    vector_gradient,
)
from .symbolic_tensors import MisfitError, Part

Works = Sequence[Sequence[LayerWork]]
"""Of every tensor-parallel rank, the works of one block."""
Gradients = dict[str, list[Part]]
"""Weight gradients by `Usage.key`, one part per tensor-parallel rank."""


@dataclass(frozen=True)
class Block:
    """A part of a stage: its name as findings show it, the prefix of its layers' names, and the index of a transformer layer."""

    name: str
    prefix: str
    layer: int | None = None


EMBEDDING, HEAD = Block("embedding", "embedding."), Block("head", "head.")


def blocks_of(stage: StageLayers) -> Iterator[Block]:
    """The blocks of a stage in forward order."""
    if stage.embedding:
        yield EMBEDDING
    for layer in stage.layers:
        yield Block(layer_prefix(layer), f"{layer_prefix(layer)}.", layer)
    if stage.head:
        yield HEAD


def run_block(plan: Plan, block: Block, works: Works, reference: dict[tuple[Phase, str], Expression] | None) -> tuple[Ranks, Gradients]:
    """Forward and backward of a block on all tensor-parallel ranks. Without a reference this is the one device, and makes it."""
    ranks = Ranks(plan, reference)
    if block is EMBEDDING:
        return ranks, _embedding(ranks, works)
    if block is HEAD:
        return ranks, _head(ranks, works)
    assert block.layer is not None
    gradients = _TransformerLayer(ranks, block.layer, works).run()
    known = {f"{block.prefix}{name}" for name in _TransformerLayer.LAYERS}
    if reference is not None and (strange := {work.layer for work in works[0]} - known):
        ranks.differences.append(Difference("forward", sorted(strange)[0], "value", 0, "one device has no such layer"))
    return ranks, gradients


def _embedding(ranks: Ranks, works: Works) -> Gradients:
    """Both tables' gradients use the tokens that the backward of the token table gathers."""
    tied = ranks.plan.model.tied_embeddings
    table, *positions = embedding_parameters(ranks.plan.model)
    _, x = ranks.walk(named("embedding.", works, "forward")("tokens"), [lookup_part(ranks, t) for t in range(ranks.tp)], [])
    hidden = ranks.hidden(symbol("x"))
    ranks.settle("forward", "embedding.tokens", x, hidden)
    _, dy = ranks.walk(named("embedding.", works, "input_gradient")("tokens"), ranks.hidden(symbol("dy")), [])
    ranks.walk(named("embedding.", works, "weight_gradient")("tokens"), dy, [])
    usage = Usage(table, "embedding" if tied else "")

    def rows(tp_rank: int, part: Part) -> Part:
        value = ranks.in_order_of(apply("embedding rows", part.value, usage.key), *part.tokens)
        return Part(value, part.tokens, ranks.own_leaves(table, tp_rank))

    gradients = {usage.key: ranks.settle_gradient(usage, ranks.each(rows, dy))}
    for parameter in positions:
        own = Usage(parameter)
        gradients[own.key] = ranks.settle_gradient(own, [replace(p, value=apply("position rows", p.value, own.key)) for p in dy])
    return gradients


def _head(ranks: Ranks, works: Works) -> Gradients:
    """Final norm, logits, the loss of every token, and back."""
    plan, model = ranks.plan, ranks.plan.model
    forward, back, weight = (named("head.", works, what) for what in ("forward", "input_gradient", "weight_gradient"))
    norm = [parameter for parameter in head_parameters(model) if parameter.name.startswith("head.norm")]
    table = next(embedding_parameters(model)) if model.tied_embeddings else list(head_parameters(model))[-1]
    output = Linear(ranks, "head.output", Usage(table, "output" if model.tied_embeddings else ""), None)
    x = ranks.hidden(symbol("x"))
    normed = _norm(ranks, norm, x)
    logits = output.forward(forward("output"), normed)
    sums = _loss(ranks, forward("loss"), logits, plan.leaf_sizes.vocab.num_leaves)
    dlogits = [replace(part, value=apply("loss gradient", part.value, *sums)) for part in logits]
    dnormed, gradients = output.backward(back("output"), weight("output"), dlogits, normed)
    return {**gradients, **_norm_gradients(ranks, norm, dnormed, x)}


def _loss(ranks: Ranks, operations: Sequence[Operations], logits: list[Part], num_leaves: int) -> list[Expression]:
    """The first collective completes the maximum, the others the sum of exponentials (with label smoothing of logits too) together with
    the target's logit."""
    first = [[each for each in own if isinstance(each, Collective)][:1] for own in operations]
    rest = [own[len(head) :] for own, head in zip(operations, first, strict=True)]
    tokens = (0, ranks.sequence)
    own = [range(*ranks.plan.leaf_sizes.vocab.owned(ranks.tp, tp_rank)) for tp_rank in range(ranks.tp)]
    maximum = [Part(symbol("maximum"), tokens, maximum=frozenset(leaves), per_token=True) for leaves in own]
    _, maximum = ranks.walk([tuple(head) for head in first], maximum, [])
    maximum = [Part(apply("maximum", logits[0].value, *sorted(part.maximum or ())), part.tokens) for part in maximum]
    maximum = ranks.settle("forward", "head.loss maximum", maximum, [Part(symbol("maximum"), tokens)] * ranks.tp)

    def over_vocabulary(what: str, tp_rank: int) -> Part:
        terms = {leaf: apply(what, logits[tp_rank].value, maximum[tp_rank].value, leaf) for leaf in own[tp_rank]}
        return replace(summed_leaves(ranks, tokens, terms, num_leaves, (len(terms),)), per_token=True)

    def target(tp_rank: int) -> Part:
        terms = (apply("target", logits[tp_rank].value, maximum[tp_rank].value, leaf) for leaf in own[tp_rank])
        return Part(exactly_summed(terms), tokens, exactly=True, per_token=True)

    sums: list[tuple[str, Callable[[int], Part]]] = [("head.loss", partial(over_vocabulary, "exponentials"))]
    if ranks.plan.train.label_smoothing:
        sums.append(("head.loss logits", partial(over_vocabulary, "shifted logits")))
    results = []
    for name, make in (*sums, ("head.loss target", target)):
        _, parts = ranks.walk(rest, [make(tp_rank) for tp_rank in range(ranks.tp)], [])
        results.append(ranks.settle("forward", name, parts, [Part(symbol("sum"), tokens)] * ranks.tp)[0].value)
    return results


class _TransformerLayer:
    """Pre-norm attention and pre-norm MLP, each added to its input."""

    LAYERS = ("attention.qkv", "attention.core", "attention.output", "mlp.up", "mlp.down")

    def __init__(self, ranks: Ranks, layer: int, works: Works):
        self.ranks = ranks
        self.prefix = f"{layer_prefix(layer)}."
        self.recomputed_whole = recomputes_whole(ranks.plan, layer)
        self.parameters = {parameter.name.removeprefix(self.prefix): parameter for parameter in layer_parameters(ranks.plan.model, layer)}
        self.forward_of, self.back_of, self.weight_of, self.again_of = (
            named(self.prefix, works, what) for what in ("forward", "input_gradient", "weight_gradient", "recomputed")
        )
        self.linears = {name: self._linear(name) for name in self.LAYERS if name != "attention.core"}

    def run(self) -> Gradients:
        """Everything a microbatch does in this layer."""
        x = self.ranks.hidden(symbol("x"))
        saved = self._forward(x, "forward")
        if self.recomputed_whole:
            saved = self._forward(x, "recomputation")
        modules = recomputed_modules(self.ranks.plan)
        if "core_attn" in modules:
            saved["core"] = self._core(saved["qkv"], "recomputation")
        if "mlp" in modules:
            self._mlp(saved, "recomputation")
        return self._backward(x, saved, self.ranks.hidden(symbol("dy")))

    def _linear(self, name: str) -> Linear:
        bias = self.parameters.get(f"{name}.bias")
        return Linear(self.ranks, f"{self.prefix}{name}", Usage(self.parameters[f"{name}.weight"]), None if bias is None else Usage(bias))

    def _operations(self, name: str, phase: Phase) -> list[Operations]:
        return (self.forward_of if phase == "forward" else self.again_of)(name)

    def _apply(self, name: str, x: list[Part], phase: Phase) -> list[Part]:
        return self.linears[name].forward(self._operations(name, phase), x, phase)

    def _forward(self, x: list[Part], phase: Phase) -> dict[str, list[Part]]:
        saved = {"attention.norm": _norm(self.ranks, self._norm("attention"), x)}
        saved["qkv"] = self._apply("attention.qkv", saved["attention.norm"], phase)
        saved["core"] = self._core(saved["qkv"], phase)
        saved["middle"] = _residual(x, self._apply("attention.output", saved["core"], phase))
        saved["mlp.norm"] = _norm(self.ranks, self._norm("mlp"), saved["middle"])
        saved["output"] = _residual(saved["middle"], self._mlp(saved, phase))
        return saved

    def _mlp(self, saved: dict[str, list[Part]], phase: Phase) -> list[Part]:
        saved["up"] = self._apply("mlp.up", saved["mlp.norm"], phase)
        saved["activation"] = _map("activation", saved["up"])
        return self._apply("mlp.down", saved["activation"], phase)

    def _backward(self, x: list[Part], saved: dict[str, list[Part]], dy: list[Part]) -> Gradients:
        gradients: Gradients = {}

        def back(name: str, dy: list[Part], x: list[Part]) -> list[Part]:
            dx, own = self.linears[name].backward(self.back_of(name), self.weight_of(name), dy, x)
            gradients.update(own)
            return dx

        dup = _map("activation gradient", back("mlp.down", dy, saved["activation"]), saved["up"])
        dnorm = back("mlp.up", dup, saved["mlp.norm"])
        gradients.update(_norm_gradients(self.ranks, self._norm("mlp"), dnorm, saved["middle"]))
        dmiddle = _residual(dy, _map("norm gradient", dnorm, saved["middle"]))
        dcore = back("attention.output", dmiddle, saved["core"])
        dqkv = self._core_backward(dcore, saved["qkv"])
        dnorm = back("attention.qkv", dqkv, saved["attention.norm"])
        gradients.update(_norm_gradients(self.ranks, self._norm("attention"), dnorm, x))
        return gradients

    def _norm(self, half: str) -> list[Parameter]:
        return [self.parameters[name] for name in (f"{half}.norm.weight", f"{half}.norm.bias") if name in self.parameters]

    def _core(self, qkv: list[Part], phase: Phase) -> list[Part]:
        """Scores and their product with the values."""
        sizes = [("scores", False, 1), ("values", True, 1)]
        return self._core_products(self._operations("attention.core", phase), qkv, sizes, phase)

    def _core_backward(self, dy: list[Part], qkv: list[Part]) -> list[Part]:
        dy = _map("attention gradient", dy, qkv)
        sizes = [("gradient of scores", False, 1), ("gradients of values, queries and keys", True, 3)]
        return self._core_products(self.back_of("attention.core"), dy, sizes, "input gradient")

    def _core_products(self, operations: list[Operations], x: list[Part], sizes: list[tuple[str, bool, int]], phase: Phase) -> list[Part]:
        plan, wanted = self.ranks.plan, self.linears["attention.qkv"].cut_parts()

        def product(name: str, with_values: bool, times: int):
            def compute(tp_rank: int, part: Part, found: Product) -> Part:
                if part.extents != wanted[tp_rank].extents:
                    raise MisfitError("the attention of a rank's heads needs all tokens of exactly these heads")
                lo, hi = plan.leaf_sizes.heads.owned_items(self.ranks.tp, tp_rank)
                heads = (hi - lo) * plan.model.query_heads_per_group * plan.batch.micro_size
                sequence, head_dim = self.ranks.sequence, plan.model.head_dim
                n, k = (head_dim, sequence) if with_values else (sequence, head_dim)
                check_shape(found, sequence, n, k, times * heads)
                return replace(part, value=apply(name, part.value))

            return compute

        _, y = self.ranks.walk(operations, x, [product(*size) for size in sizes])
        return self.ranks.settle(phase, f"{self.prefix}attention.core", y, wanted)


def _norm(ranks: Ranks, parameters: Sequence[Parameter], x: list[Part]) -> list[Part]:
    assert all(part.features is None for part in x), "settled hidden states have whole features"
    return [replace(part, value=apply("norm", part.value, *(parameter.name for parameter in parameters))) for part in x]


def _norm_gradients(ranks: Ranks, parameters: Sequence[Parameter], dy: list[Part], x: list[Part]) -> Gradients:
    usages = [Usage(parameter) for parameter in parameters]
    return {usage.key: vector_gradient(ranks, usage, dy, x) for usage in usages}


def _residual(x: list[Part], y: list[Part]) -> list[Part]:
    return _map("residual", x, y)


def _map(function: str, x: list[Part], *others: list[Part]) -> list[Part]:
    """An elementwise function of parts that hold the same elements."""
    results = []
    for part, *rest in zip(x, *others, strict=True):
        assert all(other.extents == part.extents for other in rest), "settled parts hold the same elements"
        results.append(replace(part, value=apply(function, part.value, *(other.value for other in rest))))
    return results
