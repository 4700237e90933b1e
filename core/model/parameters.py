"""Every parameter of a model: its canonical name and shape, what cuts it, and how it starts.

Canonical layouts, chosen so that every cut is a slice of whole leaves:
- `attention.qkv` rows are grouped by key/value head: the group's query heads, then its key head, then its value head;
- `mlp.up` of a gated MLP interleaves rows: row 2i is the gate of unit i, row 2i + 1 its up-projection;
- latent attention has rows by head: `q` and `q_up` the part without positions, then the rotary part; `kv_up` the key's
  part without positions, then the value; the last rows of `kv_down` are the rotary key that all heads share;
- linear weights are [out_features, in_features], as in torch; those of experts are stacked, [num_experts,
  out_features, in_features].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .model import ModelSpec

Feature = Literal["heads", "ffn", "vocab", "expert_ffn", "shared_ffn"]
"""The feature axis whose leaves tensor parallelism cuts: key/value groups, MLP units, vocabulary rows, and the units of
one expert and of the shared experts."""


TOKEN_TABLE = "embedding.tokens.weight"
"""The token table, which a tied model also uses as its output head."""

POSITION_TABLE = "embedding.positions.weight"
"""The table of learned positions."""


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
    yield Parameter(TOKEN_TABLE, (model.vocab_size, model.hidden_size), (0, "vocab"), init_std=0.02)
    if model.position == "learned":
        yield Parameter(POSITION_TABLE, (model.max_positions, model.hidden_size), init_std=0.02)


def layer_parameters(model: ModelSpec, layer: int) -> Iterator[Parameter]:
    """One transformer layer: pre-norm attention and pre-norm MLP. Residual outputs start at 0.02/sqrt(2L)
    (GPT-2, section 2.3)."""
    prefix = layer_prefix(layer)
    yield from _norm(model, f"{prefix}.attention.norm")
    yield from (_latent_attention if model.is_mla else _attention)(model, f"{prefix}.attention")
    yield from _norm(model, f"{prefix}.mlp.norm")
    if not model.layer_is_moe(layer):
        yield from _mlp(model, f"{prefix}.mlp", model.ffn_hidden_size, "ffn")
        return
    yield Parameter(f"{prefix}.mlp.router.weight", (model.num_experts, model.hidden_size), init_std=0.02)
    yield from _mlp(model, f"{prefix}.mlp.experts", model.expert_width, "expert_ffn", num_experts=model.num_experts)
    if model.num_shared_experts:
        yield from _mlp(model, f"{prefix}.mlp.shared", model.shared_expert_width, "shared_ffn")


def mtp_prefix(depth: int) -> str:
    """`mtp.0` for the names of a multi-token-prediction module's parameters and operations, but for
    its transformer layer's."""
    return f"mtp.{depth}"


def mtp_parameters(model: ModelSpec, depth: int) -> Iterator[Parameter]:
    """One module of multi-token prediction (DeepSeek-V3, section 2.2): norms of both inputs, their projection, a
    transformer layer, which is numbered after the model's own, and the norm before the output head. Token table and
    head are the model's."""
    prefix, hidden = mtp_prefix(depth), model.hidden_size
    yield from _norm(model, f"{prefix}.embedding_norm")
    yield from _norm(model, f"{prefix}.hidden_norm")
    yield Parameter(f"{prefix}.projection.weight", (hidden, 2 * hidden), init_std=0.02)
    yield from layer_parameters(model, model.num_layers + depth)
    yield from _norm(model, f"{prefix}.norm")


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


