"""Every parameter of a model: its canonical name and shape, what cuts it, and how it starts.

They follow from the operators (`core.model.operators`, which says how rows are grouped). Linear weights are
[out_features, in_features], as in torch; those of experts are stacked, [num_experts, out_features, in_features].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .model import ModelSpec
from .operators import (
    Feature,
    Kind,
    Operator,
    embedding_operators,
    head_operators,
    layer_operators,
    prediction_operators,
)
from .roles import Role

TOKEN_TABLE = "embedding.tokens.weight"
"""The token table, which a tied model also uses as its output head."""

POSITION_TABLE = "embedding.positions.weight"
"""The table of learned positions."""

INIT_STD = 0.02
"""Standard deviation with which weights start (GPT-2, section 2.3)."""


@dataclass(frozen=True)
class Parameter:
    """One tensor of the model. `cut` says which dimension tensor parallelism cuts and along which
    feature; None means replicated.

    `unit` is the number of rows (or columns) of the cut dimension per item of the feature. `init` is the
    standard deviation of a normal draw, or a constant when `constant` is set. `decay` says whether weight
    decay applies. The first dimension of an `expert` counts experts, which expert parallelism cuts, and its
    `cut` is over expert tensor parallelism.
    """

    name: str
    shape: tuple[int, ...]
    cut: tuple[int, Feature] | None = None
    unit: int = 1
    init_std: float = 0.0
    constant: float | None = None
    decay: bool = True
    expert: bool = False

    @property
    def num_elements(self) -> int:
        """Elements of the full tensor."""
        return math.prod(self.shape)


def layer_prefix(layer: int) -> str:
    """`layers.3` for the names of a transformer layer's parameters and operations."""
    return f"layers.{layer}"


def embedding_parameters(model: ModelSpec) -> Iterator[Parameter]:
    """Token table, and the position table where positions are learned."""
    yield from _parameters_of(model, embedding_operators(model))


def layer_parameters(model: ModelSpec, layer: int) -> Iterator[Parameter]:
    """One transformer layer. Residual outputs start at 0.02/sqrt(2L) (GPT-2, section 2.3)."""
    yield from _parameters_of(model, layer_operators(model, layer), layer_prefix(layer))


def mtp_prefix(depth: int) -> str:
    """`mtp.0` for the names of a multi-token-prediction module's parameters and operations, but for
    its transformer layer's."""
    return f"mtp.{depth}"


def mtp_parameters(model: ModelSpec, depth: int) -> Iterator[Parameter]:
    """One module of multi-token prediction (DeepSeek-V3, section 2.2): norms of both inputs, their projection, a
    transformer layer, which is numbered after the model's own, and the norm before the output head. Token table and
    head are the model's."""
    norm, *_ = head_operators(model, Role.OUTPUT_NORM)
    yield from _parameters_of(model, prediction_operators(model), mtp_prefix(depth))
    yield from layer_parameters(model, model.num_layers + depth)
    yield from _parameters_of(model, (norm,), mtp_prefix(depth))


def head_parameters(model: ModelSpec) -> Iterator[Parameter]:
    """Final norm, and the output table unless it is tied to the token table."""
    tied = model.tied_embeddings
    yield from _parameters_of(model, (each for each in head_operators(model) if not (tied and each.role is Role.HEAD)))


def parameters(model: ModelSpec) -> Iterator[Parameter]:
    """All parameters of the model in canonical order, tied tensors once."""
    yield from embedding_parameters(model)
    for layer in range(model.num_layers):
        yield from layer_parameters(model, layer)
    for depth in range(model.num_mtp_layers):
        yield from mtp_parameters(model, depth)
    yield from head_parameters(model)


def count_parameters(model: ModelSpec) -> int:
    """Exact count of a model's parameters, tied tensors once."""
    return sum(parameter.num_elements for parameter in parameters(model))


def count_active_parameters(model: ModelSpec) -> int:
    """Those that one token passes through: all but the experts it does not take, multi-token prediction included."""
    experts = sum(parameter.num_elements for parameter in parameters(model) if parameter.expert)
    idle = experts // model.num_experts * (model.num_experts - model.experts_per_token) if model.is_moe else 0
    return count_parameters(model) - idle


def expert_biases(model: ModelSpec) -> Iterator[Parameter]:
    """What training changes without a gradient, fp32, whole on every rank: the bias of the experts of every router
    (`ModelSpec.expert_bias`). They are among no model's `parameters`."""
    if model.expert_bias:
        for layer in range(model.first_dense_layers, model.num_layers + model.num_mtp_layers):
            yield Parameter(expert_bias_name(layer), (model.num_experts,), constant=0.0, decay=False)


def expert_bias_name(layer: int) -> str:
    """`layers.3.mlp.router.expert_bias`."""
    return f"{layer_prefix(layer)}.mlp.router.expert_bias"


def _parameters_of(model: ModelSpec, operators: Iterable[Operator], prefix: str = "") -> Iterator[Parameter]:
    for operator in operators:
        name = operator.role.named(prefix)
        match operator.kind:
            case Kind.LOOK_UP:
                cut: tuple[int, Feature] | None = (0, operator.axis) if operator.axis else None
                yield Parameter(f"{name}.weight", (operator.takes.size, operator.makes.size), cut, init_std=INIT_STD)
            case Kind.NORM:
                yield Parameter(f"{name}.weight", (operator.makes.size,), constant=1.0, decay=False)
                if model.norm == "layernorm":
                    yield Parameter(f"{name}.bias", (operator.makes.size,), constant=0.0, decay=False)
            case Kind.LINEAR:
                yield from _linear(model, operator, name)


def _linear(model: ModelSpec, operator: Operator, name: str) -> Iterator[Parameter]:
    """Weight and bias, those of experts stacked."""
    stack = (model.num_experts,) if operator.experts else ()
    std = INIT_STD / math.sqrt(2 * model.num_layers) if operator.ends else INIT_STD
    cut_side = operator.takes if operator.cuts_input else operator.makes
    cut: tuple[int, Feature] | None = None
    if operator.axis is not None:
        cut = (len(stack) + operator.cuts_input, operator.axis)
    unit = cut_side.unit if cut else 1
    shape = (*stack, operator.makes.size, operator.takes.size)
    yield Parameter(f"{name}.weight", shape, cut, unit, init_std=std, expert=operator.experts)
    if operator.bias:
        cut, unit = (None, 1) if operator.cuts_input else (cut, unit)  # what is summed over ranks gets one bias
        yield Parameter(f"{name}.bias", shape[:-1], cut, unit, constant=0.0, decay=False, expert=operator.experts)
