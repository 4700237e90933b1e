"""What our own backend's actions cost on the machine that `calibrate` measured, kernel by kernel.

The kernels are those of `backend.model`, `backend.tensor_parallel` and `backend.optimizers` with fast numerics,
counted from their code (exact numerics are priced as fast ones). A layer costs what one of next to no size takes, which
was measured, and what its kernels take beyond their smallest. A device of a calibrated host is one rank process with
one thread: its kernels follow each other, and nothing is launched ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ...core.layout.stage_parameters import stage_parameters
from ...core.model.model import ModelSpec
from ...core.model.model_fields import GATE_FIELDS, MULTIPLIERS, NORM_FIELDS
from ...core.model.operators import Kind, Operator
from ...core.model.parameters import Parameter
from ...core.model.roles import Role
from ...core.plan.plan import Plan
from ...core.program import Collective, Group, Op, Operation, Product, group_ops, stage_groups
from ...core.program.tensors import Tensors
from ..compute.host_kernels import Variant, attention_head_s, host_product_s, kernel_s
from ..engine.seconds import NOTHING, Seconds
from ..stack.profiles import profile_of
from .blocks import COMPONENT_OF_AXIS, Block, Part
from .host_cores import skew_s

Kernels = Iterable[tuple[str, float, float]]
"""Kernel, elements of one call, calls."""

BACKWARD_FUNCTIONS = 16
"""Functions in the measured chain `function_backward_16`."""

CUTS_INPUT = (Role.ATTENTION_OUTPUT, Role.DOWN)
"""Layers whose input features are cut; all other products cut output features."""

COUNTED = (
    *(Role.TOKENS, Role.POSITIONS, Role.ATTENTION_NORM, Role.QKV, Role.CORE, Role.ATTENTION_OUTPUT),
    *(Role.MLP_NORM, Role.UP, Role.ACTIVATION, Role.DOWN, Role.HEAD_NORM, Role.HEAD, Role.LOSS),
)
"""Operators whose kernels were measured."""

GATE_KERNELS = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
"""Activation with a gate -> the measured kernel of the gate."""

GATED = Role.UP
"""The layer whose two halves, gate and up-projection, are multiplied one after the other."""


def is_host(plan: Plan) -> bool:
    """True when a plan runs our own backend on a calibrated host, with layers and switches whose
    kernels are counted here.

    Everything else that names a calibrated cluster is priced from its rates, as on any device.
    """
    if not plan.cluster.kernel_curve or not profile_of(plan).host_kernels_counted:
        return False
    layout, groups = plan.layout, (group for stage in plan.stages for group in stage_groups(plan, stage.stage))
    plain = all(is_counted(group) for group in groups) and is_measured(plan.model)
    whole = not (layout.sequence_parallel or layout.zero) and layout.cp == layout.ep == 1
    return plain and whole and plan.precision.dtype == "fp32" and plan.recompute.mode == "none"


def is_counted(group: Group) -> bool:
    """Whether the kernels of its operators are counted here; layers were measured with two norms."""
    norms = group.num(Role.ATTENTION_NORM) == group.num(Role.MLP_NORM)
    return norms and all(operator.role in COUNTED for operator in group.operators)


def is_measured(model: ModelSpec) -> bool:
    """Whether a model does without what no kernel was measured for: factors of hidden states and of norms, limits of a
    gate, a LayerNorm without bias, ALiBi."""
    refined = (*MULTIPLIERS, *NORM_FIELDS, *GATE_FIELDS)
    plain = all(getattr(model, name) == getattr(ModelSpec, name) for name in refined)
    return plain and model.activation != "quick_geglu" and model.position != "alibi"


def rate_share(plan: Plan) -> float:
    """Share of the measured rates of kernels that a rank keeps in a step, and where all cores have a rank at work."""
    cluster = plan.cluster
    busy = plan.layout.world_size >= cluster.num_cores > 1
    return (cluster.busy_core_share if busy else 1.0) / cluster.step_over_kernels


def host_block(plan: Plan, group: Group, collective_s: Callable[[Collective], float]) -> Block:
    """The price of one part of a stage for one microbatch."""
    pricer = _HostPricer(plan, collective_s)
    works = group_ops(plan, group)
    tokens = pricer.tokens
    operators = group.operators
    if group.kind == "layer":
        layer = f"layer_{'gated' if plan.model.gated else 'plain'}"
        forward = pricer.kernels([(layer, 1, 1)]) + pricer.kernels(tokens.forward(operators), beyond_least=True)
        backward = pricer.kernels([(f"{layer}_backward", 1, 1)]) + pricer.kernels(
            tokens.backward(operators), beyond_least=True
        )
        weight = pricer.kernels(tokens.weight(operators), beyond_least=True)
    else:
        forward, backward = pricer.kernels(tokens.forward(operators)), pricer.kernels(tokens.backward(operators))
        weight = pricer.kernels(tokens.weight(operators))
    meetings = {"forward": 0, "input": 0}
    for work in works:
        forward += pricer.part(work, "forward")
        backward += pricer.part(work, "input")
        weight += pricer.part(work, "weight")
        meetings["forward"] += sum(isinstance(operation, Collective) for operation in work.forward)
        meetings["input"] += sum(isinstance(operation, Collective) for operation in work.input_gradient)
    both = _met(plan, backward + weight, meetings["input"])
    return Block(_met(plan, forward, meetings["forward"]), _met(plan, backward, meetings["input"]), weight, both)


def _met(plan: Plan, part: Part, meetings: int) -> Part:
    """A pass with the waits of its tensor-parallel ranks for each other."""
    return part + Part(Seconds(tp_comm=skew_s(plan, part.seconds.compute, meetings)), 0) if meetings else part


def host_step_s(plan: Plan, stages: tuple[int, ...]) -> float:
    """Seconds of the update of a rank that holds `stages`, besides what it sends: for every tensor the squares of its
    rows, and AdamW, which divides by the token count and clips as it goes."""
    cluster, total_s = plan.cluster, 0.0
    for parameter in (parameter for stage in stages for parameter in stage_parameters(plan.model, plan.stages[stage])):
        elements = _local(plan, parameter)
        total_s += kernel_s(cluster, "square_sum", elements) + kernel_s(cluster, "adamw", elements)
    losses = plan.num_microbatches * sum(plan.stages[stage].head for stage in stages)
    return (
        total_s + losses * kernel_s(cluster, "square_sum", plan.batch.micro_size * plan.batch.sequence)
    ) / rate_share(plan)


def host_check_s(plan: Plan, stage: int) -> float:
    """Seconds to look whether all gradients of a stage are finite, before they are reduced: a sum over
    each and a look at that."""
    elements = [_local(plan, parameter) for parameter in stage_parameters(plan.model, plan.stages[stage])]
    cluster = plan.cluster
    return sum(kernel_s(cluster, "row_mean", each) + kernel_s(cluster, "add", 1) for each in elements) / rate_share(
        plan
    )


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

    def kernels(self, found: Kernels, *, beyond_least: bool = False) -> Part:
        """Kernels one after the other; with `beyond_least` only what they take longer than on the fewest elements,
        which is part of what a layer costs however small it is."""
        cluster, total_s, calls = self.plan.cluster, 0.0, 0.0
        for name, elements, count in found:
            if name.startswith("attention"):
                each_s = attention_head_s(cluster, name, self.plan.model.head_dim, elements)
            else:
                each_s = kernel_s(cluster, name, elements)
                if beyond_least:
                    each_s = max(0.0, each_s - kernel_s(cluster, name, 1))
            total_s += count * (each_s / BACKWARD_FUNCTIONS if name == "function_backward_16" else each_s)
            calls += count
        return Part(Seconds(compute=total_s / rate_share(self.plan)), round(calls))

    def part(self, work: Op, of: str) -> Part:
        """Products and collectives of one layer in a pass, with the sum over microbatches of its weight gradient."""
        if work.role is Role.CORE:
            return NOTHING_PART
        found = {"forward": work.forward, "input": work.input_gradient, "weight": work.weight_gradient}[of]
        total = Part()
        for operation in found:
            total += self._operation(work.role, operation, of)
        return total

    def _operation(self, role: Role, operation: Operation, of: str) -> Part:
        if isinstance(operation, Collective):
            return Part(Seconds(**{COMPONENT_OF_AXIS[operation.axis]: self.collective_s(operation)}), 1)
        assert isinstance(operation, Product)
        shape = {"m": operation.m, "n": operation.n, "k": operation.k}
        halves = self.plan.model.gated and role is GATED
        if halves:
            cut = {"forward": "n", "input": "k", "weight": "m"}[of]
            shape[cut] //= 2
        parts = [(variant, share) for variant, share in _variants(role, of, self.tokens.sums) if share]
        seconds = sum(share * host_product_s(self.plan.cluster, variant, **shape) for variant, share in parts)
        return Part(Seconds(compute=(1 + halves) * seconds / rate_share(self.plan)), 1 + halves)


NOTHING_PART = Part(NOTHING, 0)


def _variants(role: Role, of: str, sums: float) -> list[tuple[Variant, float]]:
    """Which products a pass of a layer asks for, and how many of each. Weights are stored with the cut features first,
    so a row-parallel layer multiplies forward as a column-parallel one backward; weight gradients are added to what is
    there by the product itself."""
    if of == "weight":
        return [("tn", 1 - sums), ("tn_", sums)]
    return [("nt" if (role in CUTS_INPUT) == (of == "input") else "nn", 1.0)]


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

    def forward(self, operators: Iterable[Operator]) -> Iterator[tuple[str, float, float]]:
        """A forward."""
        for operator in operators:
            match operator.kind:
                case Kind.LOOK_UP if operator.axis is None:
                    yield "add", self.hidden, 2
                case Kind.LOOK_UP:
                    yield from [("add", self.hidden, 1), ("add", self.tokens, 1), ("function", 1, 1)]
                    if self.is_cut:  # tokens of other ranks are looked up as token 0 and made zero
                        yield from [("add", self.tokens, 6), ("add_", self.hidden, 1)]
                case Kind.NORM:
                    yield from self._norm()
                case Kind.LINEAR if operator.bias:
                    yield "add_", self._made(operator), 1
                case Kind.ATTEND:
                    yield from self._attention(operator)
                case Kind.ACTIVATE:
                    yield from self._activation()
                case Kind.CROSS_ENTROPY:
                    yield from [("function", 1, 3), ("add", self.tokens, 8)]
                    if self.is_cut:
                        yield from [("row_mean", self.logits, 2), ("add", self.logits, 1), ("exp", self.logits, 1)]
                        yield "add", self.tokens, 14
                    else:
                        yield "cross_entropy", self.logits, 1
            if operator.ends:
                yield "add", self.hidden, 1

    def backward(self, operators: Iterable[Operator]) -> Iterator[tuple[str, float, float]]:
        """An input gradient."""
        for operator in operators:
            match operator.kind:
                case Kind.LOOK_UP if operator.axis is not None:
                    yield "function_backward_16", 1, 1
                case Kind.NORM:
                    yield from self._norm_backward()
                case Kind.ATTEND:
                    yield from self._attention_backward(operator)
                case Kind.ACTIVATE:
                    yield from self._activation_backward()
                case Kind.CROSS_ENTROPY:
                    yield "function_backward_16", 1, 3
                    if self.is_cut:
                        yield from [("add", self.logits, 1), ("add", self.tokens, 7)]
                    else:
                        yield "cross_entropy_backward", self.logits, 1
            if operator.ends:
                yield "add_", self.hidden, 1

    def weight(self, operators: Iterable[Operator]) -> Iterator[tuple[str, float, float]]:
        """Weight gradients other than those of products."""
        for operator in operators:
            match operator.kind:
                case Kind.LOOK_UP:  # zeros, a row for every token, and the sum over microbatches
                    table = (operator.takes.size if operator.axis is None else self.vocabulary) * self.model.hidden_size
                    yield from [("add_", table, 0.5 + self.sums), ("add", self.hidden, 1)]
                case Kind.NORM:
                    yield from self._norm_weight()
                case Kind.LINEAR if operator.bias:
                    yield "token_sum", self._made(operator), 1

    def _made(self, operator: Operator) -> int:
        """Elements that an operator makes on this rank."""
        return self.tokens * Tensors(self.plan, 0).held(operator.makes)

    @property
    def is_cut(self) -> bool:
        """Whether this rank has a part of the vocabulary only."""
        return self.plan.layout.tp > 1

    @property
    def logits(self) -> int:
        """Elements of the logits of the rank."""
        return self.tokens * self.vocabulary

    def _norm(self) -> Kernels:
        if self.model.norm == "layernorm":
            return [("layer_norm", self.hidden, 1)]
        return [
            ("row_norm", self.hidden, 1),
            ("add", self.tokens, 2),
            ("add", self.hidden, 1),
            ("add_", self.hidden, 1),
        ]

    def _norm_backward(self) -> Kernels:
        if self.model.norm == "layernorm":
            return [("layer_norm_backward", self.hidden, 1)]
        others = [("row_mean", self.hidden, 1), ("add", self.tokens, 1), ("add_", self.hidden, 1)]
        return [("layer_norm_backward", self.hidden, 1), *others]

    def _norm_weight(self) -> Kernels:
        h = self.model.hidden_size
        if self.model.norm == "layernorm":
            return [("add", self.hidden, 3), ("token_sum", self.hidden, 2), ("add_", h, 2 * self.sums)]
        return [("layer_norm_backward", self.hidden, 1), ("add", self.tokens, 1), ("add_", h, self.sums)]

    def _attention(self, core: Operator) -> Iterator[tuple[str, float, float]]:
        """Queries, keys and values taken apart, turned where they lie or made contiguous; repeated; the core and
        its heads side by side."""
        model = self.model
        if core.turns:
            yield from [("rotate", self.queries, 1), ("rotate", self.keys, 1), ("transpose", self.keys, 1)]
        else:
            yield from [("transpose", self.queries, 2), ("transpose", self.keys, 2)]
        if model.query_heads_per_group > 1:
            yield "repeat", self.queries, 2
        yield from self._core("attention")

    def _attention_backward(self, core: Operator) -> Iterator[tuple[str, float, float]]:
        model = self.model
        yield from self._core("attention_backward")
        if model.query_heads_per_group > 1:
            yield from [("transpose", self.keys, 2), ("add_", self.keys, 2.0 * (model.query_heads_per_group - 1))]
        if core.turns:
            yield from [
                ("rotate_backward", self.queries, 1),
                ("rotate_backward", self.keys, 1),
                ("transpose", self.keys, 1),
            ]
        else:
            yield "transpose", self.queries + 2 * self.keys, 1

    def _core(self, name: str) -> Kernels:
        heads = self.plan.batch.micro_size * self.groups * self.model.query_heads_per_group
        return [(name, self.plan.batch.sequence, heads)]

    def _activation(self) -> Kernels:
        match self.model.activation:
            case "swiglu" | "geglu" | "geglu_tanh" as name:
                return [(GATE_KERNELS[name], self.units, 1), ("add", self.units, 1)]
            case "relu_squared":
                return [("add", self.units, 2)]
            case name:
                return [(name, self.units, 1)]

    def _activation_backward(self) -> Kernels:
        match self.model.activation:
            case "swiglu" | "geglu" | "geglu_tanh" as name:
                return [("add", self.units, 2), (f"{GATE_KERNELS[name]}_backward", self.units, 1)]
            case "relu_squared":
                return [("add", self.units, 3)]
            case name:
                return [(f"{name}_backward", self.units, 1)]