def _attention(model: ModelSpec, prefix: str) -> Iterator[Parameter]:
    group_rows = (model.query_heads_per_group + 2) * model.head_dim
    group_columns = model.query_heads_per_group * model.head_dim
    rows, bias = (model.num_kv_heads * group_rows, model.hidden_size), model.bias or model.qkv_bias
    yield from _linear(f"{prefix}.qkv", rows, (0, "heads"), group_rows, bias=bias)
    if model.qk_norm:
        yield from _norm(model, f"{prefix}.query_norm", model.head_dim)
        yield from _norm(model, f"{prefix}.key_norm", model.head_dim)
    columns = model.num_kv_heads * group_columns
    yield from _linear(
        f"{prefix}.output",
        (model.hidden_size, columns),
        (1, "heads"),
        group_columns,
        _residual_std(model),
        bias=model.bias,
    )


def _latent_attention(model: ModelSpec, prefix: str) -> Iterator[Parameter]:
    """DeepSeek-V2, arXiv 2405.04434, equations 37-47. The vectors of low rank are normed;
    down-projections are not cut."""
    heads, hidden, bias = model.num_heads, model.hidden_size, model.bias
    if model.q_lora_rank:
        yield from _linear(f"{prefix}.q_down", (model.q_lora_rank, hidden), bias=bias)
        yield from _norm(model, f"{prefix}.q_norm", model.q_lora_rank)
    inputs, name = (model.q_lora_rank, "q_up") if model.q_lora_rank else (hidden, "q")
    query = model.qk_nope_head_dim + model.qk_rope_head_dim
    yield from _linear(f"{prefix}.{name}", (heads * query, inputs), (0, "heads"), query, bias=bias)
    yield from _linear(f"{prefix}.kv_down", (model.kv_lora_rank + model.qk_rope_head_dim, hidden), bias=bias)
    yield from _norm(model, f"{prefix}.kv_norm", model.kv_lora_rank)
    pair = model.qk_nope_head_dim + model.v_head_dim
    yield from _linear(f"{prefix}.kv_up", (heads * pair, model.kv_lora_rank), (0, "heads"), pair, bias=bias)
    columns = heads * model.v_head_dim
    yield from _linear(
        f"{prefix}.output", (hidden, columns), (1, "heads"), model.v_head_dim, _residual_std(model), bias=bias
    )


def _mlp(model: ModelSpec, prefix: str, width: int, feature: Feature, *, num_experts: int = 0) -> Iterator[Parameter]:
    """Two products; `num_experts` of them stacked where that is given."""
    up, hidden = 2 if model.gated else 1, model.hidden_size
    yield from _linear(f"{prefix}.up", (up * width, hidden), (0, feature), up, bias=model.bias, num_experts=num_experts)
    std = _residual_std(model)
    yield from _linear(
        f"{prefix}.down", (hidden, width), (1, feature), 1, std, bias=model.bias, num_experts=num_experts
    )


def _residual_std(model: ModelSpec) -> float:
    return 0.02 / math.sqrt(2 * model.num_layers)


def _norm(model: ModelSpec, name: str, width: int | None = None) -> Iterator[Parameter]:
    shape = (model.hidden_size if width is None else width,)
    yield Parameter(f"{name}.weight", shape, constant=1.0, decay=False)
    if model.norm == "layernorm":
        yield Parameter(f"{name}.bias", shape, constant=0.0, decay=False)


def _linear(
    name: str,
    shape: tuple[int, int],
    cut: tuple[int, Feature] | None = None,
    unit: int = 1,
    std: float = 0.02,
    *,
    bias: bool,
    num_experts: int = 0,
) -> Iterator[Parameter]:
    """Weight and bias; with `num_experts` so many of them, stacked."""
    stack, expert = ((num_experts,) if num_experts else ()), num_experts > 0
    stacked_cut = None if cut is None else (cut[0] + len(stack), cut[1])
    yield Parameter(f"{name}.weight", (*stack, *shape), stacked_cut, unit, init_std=std, expert=expert)
    if bias:
        bias_cut = None if cut is None or cut[0] == 1 else stacked_cut
        yield Parameter(
            f"{name}.bias",
            (*stack, shape[0]),
            bias_cut,
            unit if bias_cut else 1,
            constant=0.0,
            decay=False,
            expert=expert,
        )
