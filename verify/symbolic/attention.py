"""The attention of one layer on expressions: grouped heads or latent attention, forward and backward;
see `symbolic_layers`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ...core.layout.stage_parameters import Usage
from ...core.model.parameters import Parameter
from ...core.program import Operations, Product
from .expressions import Expression, apply, symbol
from .layers import Linear, Phase, Ranks, check_shape, summed_leaves, vector_gradient
from .parts import (
    LayerHalf,
    OperationsOf,
    WholeLinear,
    head_gradient,
    mapped,
    norm_gradients,
    normed,
    residual,
)
from .tensors import MisfitError, Part, open_over_context, share_of


class Attention(LayerHalf):
    """What grouped heads and latent attention share: how their linear layers and norms are found."""

    def _linear(self, name: str) -> Linear:
        return Linear(self.ranks, f"{self.prefix}{name}", *self._usages(name))

    def _whole(self, name: str) -> WholeLinear:
        return WholeLinear(self.ranks, f"{self.prefix}{name}", *self._usages(name))

    def _norm(self, name: str) -> list[Parameter]:
        return [self.parameters[each] for each in (f"{name}.weight", f"{name}.bias") if each in self.parameters]

    def _apply(self, name: str, layer: Linear | WholeLinear, x: list[Part], phase: Phase) -> list[Part]:
        return layer.forward(self._operations(name, phase), x, phase)

    def _back(self, name: str, layer: Linear | WholeLinear, dy: list[Part], x: list[Part]) -> list[Part]:
        dx, own = layer.backward(
            self.operations(name, "input_gradient"), self.operations(name, "weight_gradient"), dy, x
        )
        self.gradients.update(own)
        return dx

    def _core(self, qkv: list[Part], phase: Phase) -> list[Part]:
        """Scores and their product with the values."""
        s, model = self.ranks.keys, self.ranks.plan.model
        scores = "scores less distances" if model.position == "alibi" else "scores"
        sizes = [(scores, s, model.head_dim, 1), ("values", model.value_head_dim, s, 1)]
        return self._core_products(
            self.operations("attention.core", "forward" if phase == "forward" else "recomputed"), qkv, sizes, phase
        )

    def _core_backward(self, dy: list[Part], qkv: list[Part]) -> list[Part]:
        s, d, v = self.ranks.keys, self.ranks.plan.model.head_dim, self.ranks.plan.model.value_head_dim
        sizes = [("gradient of scores", s, v, 1)]
        if d == v:
            sizes.append(("gradients of values, queries and keys", d, s, 3))
        else:
            sizes += [("gradient of values", v, s, 1), ("gradients of queries and keys", d, s, 2)]
        dy = mapped("attention gradient", dy, qkv)
        return self._core_products(self.operations("attention.core", "input_gradient"), dy, sizes, "input gradient")

    def _core_products(
        self, operations: Sequence[Operations], x: list[Part], sizes: Sequence[tuple[str, int, int, int]], phase: Phase
    ) -> list[Part]:
        """Products [s, k] x [k, n], `times` for every head, one after the other: `sizes` are their (name, n, k, times).
        Of keys and values those of the whole sample are needed, and their gradients are sums over all queries of it."""
        plan, wanted = self.ranks.plan, self._heads()
        inner, outer = plan.layout.cp_inner, plan.layout.cp_outer
        whole, last = (0, self.ranks.keys), sizes[-1][0]

        def product(name: str, n: int, k: int, times: int) -> Callable[[int, Part, Product], Part]:
            def compute(tp_rank: int, part: Part, found: Product) -> Part:
                if part.extents != replace(share_of(wanted[tp_rank], inner), tokens=whole).extents:
                    raise MisfitError("the attention of a rank's heads needs all tokens of exactly these heads")
                lo, hi = plan.leaf_sizes.heads.owned_items(self.ranks.tp, tp_rank)
                heads = (hi - lo) * plan.model.query_heads_per_group * plan.batch.micro_size
                check_shape(found, self.ranks.queries, n, k, times * heads // inner)
                if name != last:
                    return replace(part, value=apply(name, part.value))
                value = apply(name, part.value)
                value = value if outer == 1 else self.ranks.in_order_of(value, outer)
                result = replace(part, value=value, tokens=(0, self.ranks.queries))
                return open_over_context(result, outer) if phase == "input gradient" else result

            return compute

        _, y = self.ranks.walk(operations, x, [product(*size) for size in sizes])
        return self.ranks.settle(phase, f"{self.prefix}attention.core", y, wanted)

    @abstractmethod
    def _heads(self) -> list[Part]:
        """The extents of every rank's heads."""


