"""The operators of a model in the order of its forward: the one description of each kind of layer.

An operator says what it takes and makes for one token, and which side lies on a feature axis that tensor parallelism
cuts. Parameters, FLOPs and what each rank computes, sends and keeps follow from that (`core.model.parameters`,
`core.program`, `simulator`). What an operator computes is written by hand, in `backend.model` and in the references
that prove it (`verify.run`, `verify.symbolic`).

Canonical layouts, chosen so that every cut is a slice of whole leaves:
- `attention.qkv` rows are grouped by key/value head: the group's query heads, then its key head, then its value head;
- of a head of which rotary positions turn a part, the pairs that turn, (i, i + head_dim/2), come first, so that the
  features of the part are the first of either half;
- `mlp.up` of a gated MLP interleaves rows: row 2i is the gate of unit i, row 2i + 1 its up-projection;
- latent attention has rows by head: `q` and `q_up` the part without positions, then the rotary part; `kv_up` the key's
  part without positions, then the value; the last rows of `kv_down` are the rotary key that all heads share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property, lru_cache
from typing import Literal

from .attention_kinds import layer_turns, layer_window
from .model import ModelSpec
from .roles import Role

Feature = Literal["heads", "ffn", "vocab", "expert_ffn", "shared_ffn"]
"""The feature axis whose leaves tensor parallelism cuts: key/value groups, MLP units, vocabulary rows, and the units of
one expert and of the shared experts."""


class Kind(Enum):
    """What an operator does."""

    LOOK_UP = auto()  # a row of a table for every token
    NORM = auto()
    LINEAR = auto()
    ATTEND = auto()  # scores, softmax, and the product with the values
    ACTIVATE = auto()
    DISPATCH = auto()  # copies of tokens to their experts
    COMBINE = auto()  # and what experts make of them back
    CROSS_ENTROPY = auto()


@dataclass(frozen=True)
class Width:
    """Numbers of one token: `unit` for each of `num_items` on a feature axis, or `unit` that no rank cuts."""

    unit: int
    axis: Feature | None = None
    num_items: int = 1

    @property
    def size(self) -> int:
        """All of them.

        >>> Width(128, "heads", 8).size, Width(4096).size
        (1024, 4096)
        """
        return self.unit * self.num_items


@dataclass(frozen=True)
class Operator:
    """One operator: from `takes` to `makes`.

    `bias` is added to what a linear operator makes. An operator of `experts` has weights of every expert, and a token
    passes through those of its own. A linear operator `ends` the half of a layer whose result is added to the residual
    stream; its weights start smaller. `carries` more numbers of each token come along with the input of a linear
    operator, which does not multiply them (the rotary key that all heads share). `fp32` operators have fp32 operands
    whatever the precision. The weights of a `shared` operator are those of another one. Attention with a
    `window` sees so many tokens, its own the last, else all before it; it `turns` queries and keys by their positions,
    and with `sinks` it has a score of its own for every query head.
    """

    role: Role
    kind: Kind
    takes: Width
    makes: Width
    bias: bool = False
    experts: bool = False
    ends: bool = False
    carries: int = 0
    fp32: bool = False
    shared: bool = False
    window: int = 0
    turns: bool = False
    sinks: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # sizes and prices are kept by operators, and looked up often
        return hash((self.role, self.kind, self.takes, self.makes, self.carries, self.window))

    @cached_property
    def axis(self) -> Feature | None:
        """The feature axis that ranks cut; None where each has all features."""
        return self.makes.axis or self.takes.axis

    @property
    def cuts_input(self) -> bool:
        """True where what it takes is cut and what it makes is not, so that it sums over ranks."""
        return self.takes.axis is not None and self.makes.axis is None

    @property
    def num_weights(self) -> int:
        """Elements of the matrix of a linear operator, of one expert where it has several."""
        return self.takes.size * self.makes.size if self.kind is Kind.LINEAR else 0


def layer_operators(model: ModelSpec, layer: int) -> tuple[Operator, ...]:
    """One transformer layer: attention, then an MLP, each between the norms that the model has; in a parallel block
    both take the same norm. Layers of multi-token prediction count on: `num_layers + i`. Equal layers share one
    tuple."""
    moe, window, turns = model.layer_is_moe(layer), layer_window(model, layer), layer_turns(model, layer)
    return _layer_operators(model, moe=moe, window=window, turns=turns)


@lru_cache(maxsize=256)
def _layer_operators(model: ModelSpec, *, moe: bool, window: int, turns: bool) -> tuple[Operator, ...]:
    hidden = Width(model.hidden_size)
    kind = _latent_attention if model.kv_lora_rank else _grouped_attention
    attention = kind(model, window, turns)
    mlp = _experts(model) if moe else _mlp(model, model.ffn_hidden_size, "ffn")

    def norms(role: Role, has: bool) -> tuple[Operator, ...]:
        return (Operator(role, Kind.NORM, hidden, hidden),) if has else ()

    return (
        *norms(Role.ATTENTION_NORM, model.pre_norms),
        *attention,
        *norms(Role.ATTENTION_POST_NORM, model.post_norms),
        *norms(Role.MLP_NORM, model.pre_norms and not model.parallel_block),
        *mlp,
        *norms(Role.MLP_POST_NORM, model.post_norms),
    )


def embedding_operators(model: ModelSpec) -> tuple[Operator, ...]:
    """Token table, the position table where positions are learned, and the norm of embeddings where there is one."""
    hidden = Width(model.hidden_size)
    tokens = Operator(Role.TOKENS, Kind.LOOK_UP, Width(1, "vocab", model.vocab_size), hidden)
    if model.position == "learned":
        return tokens, Operator(Role.POSITIONS, Kind.LOOK_UP, Width(model.max_positions), hidden)
    return (tokens, Operator(Role.TOKENS_NORM, Kind.NORM, hidden, hidden)) if model.embedding_norm else (tokens,)


def prediction_operators(model: ModelSpec) -> tuple[Operator, ...]:
    """What a module of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2, equations 21-23) has before
    its transformer layer: the embedding of the next token, norms of that and of the hidden state, and the projection of
    both. The projection is held whole, each rank multiplying its own tokens."""
    hidden, both = Width(model.hidden_size), Width(2 * model.hidden_size)
    return (
        Operator(Role.TOKENS, Kind.LOOK_UP, Width(1, "vocab", model.vocab_size), hidden, shared=True),
        Operator(Role.EMBEDDING_NORM, Kind.NORM, hidden, hidden),
        Operator(Role.HIDDEN_NORM, Kind.NORM, hidden, hidden),
        Operator(Role.PROJECTION, Kind.LINEAR, both, hidden),
    )


def head_operators(model: ModelSpec, norm: Role, *, shared: bool) -> tuple[Operator, ...]:
    """Norm, output product over the vocabulary, cross-entropy."""
    hidden, vocabulary = Width(model.hidden_size), Width(1, "vocab", model.vocab_size)
    return (
        Operator(norm, Kind.NORM, hidden, hidden),
        Operator(Role.HEAD, Kind.LINEAR, hidden, vocabulary, shared=shared),
        Operator(Role.LOSS, Kind.CROSS_ENTROPY, vocabulary, Width(1)),
    )


def _grouped_attention(model: ModelSpec, window: int, turns: bool) -> Iterator[Operator]:
    """Query heads that share key and value heads, and norms of both where the model has them."""
    hidden, group, d = Width(model.hidden_size), model.query_heads_per_group, model.head_dim
    mixed = Width((group + 2) * d, "heads", model.num_kv_heads)
    attended = Width(group * d, "heads", model.num_kv_heads)
    yield Operator(Role.QKV, Kind.LINEAR, hidden, mixed, bias=model.bias or model.qkv_bias)
    if model.qk_norm:
        yield Operator(Role.QUERY_HEAD_NORM, Kind.NORM, Width(d), Width(d))
        yield Operator(Role.KEY_HEAD_NORM, Kind.NORM, Width(d), Width(d))
    if model.whole_qk_norm:
        queries, keys = Width(group * d, "heads", model.num_kv_heads), Width(d, "heads", model.num_kv_heads)
        yield Operator(Role.ALL_QUERIES_NORM, Kind.NORM, queries, queries)
        yield Operator(Role.ALL_KEYS_NORM, Kind.NORM, keys, keys)
    sinks = model.attention_sinks
    yield Operator(Role.CORE, Kind.ATTEND, mixed, attended, window=window, turns=turns, sinks=sinks)
    yield _attention_output(model, attended)


def _attention_output(model: ModelSpec, attended: Width) -> Operator:
    biased = model.bias or model.attention_output_bias
    return Operator(Role.ATTENTION_OUTPUT, Kind.LINEAR, attended, Width(model.hidden_size), bias=biased, ends=True)


def _latent_attention(model: ModelSpec, window: int, turns: bool) -> Iterator[Operator]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1 and equations 37-47).

    The down-projections are small and held whole, each rank multiplying its own tokens; what is gathered for the
    up-projections are the low-rank vectors and the rotary key, which all heads share (as in Megatron-Core's
    `MLASelfAttention`).
    """
    hidden, low_q, low_kv = Width(model.hidden_size), Width(model.q_lora_rank), Width(model.kv_lora_rank)
    plain, rotary, values = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
    bias, heads = model.bias, model.num_heads
    queries, pairs = Width(plain + rotary, "heads", heads), Width(plain + values, "heads", heads)
    if model.q_lora_rank:
        yield Operator(Role.QUERIES_DOWN, Kind.LINEAR, hidden, low_q, bias=bias)
        yield Operator(Role.QUERIES_NORM, Kind.NORM, low_q, low_q)
        yield Operator(Role.QUERIES_UP, Kind.LINEAR, low_q, queries, bias=bias)
    else:
        yield Operator(Role.QUERIES, Kind.LINEAR, hidden, queries, bias=bias)
    yield Operator(Role.KEYS_DOWN, Kind.LINEAR, hidden, Width(low_kv.unit + rotary), bias=bias)
    yield Operator(Role.KEYS_NORM, Kind.NORM, low_kv, low_kv)
    yield Operator(Role.KEYS_UP, Kind.LINEAR, low_kv, pairs, bias=bias, carries=rotary)
    mixed, attended = Width(2 * (plain + rotary) + values, "heads", heads), Width(values, "heads", heads)
    yield Operator(Role.CORE, Kind.ATTEND, mixed, attended, window=window, turns=turns)
    yield _attention_output(model, attended)


