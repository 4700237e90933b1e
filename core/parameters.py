"""Every parameter of a model: its canonical name and shape, what cuts it, and how it starts.

Canonical layouts, chosen so that every cut is a slice of whole leaves:
- `attention.qkv` rows are grouped by key/value head: the group's query heads, then its key head, then its value head;
- `mlp.up` of a gated MLP interleaves rows: row 2i is the gate of unit i, row 2i + 1 its up-projection;
- linear weights are [out_features, in_features], as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .model import ModelSpec

if TYPE_CHECKING:
    from .stages import StageLayers

Feature = Literal["heads", "ffn", "vocab"]
"""The feature axis whose leaves tensor parallelism cuts: key/value groups, MLP units, vocabulary rows."""


TOKEN_TABLE = "embedding.tokens.weight"
"""The token table, which a tied model also uses as its output head."""


@dataclass(frozen=True)
class Parameter:
    """One tensor of the model. `cut` says which dimension tensor parallelism cuts and along which feature; None means replicated.

    `unit` is the number of rows (or columns) of the cut dimension per item of the feature. `init` is the standard deviation of a
    normal draw, or a constant when `constant` is set. `decay` tells whether weight decay applies.
    """

    name: str
    shape: tuple[int, ...]
    cut: tuple[int, Feature] | None = None
    unit: int = 1
    init_std: float = 0.0
    constant: float | None = None
    decay: bool = True

    @property
    def num_elements(self) -> int:
        """Elements of the full tensor."""
        return math.prod(self.shape)


def layer_prefix(layer: int) -> str:
    """`layers.3` for the names of a transformer layer's parameters and operations."""
    return f"layers.{layer}"


def embedding_parameters(model: ModelSpec) -> Iterator[Parameter]:
    """Token table, and the position table where positions are learned."""
    yield Parameter(TOKEN_TABLE, (model.vocab_size, model.hidden_size), (0, "vocab"), init_std=0.02)
    if model.position == "learned":
        yield Parameter("embedding.positions.weight", (model.max_positions, model.hidden_size), init_std=0.02)


def layer_parameters(model: ModelSpec, layer: int) -> Iterator[Parameter]:
    """One transformer layer: pre-norm attention and pre-norm MLP. Residual outputs start at 0.02/sqrt(2L) (GPT-2, section 2.3)."""
    prefix, hidden = layer_prefix(layer), model.hidden_size
    group_rows = (model.query_heads_per_group + 2) * model.head_dim
    group_columns = model.query_heads_per_group * model.head_dim
    up = 2 if model.gated else 1
    residual_std = 0.02 / math.sqrt(2 * model.num_layers)
    yield from _norm(model, f"{prefix}.attention.norm")
    yield from _linear(model, f"{prefix}.attention.qkv", (model.num_kv_heads * group_rows, hidden), (0, "heads"), group_rows, 0.02)
    columns = model.num_kv_heads * group_columns
    yield from _linear(model, f"{prefix}.attention.output", (hidden, columns), (1, "heads"), group_columns, residual_std)
    yield from _norm(model, f"{prefix}.mlp.norm")
    yield from _linear(model, f"{prefix}.mlp.up", (up * model.ffn_hidden_size, hidden), (0, "ffn"), up, 0.02)
    yield from _linear(model, f"{prefix}.mlp.down", (hidden, model.ffn_hidden_size), (1, "ffn"), 1, residual_std)


def head_parameters(model: ModelSpec) -> Iterator[Parameter]:
    """Final norm, and the output table unless it is tied to the token table."""
    yield from _norm(model, "head.norm")
    if not model.tied_embeddings:
        yield Parameter("head.output.weight", (model.vocab_size, model.hidden_size), (0, "vocab"), init_std=0.02)


def parameters(model: ModelSpec) -> Iterator[Parameter]:
    """All parameters of the model in canonical order, tied tensors once."""
    yield from embedding_parameters(model)
    for layer in range(model.num_layers):
        yield from layer_parameters(model, layer)
    yield from head_parameters(model)


@dataclass(frozen=True)
class Usage:
    """One place where a parameter's gradient is summed. `role` is `embedding` or `output` for a tied table, else empty.

    A tied table is used at both ends of the model, possibly on two ranks: each use has a sum of its own, and the finished sums are
    added, embedding first.
    """

    parameter: Parameter
    role: Literal["", "embedding", "output"] = ""

    @property
    def key(self) -> str:
        """`name`, or `name@role` for a tied table."""
        return f"{self.parameter.name}@{self.role}" if self.role else self.parameter.name


def stage_parameters(model: ModelSpec, stage: StageLayers) -> tuple[Parameter, ...]:
    """The parameters a stage holds, in canonical order. A tied table lies on the first and on the last stage."""
    found: list[Parameter] = list(embedding_parameters(model)) if stage.embedding else []
    for layer in stage.layers:
        found += layer_parameters(model, layer)
    if stage.head:
        found += head_parameters(model)
        if model.tied_embeddings and not stage.embedding:
            found.append(next(embedding_parameters(model)))
    return tuple(found)


def stage_usages(model: ModelSpec, stage: StageLayers) -> tuple[Usage, ...]:
    """The gradient sums of a stage, in canonical order: one per parameter, two for a tied table used at both ends of one stage."""
    usages: list[Usage] = []
    for parameter in stage_parameters(model, stage):
        if model.tied_embeddings and parameter.name == TOKEN_TABLE:
            usages += [Usage(parameter, "embedding")] if stage.embedding else []
            usages += [Usage(parameter, "output")] if stage.head else []
        else:
            usages.append(Usage(parameter))
    return tuple(usages)


def _norm(model: ModelSpec, name: str) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (model.hidden_size,), constant=1.0, decay=False)
    if model.norm == "layernorm":
        yield Parameter(f"{name}.bias", (model.hidden_size,), constant=0.0, decay=False)


def _linear(model: ModelSpec, name: str, shape: tuple[int, int], cut: tuple[int, Feature], unit: int, std: float) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", shape, cut, unit, init_std=std)
    if model.bias:
        bias_cut: tuple[int, Feature] | None = (0, cut[1]) if cut[0] == 0 else None
        yield Parameter(f"{name}.bias", (shape[0],), bias_cut, unit if bias_cut else 1, constant=0.0, decay=False)