class GroupedAttention(Attention):
    """Query heads that share key and value heads, normed where the model norms them, and the scores of sinks."""

    layers = ("attention.qkv", "attention.all_queries_norm", "attention.core", "attention.output")

    def __init__(self, ranks: Ranks, prefix: str, parameters: Mapping[str, Parameter], operations: OperationsOf):
        super().__init__(ranks, prefix, parameters, operations)
        self.whole = WholeNorms(self)
        self.qkv, self.output = self._linear("attention.qkv"), self._linear("attention.output")
        self.norms = [*self._norm("attention.query_norm"), *self._norm("attention.key_norm")]
        self.sinks = parameters.get("attention.core.sinks")

    def forward(self, x: list[Part], phase: Phase) -> list[Part]:
        saved = self.saved
        saved["x"], saved["qkv"] = x, self._apply("attention.qkv", self.qkv, x, phase)
        heads = normed(self.norms, saved["qkv"]) if self.norms else self.whole.forward(saved["qkv"], phase)
        if self.sinks is not None:
            heads = [replace(part, value=apply("sinks", part.value, self.sinks.name)) for part in heads]
        saved["heads"] = heads
        saved["core"] = self._core(saved["heads"], phase)
        return self._apply("attention.output", self.output, saved["core"], phase)

    def repeat(self, modules: Collection[str]) -> None:
        if "core_attn" in modules:
            self.saved["core"] = self._core(self.saved["heads"], "recomputation")

    def backward(self, dy: list[Part]) -> list[Part]:
        saved = self.saved
        dheads = self._core_backward(self._back("attention.output", self.output, dy, saved["core"]), saved["heads"])
        if self.sinks is not None:
            usage = Usage(self.sinks)
            self.gradients[usage.key] = vector_gradient(self.ranks, usage, dheads, dheads)
        for parameter in self.norms:
            usage = Usage(parameter)
            self.gradients[usage.key] = head_gradient(self.ranks, usage, dheads, saved["qkv"])
        norms_back = partial(mapped, "norm gradient") if self.norms else self.whole.backward
        dqkv = norms_back(dheads, saved["qkv"])
        return self._back("attention.qkv", self.qkv, dqkv, saved["x"])

    def _heads(self) -> list[Part]:
        return self.qkv.cut_parts()


class WholeNorms:
    """The norms of all queries and of all keys, each by a sum over the features of all ranks; none where the model does
    not norm them so."""

    layer = "attention.all_queries_norm"

    def __init__(self, attention: Attention):
        self.attention, self.ranks = attention, attention.ranks
        names = f"{self.layer}.weight", "attention.all_keys_norm.weight"
        self.norms = [attention.parameters[name] for name in names if name in attention.parameters]

    def forward(self, qkv: list[Part], phase: Phase) -> list[Part]:
        """Queries and keys normed."""
        if not self.norms:
            return qkv
        operations = self.attention.operations(self.layer, "forward" if phase == "forward" else "recomputed")
        squares = self._sums("squares", operations, phase, qkv)
        names = [parameter.name for parameter in self.norms]
        return [replace(part, value=apply("whole norm", part.value, *squares, *names)) for part in qkv]

    def backward(self, dheads: list[Part], qkv: list[Part]) -> list[Part]:
        """The gradient of what was normed; those of the weights go to the attention's."""
        if not self.norms:
            return dheads
        for parameter in self.norms:
            usage = Usage(parameter)
            self.attention.gradients[usage.key] = vector_gradient(self.ranks, usage, dheads, qkv)
        operations = self.attention.operations(self.layer, "input_gradient")
        sums = self._sums("normed times gradient", operations, "input gradient", dheads, qkv)
        return [
            replace(part, value=apply("whole norm gradient", part.value, other.value, *sums))
            for part, other in zip(dheads, qkv, strict=True)
        ]

    def _sums(self, what: str, operations: Sequence[Operations], phase: Phase, *given: list[Part]) -> list[Expression]:
        """A sum over the features of each token for each norm, the same on every rank."""
        leaves, tokens, results = self.ranks.plan.leaf_sizes.heads, (0, self.ranks.sequence), []

        def own(tp_rank: int, norm: str) -> Part:
            values = [parts[tp_rank].value for parts in given]
            terms = {leaf: apply(what, *values, norm, leaf) for leaf in range(*leaves.owned(self.ranks.tp, tp_rank))}
            return replace(summed_leaves(self.ranks, tokens, terms, leaves.num_leaves, (len(terms),)), per_token=True)

        for parameter in self.norms:
            _, parts = self.ranks.walk(operations, [own(each, parameter.name) for each in range(self.ranks.tp)], [])
            wanted = [Part(symbol("sum"), tokens)] * self.ranks.tp
            name = f"{parameter.name.removesuffix('.weight')} {what}"
            results.append(self.ranks.settle(phase, name, parts, wanted)[0].value)
        return results