def _mlp(
    model: ModelSpec,
    width: int,
    axis: Feature,
    roles: tuple[Role, Role, Role] = (Role.UP, Role.ACTIVATION, Role.DOWN),
    *,
    experts: bool = False,
) -> Iterator[Operator]:
    """Up, activation, down."""
    hidden, up, units = Width(model.hidden_size), Width(2 if model.gated else 1, axis, width), Width(1, axis, width)
    bias = model.bias or model.mlp_bias
    yield Operator(roles[0], Kind.LINEAR, hidden, up, bias=bias, experts=experts)
    yield Operator(roles[1], Kind.ACTIVATE, up, units, experts=experts)
    yield Operator(roles[2], Kind.LINEAR, units, hidden, bias=bias, experts=experts, ends=True)


def _experts(model: ModelSpec) -> Iterator[Operator]:
    """A router with experts, and the shared ones that every token takes."""
    hidden = Width(model.hidden_size)
    yield Operator(Role.ROUTER, Kind.LINEAR, hidden, Width(model.num_experts), bias=model.router_bias, fp32=True)
    yield Operator(Role.DISPATCH, Kind.DISPATCH, hidden, hidden)
    roles = Role.EXPERTS_UP, Role.EXPERTS_ACTIVATION, Role.EXPERTS_DOWN
    yield from _mlp(model, model.expert_width, "expert_ffn", roles, experts=True)
    yield Operator(Role.COMBINE, Kind.COMBINE, hidden, hidden)
    if model.num_shared_experts:
        shared = Role.SHARED_UP, Role.SHARED_ACTIVATION, Role.SHARED_DOWN
        yield from _mlp(model, model.shared_expert_width, "shared_ffn", shared)
    if model.shared_expert_gate:
        yield Operator(Role.SHARED_GATE, Kind.LINEAR, hidden, Width(1))
