"""What our own backend's actions cost on the machine that `calibrate` measured, kernel by kernel.

The kernels are those of `backend.model`, `backend.tensor_parallel` and `backend.optimizer` with fast numerics, counted from their code
(exact numerics are priced as fast ones); each layer is one autograd function more. A device of a calibrated host is one rank process
with one thread: its kernels follow each other, and nothing is launched ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ..core.model import ModelSpec
from ..core.parameters import Parameter, stage_parameters
from ..core.plan import Plan
from ..core.program import Collective, Group, LayerWork, Operation, Product, group_work
from .blocks import COMPONENT_OF_AXIS, Block, Part
from .host_kernels import Variant, attention_head_s, host_product_s, kernel_s
from .seconds import NOTHING, Seconds

Kernels = Iterable[tuple[str, float, float]]
"""Kernel, elements of one call, calls."""

BACKWARD_FUNCTIONS = 16
"""Functions in the measured chain `function_backward_16`."""

ROW_LAYERS = (".attention.output", ".mlp.down")
"""Ends of the names of layers whose input features are cut; all other products cut output features."""


def is_host(plan: Plan) -> bool:
    """True when a plan runs our own backend on a calibrated host, with layers and switches whose kernels are counted here.

    Everything else that names a calibrated cluster is priced from its rates, as on any device.
    """
    if not plan.cluster.kernel_curve or plan.runtime.profile != "shardproof":
        return False
    model, layout = plan.model, plan.layout
    plain = not (model.is_moe or model.is_mla or model.num_mtp_layers or model.qk_norm or model.qkv_bias)
    whole = not (layout.sequence_parallel or layout.zero) and layout.cp == layout.ep == 1
    return plain and whole and plan.precision.dtype == "fp32" and plan.recompute.mode == "none"


def rate_share(plan: Plan) -> float:
    """Share of the measured rates that a rank keeps: less than 1 where all cores have one at work."""
    cluster = plan.cluster
    return cluster.busy_core_share if plan.layout.world_size >= cluster.num_cores > 1 else 1.0


def host_block(plan: Plan, group: Group, collective_s: Callable[[Collective], float]) -> Block:
    """The price of one part of a stage for one microbatch."""
    pricer = _HostPricer(plan, collective_s)
    works = group_work(plan, group)
    forward = pricer.kernels(pricer.tokens.forward(group.kind))
    backward = pricer.kernels(pricer.tokens.backward(group.kind))
    weight = pricer.kernels(pricer.tokens.weight(group.kind))
    for work in works:
        forward += pricer.part(work, "forward")
        backward += pricer.part(work, "input")
        weight += pricer.part(work, "weight")
    return Block(forward, backward, weight, backward + weight)


def host_step_s(plan: Plan, stages: tuple[int, ...]) -> float:
    """Seconds of the update of a rank that holds `stages`, beside what it sends: for every tensor a division by the token count, the sum
    of squares, the product with the clipping coefficient, and AdamW."""
    cluster, total_s = plan.cluster, 0.0
    for parameter in (parameter for stage in stages for parameter in stage_parameters(plan.model, plan.stages[stage])):
        elements = _local(plan, parameter)
        total_s += 2 * kernel_s(cluster, "add", elements) + kernel_s(cluster, "square_sum", elements) + kernel_s(cluster, "adamw", elements)
    losses = plan.num_microbatches * sum(plan.stages[stage].head for stage in stages)
    return (total_s + losses * kernel_s(cluster, "square_sum", plan.batch.micro_size * plan.batch.sequence)) / rate_share(plan)


def host_check_s(plan: Plan, stage: int) -> float:
    """Seconds to look whether all gradients of a stage are finite, before they are reduced: a sum over each and a look at that."""
    elements = [_local(plan, parameter) for parameter in stage_parameters(plan.model, plan.stages[stage])]
    cluster = plan.cluster
    return sum(kernel_s(cluster, "row_mean", each) + kernel_s(cluster, "add", 1) for each in elements) / rate_share(plan)


def host_flatten_s(plan: Plan, elements: int) -> float:
    """Seconds to lay the gradients of a stage side by side before they are reduced."""
    return kernel_s(plan.cluster, "add", elements) / rate_share(plan)


def _local(plan: Plan, parameter: Parameter) -> float:
    elements = 1.0
    for part in plan.leaf_sizes.local_slices(parameter, plan.layout.tp, 0):
        elements *= part.stop - part.start
    return elements


@dataclass(frozen=True)
class _HostPricer:
    plan: Plan
    collective_s: Callable[[Collective], float]

    @cached_property
    def tokens(self) -> _Kernels:
        return _Kernels(self.plan)

    def kernels(self, found: Kernels) -> Part:
        """Kernels one after the other."""
        cluster, total_s, calls = self.plan.cluster, 0.0, 0.0
        for name, elements, count in found:
            if name.startswith("attention"):
                each_s = attention_head_s(cluster, name, self.plan.model.head_dim, elements)
            else:
                each_s = kernel_s(cluster, name, elements)
            total_s += count * (each_s / BACKWARD_FUNCTIONS if name == "function_backward_16" else each_s)
            calls += count
        return Part(Seconds(compute=total_s / rate_share(self.plan)), round(calls))

    def part(self, work: LayerWork, of: str) -> Part:
        """Products and collectives of one layer in a pass, with the sum over microbatches of its weight gradient."""
        if work.layer.endswith("attention.core"):
            return NOTHING_PART
        found = {"forward": work.forward, "input": work.input_gradient, "weight": work.weight_gradient}[of]
        total = Part()
        for operation in found:
            total += self._operation(work.layer, operation, of)
        return total

    def _operation(self, layer: str, operation: Operation, of: str) -> Part:
        if isinstance(operation, Collective):
            return Part(Seconds(**{COMPONENT_OF_AXIS[operation.axis]: self.collective_s(operation)}), 1)
        assert isinstance(operation, Product)
        m, n, k = operation.m, operation.n, operation.k
        product_s = host_product_s(self.plan.cluster, _variant(layer, of), m, n, k) / rate_share(self.plan)
        total = Part(Seconds(compute=product_s), 1)
        if of == "weight":
            total += self.kernels([("add_", m * n, self.tokens.sums)])
        return total


NOTHING_PART = Part(NOTHING, 0)


def _variant(layer: str, of: str) -> Variant:
    """Weights are stored with the cut features first, so a row-parallel layer multiplies forward as a column-parallel one backward."""
    if of == "weight":
        return "tn"
    return "nt" if layer.endswith(ROW_LAYERS) == (of == "input") else "nn"


@dataclass(frozen=True)
class _Kernels:
    """The kernels other than products and collectives of every part of a stage, of tensor-parallel rank 0."""

    plan: Plan

    @property
    def model(self) -> ModelSpec:
        return self.plan.model

    @property
    def sums(self) -> float:
        """Additions to a gradient's sum per microbatch: the first one is the sum itself."""
        return 1 - 1 / self.plan.num_microbatches

    @cached_property
    def tokens(self) -> int:
        return self.plan.batch.micro_size * self.plan.batch.sequence

    @cached_property
    def hidden(self) -> int:
        return self.tokens * self.model.hidden_size

    @cached_property
    def groups(self) -> int:
        """Key/value heads of the rank."""
        return self.plan.leaf_sizes.heads.owned_items(self.plan.layout.tp, 0)[1]

    @cached_property
    def keys(self) -> int:
        return self.tokens * self.groups * self.model.head_dim

    @cached_property
    def queries(self) -> int:
        return self.keys * self.model.query_heads_per_group

    @cached_property
    def units(self) -> int:
        return self.tokens * self.plan.leaf_sizes.ffn.owned_items(self.plan.layout.tp, 0)[1]

    @cached_property
    def vocabulary(self) -> int:
        return self.plan.leaf_sizes.vocab.owned_items(self.plan.layout.tp, 0)[1]

    def forward(self, kind: str) -> Iterator[tuple[str, float, float]]:
        """A forward."""
        match kind:
            case "embedding":
                yield from [("add", self.tokens, 4), ("add", self.hidden, 1), ("add_", self.hidden, 1), ("function", 1, 1)]
                if self.model.position == "learned":
                    yield from [("add", self.hidden, 1), ("function", 1, 1)]
            case "head":
                logits = self.tokens * self.vocabulary
                yield from self._norm()
                yield from [("function", 1, 2), ("row_mean", logits, 2), ("add", logits, 1), ("exp", logits, 1), ("add", self.tokens, 14)]
            case _:
                yield from [*self._norm(), *self._norm(), ("add", self.hidden, 2), ("function", 1, 5)]
                yield from [*self._attention(), *self._activation(), *self._bias("add_")]

    def backward(self, kind: str) -> Iterator[tuple[str, float, float]]:
        """An input gradient."""
        match kind:
            case "embedding":
                yield "function_backward_16", 1, 1 + (self.model.position == "learned")
            case "head":
                logits = self.tokens * self.vocabulary
                yield from self._norm_backward()
                yield from [("function_backward_16", 1, 2), ("add", logits, 1), ("add", self.tokens, 6)]
            case _:
                yield from [*self._norm_backward(), *self._norm_backward(), ("add", self.hidden, 2), ("function_backward_16", 1, 5)]
                yield from [*self._attention_backward(), *self._activation_backward()]

    def weight(self, kind: str) -> Iterator[tuple[str, float, float]]:
        """Weight gradients other than those of products."""
        h = self.model.hidden_size
        match kind:
            case "embedding":
                table = self.vocabulary * h
                yield from [("add", self.hidden, 1), ("add_", table, 1 + self.sums)]
                if self.model.position == "learned":
                    positions = self.model.max_positions * h
                    padded = self.plan.batch.micro_size * positions
                    yield from [("add", padded, 1), ("token_sum", padded, 1), ("add_", positions, self.sums)]
            case "head":
                yield from self._norm_weight()
            case _:
                yield from [*self._norm_weight(), *self._norm_weight(), *self._bias("token_sum")]

    def _norm(self) -> Kernels:
        if self.model.norm == "layernorm":
            return [("layer_norm", self.hidden, 1), ("function", 1, 1)]
        steps = [("add", self.hidden, 2), ("row_mean", self.hidden, 1), ("add", self.tokens, 2), ("add_", self.hidden, 1)]
        return [*steps, ("function", 1, 1)]

    def _norm_backward(self) -> Kernels:
        if self.model.norm == "layernorm":
            return [("layer_norm_backward", self.hidden, 1), ("function_backward_16", 1, 1)]
        return [("add", self.hidden, 5), ("row_mean", self.hidden, 1), ("add_", self.hidden, 1), ("function_backward_16", 1, 1)]

    def _norm_weight(self) -> Kernels:
        h = self.model.hidden_size
        if self.model.norm == "layernorm":
            return [("add", self.hidden, 3), ("token_sum", self.hidden, 2), ("add_", h, 2 * self.sums)]
        return [("add", self.hidden, 1), ("token_sum", self.hidden, 1), ("add_", h, self.sums)]

    def _bias(self, kernel: str) -> Kernels:
        """Additions of the biases to the four products of a layer, or the sums of their gradients over tokens."""
        if not self.model.bias:
            return []
        return [(kernel, self.queries + 2 * self.keys, 1), (kernel, self.hidden, 2), (kernel, self.units * self._halves, 1)]

    @property
    def _halves(self) -> int:
        return 2 if self.model.gated else 1

    def _attention(self) -> Iterator[tuple[str, float, float]]:
        """Queries, keys and values made contiguous, rotated, repeated; the core; its heads side by side."""
        model = self.model
        yield from [("transpose", self.queries, 2), ("transpose", self.keys, 2)]
        if model.position == "rope":
            yield from [("rotate", self.queries, 1), ("rotate", self.keys, 1)]
        if model.query_heads_per_group > 1:
            yield from [("repeat", self.queries, 2), ("function", 1, 2)]
        yield from self._core("attention")

    def _attention_backward(self) -> Iterator[tuple[str, float, float]]:
        model = self.model
        yield from self._core("attention_backward")
        yield "transpose", self.queries, 1
        if model.query_heads_per_group > 1:
            added = 2.0 * (model.query_heads_per_group - 1)
            yield from [("transpose", self.keys, 2), ("add_", self.keys, added), ("function_backward_16", 1, 2)]
        if model.position == "rope":
            yield from [("rotate_backward", self.queries, 1), ("rotate_backward", self.keys, 1)]
        yield "transpose", self.queries + 2 * self.keys, 1

    def _core(self, name: str) -> Kernels:
        heads = self.plan.batch.micro_size * self.groups * self.model.query_heads_per_group
        return [(name, self.plan.batch.sequence, heads)]

    def _activation(self) -> Kernels:
        match self.model.activation:
            case "swiglu" | "geglu":
                kernel = "silu" if self.model.activation == "swiglu" else "gelu"
                return [("take_second", self.units, 2), (kernel, self.units, 1), ("add", self.units, 1)]
            case "relu_squared":
                return [("add", self.units, 2)]
            case name:
                return [(name, self.units, 1)]

    def _activation_backward(self) -> Kernels:
        match self.model.activation:
            case "swiglu" | "geglu":
                kernel = "silu_backward" if self.model.activation == "swiglu" else "gelu_backward"
                return [("add", self.units, 2), (kernel, self.units, 1), ("interleave", self.units, 1)]
            case "relu_squared":
                return [("add", self.units, 3)]
            case name:
                return [(f"{name}_backward", self.units, 1)]
