"""Every parameter of a model: its canonical name and shape, what cuts it, and how it starts.

They follow from the operators (`core.model.operators`, which says how rows are grouped). Linear weights are
[out_features, in_features], as in torch; those of experts are stacked, [num_experts, out_features, in_features].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from .blocks import (
    Block,
    embedding_block,
    head_block,
    layer_prefix,
    model_blocks,
    prediction_blocks,
)
from .model import ModelSpec
from .operators import Feature, Kind, Operator, layer_operators
from .roles import Role

TOKEN_TABLE = "embedding.tokens.weight"
"""The token table, which a tied model also uses as its output head."""

POSITION_TABLE = "embedding.positions.weight"
"""The table of learned positions."""

TABLES = (TOKEN_TABLE, POSITION_TABLE)
"""Parameters of which a token has a row, whose gradients need the tokens of all ranks."""

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


def embedding_parameters(model: ModelSpec) -> tuple[Parameter, ...]:
    """Token table, the position table where positions are learned, and the norm of embeddings where there is one."""
    return block_parameters(model, embedding_block(model))


def token_table(model: ModelSpec) -> Parameter:
    """The first of them."""
    return embedding_parameters(model)[0]


def layer_parameters(model: ModelSpec, layer: int) -> Iterator[Parameter]:
    """One transformer layer, those of multi-token prediction counting on."""
    return operator_parameters(model, layer_operators(model, layer), layer_prefix(layer))


def mtp_parameters(model: ModelSpec, depth: int) -> Iterator[Parameter]:
    """One module of multi-token prediction (DeepSeek-V3, section 2.2): norms of both inputs, their projection, a
    transformer layer, and the norm before the output head. Token table and head are the model's."""
    for block in prediction_blocks(model)[3 * depth : 3 * (depth + 1)]:
        yield from block_parameters(model, block)


def head_parameters(model: ModelSpec) -> tuple[Parameter, ...]:
    """Final norm, and the output table unless it is tied to the token table."""
    return block_parameters(model, head_block(model))


def parameters(model: ModelSpec) -> Iterator[Parameter]:
    """All parameters of the model in canonical order, tied tensors once."""
    for block in model_blocks(model):
        yield from block_parameters(model, block)


@lru_cache(maxsize=4096)
def block_parameters(model: ModelSpec, block: Block) -> tuple[Parameter, ...]:
    """Those of one block; kept, because a search asks for the same ones over and over."""
    return tuple(operator_parameters(model, block.operators, block.prefix))


def count_parameters(model: ModelSpec) -> int:
    """Exact count of a model's parameters, tied tensors once."""
    return sum(parameter.num_elements for parameter in parameters(model))


def count_active_parameters(model: ModelSpec) -> int:
    """Those that one token passes through: all but the experts it does not take, multi-token prediction included."""
    idle = model.num_experts - model.experts_per_token
    experts = (parameter for parameter in parameters(model) if parameter.expert)
    return count_parameters(model) - sum(each.num_elements // model.num_experts * idle for each in experts)


def expert_biases(model: ModelSpec) -> Iterator[Parameter]:
    """What training changes without a gradient, fp32, whole on every rank: the bias of the experts of every router
    (`ModelSpec.expert_bias`). They are among no model's `parameters`."""
    if model.expert_bias:
        for block in model_blocks(model):
            if any(operator.role is Role.ROUTER for operator in block.operators):
                yield Parameter(expert_bias_name(block.layer), (model.num_experts,), constant=0.0, decay=False)


def expert_bias_name(layer: int) -> str:
    """`layers.3.mlp.router.expert_bias`."""
    return f"{layer_prefix(layer)}.mlp.router.expert_bias"


def operator_parameters(model: ModelSpec, operators: Iterable[Operator], prefix: str = "") -> Iterator[Parameter]:
    """The parameters of operators named behind `prefix`, without those that they share."""
    cut: tuple[int, Feature] | None
    for operator in operators:
        if operator.shared:
            continue
        name = operator.role.named(prefix)
        match operator.kind:
            case Kind.LOOK_UP:
                cut = (0, operator.axis) if operator.axis else None
                yield Parameter(f"{name}.weight", (operator.takes.size, operator.makes.size), cut, init_std=INIT_STD)
            case Kind.NORM:
                start, rows = 1.0 - model.norm_offset, operator.makes
                cut, unit = ((0, rows.axis), rows.unit) if rows.axis else (None, 1)
                yield Parameter(f"{name}.weight", (rows.size,), cut, unit, constant=start, decay=False)
                if model.norm == "layernorm" and model.norm_bias:
                    yield Parameter(f"{name}.bias", (operator.makes.size,), constant=0.0, decay=False)
            case Kind.LINEAR:
                yield from _linear(model, operator, name)
            case Kind.ATTEND if operator.sinks:
                heads = model.num_heads, model.query_heads_per_group
                yield Parameter(f"{name}.sinks", heads[:1], (0, "heads"), heads[1], init_std=INIT_STD, decay=False)


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