class LatentAttention(Attention):
    """Multi-head latent attention; the rotary key is gathered with the low-rank vector of keys and values."""

    def __init__(self, ranks: Ranks, prefix: str, parameters: Mapping[str, Parameter], operations: OperationsOf):
        super().__init__(ranks, prefix, parameters, operations)
        self.q_down = self._whole("attention.q_down") if ranks.plan.model.q_lora_rank else None
        self.q_name = "attention.q" if self.q_down is None else "attention.q_up"
        self.q, self.kv_down = self._linear(self.q_name), self._whole("attention.kv_down")
        self.kv_up, self.output = self._linear("attention.kv_up"), self._linear("attention.output")

    @property
    def layers(self) -> tuple[str, ...]:
        low = () if self.q_down is None else ("attention.q_down",)
        return (*low, self.q_name, "attention.kv_down", "attention.kv_up", "attention.core", "attention.output")

    def forward(self, x: list[Part], phase: Phase) -> list[Part]:
        saved = self.saved
        saved["x"] = saved["low q"] = x
        if self.q_down is not None:
            saved["q_down"] = self._apply("attention.q_down", self.q_down, x, phase)
            saved["low q"] = normed(self._norm("attention.q_norm"), saved["q_down"])
        down = self._apply("attention.kv_down", self.kv_down, x, phase)
        saved["latent"] = mapped("latent", down)
        saved["low kv"] = mapped("with rotary key", normed(self._norm("attention.kv_norm"), saved["latent"]), down)
        self._up(phase)
        saved["core"] = self._core(saved["heads"], phase)
        return self._apply("attention.output", self.output, saved["core"], phase)

    def _up(self, phase: Phase) -> None:
        q = self._apply(self.q_name, self.q, self.saved["low q"], phase)
        kv = self._apply("attention.kv_up", self.kv_up, self.saved["low kv"], phase)
        self.saved["heads"] = mapped("queries, keys and values", q, kv)

    def repeat(self, modules: Collection[str]) -> None:
        if "mla_up_proj" in modules:
            self._up("recomputation")
        if "core_attn" in modules:
            self.saved["core"] = self._core(self.saved["heads"], "recomputation")

    def backward(self, dy: list[Part]) -> list[Part]:
        saved = self.saved
        dheads = self._core_backward(self._back("attention.output", self.output, dy, saved["core"]), saved["heads"])
        dq = self._back(self.q_name, self.q, mapped("gradient of queries", dheads), saved["low q"])
        if self.q_down is not None:
            norm = self._norm("attention.q_norm")
            self.gradients.update(norm_gradients(self.ranks, norm, dq, saved["q_down"]))
            dq = self._back("attention.q_down", self.q_down, mapped("norm gradient", dq, saved["q_down"]), saved["x"])
        dlow = self._back("attention.kv_up", self.kv_up, mapped("gradient of keys and values", dheads), saved["low kv"])
        dlatent = mapped("gradient without rotary key", dlow)
        self.gradients.update(norm_gradients(self.ranks, self._norm("attention.kv_norm"), dlatent, saved["latent"]))
        ddown = mapped("joined gradients", mapped("norm gradient", dlatent, saved["latent"]), dlow)
        return residual(dq, self._back("attention.kv_down", self.kv_down, ddown, saved["x"]))

    def _heads(self) -> list[Part]:
        return self.kv_up.cut_parts()
