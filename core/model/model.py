"""`ModelSpec`: a decoder transformer as numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Literal

from ..base.bounds import Bounded, FieldProblem
from ..base.divisors import divisors
from ..base.errors import ModelError, did_you_mean

ACTIVATIONS = ("gelu", "gelu_tanh", "swiglu", "geglu", "relu_squared")
NORMS = ("layernorm", "rmsnorm")
POSITIONS = ("learned", "rope")
ROPE_SCALINGS = ("none", "linear", "dynamic", "llama3", "yarn")
ROUTER_SCORES = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top_two")

_COUNTS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "max_positions",
)
_EXPERT_FIELDS = ("experts_per_token", "num_shared_experts", "expert_ffn_hidden_size", "first_dense_layers")
ROUTER_FIELDS = (
    "router_scores",
    "normalized_router_weights",
    "router_scaling",
    "num_router_groups",
    "router_groups_per_token",
    "router_group_scores",
    "expert_bias",
    "expert_capacity_factor",
)
LATENT_FIELDS = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_ROUTER_COUNTS = ("num_router_groups", "router_groups_per_token")
_OPTIONAL_COUNTS = (
    "num_experts",
    *_EXPERT_FIELDS,
    *_ROUTER_COUNTS,
    "kv_lora_rank",
    *LATENT_FIELDS,
    "num_mtp_layers",
    "padding_rows",
    "sliding_window",
)

SCALING_FIELDS = {
    "linear": ("rope_factor",),
    "dynamic": ("rope_factor", "rope_original_positions"),
    "llama3": ("rope_factor", "rope_original_positions", "rope_low_freq_factor", "rope_high_freq_factor"),
    "yarn": (
        "rope_factor",
        "rope_original_positions",
        "rope_beta_fast",
        "rope_beta_slow",
        "rope_mscale",
        "rope_mscale_all_dim",
        "rope_attention_factor",
    ),
}
"""Kind of rotary scaling (`core.model.rotary`) -> the numbers that it uses."""

_SCALING_NUMBERS = tuple(dict.fromkeys(name for names in SCALING_FIELDS.values() for name in names))
ROPE_FIELDS = ("rope_scaling", *_SCALING_NUMBERS)

REFINEMENTS = (
    "qkv_bias",
    "qk_norm",
    "parallel_block",
    *ROPE_FIELDS,
    *_OPTIONAL_COUNTS,
    *(name for name in ROUTER_FIELDS if name not in _ROUTER_COUNTS),
)
"""What a plain decoder does without: finer biases and norms, experts, latent attention, multi-token prediction,
padding of the token table."""


@dataclass(frozen=True)
class ModelSpec(Bounded, section="model", problem_type=ModelError):
    """A decoder. `ffn_hidden_size` is the width after the activation (a SwiGLU has two products
    of that width before it).

    The last `padding_rows` of the `vocab_size` rows of the token table are no ids: they are never predicted. `bias`
    puts a bias on every linear layer but the router and the output head, `qkv_bias` one on query, key and value alone;
    `qk_norm` normalises every query and key head. `max_positions` is the length of a learned position table.

    With `num_experts`, the layers from `first_dense_layers` on have a router and experts of width
    `expert_ffn_hidden_size` (that of the dense MLP unless given), of which each token takes `experts_per_token`, and
    `num_shared_experts` more of that width that every token takes, as one MLP. With `kv_lora_rank`, attention is
    multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values come from one low-rank
    vector a token, queries from another one if `q_lora_rank` is given; `head_dim` is then `qk_nope_head_dim +
    qk_rope_head_dim`. `num_mtp_layers` multi-token-prediction modules (DeepSeek-V3, arXiv 2412.19437, section 2.2)
    follow the last layer, next to the output head.

    A token's router makes `router_scores` of its experts, and takes those with the highest. With `num_router_groups` it
    first takes `router_groups_per_token` groups of neighbouring experts by `router_group_scores`, the best score in a
    group (DeepSeek-V2, section 2.2.2) or the sum of the two best (DeepSeek-V3), and then experts of those only.
    `expert_bias` is added to the scores where they are compared, not where they weigh (arXiv 2408.15664).
    `normalized_router_weights` divides the chosen scores by their sum, which makes of a softmax over all experts one
    over the chosen; `router_scaling` times that weighs the experts' results. An expert takes at most
    `expert_capacity_factor` times its even share of each sequence's choices; None is any number.

    With `sliding_window` a token attends to so many tokens, itself the last (Mistral 7B, arXiv 2310.06825,
    section 2); 0 is all before it.

    `rope_scaling` stretches rotary positions for sequences longer than the `rope_original_positions` (by default
    `max_positions`) of the first training, `rope_factor` times (`core.model.rotary`, which says what each kind and
    its further numbers mean).

    With `parallel_block`, attention and MLP of a layer take the same normed input, and both are added to that input
    (GPT-J; Falcon, arXiv 2311.16867, section 3.3): a layer has one norm.

    In training, `hidden_dropout` of the elements behind the embedding and every attention and MLP are dropped, and
    `attention_dropout` of the attention probabilities.

    Raises `ModelError` with every rule that is broken.
    """

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    activation: Literal["gelu", "gelu_tanh", "swiglu", "geglu", "relu_squared"] = "swiglu"
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    position: Literal["learned", "rope"] = "rope"
    rope_theta: float = 10000.0
    tied_embeddings: bool = False
    bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    parallel_block: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    num_shared_experts: int = 0
    expert_ffn_hidden_size: int | None = None
    first_dense_layers: int = 0
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    normalized_router_weights: bool = True
    router_scaling: float = 1.0
    num_router_groups: int = 0
    router_groups_per_token: int = 0
    router_group_scores: Literal["max", "top_two"] = "max"
    expert_bias: bool = False
    expert_capacity_factor: float | None = None
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    num_mtp_layers: int = 0
    padding_rows: int = 0
    sliding_window: int = 0
    rope_scaling: Literal["none", "linear", "dynamic", "llama3", "yarn"] = "none"
    rope_factor: float = 1.0
    rope_original_positions: int = 0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_mscale: float = 0.0
    rope_mscale_all_dim: float = 0.0
    rope_attention_factor: float | None = None
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse(self._problems())

    def _problems(self) -> Iterator[FieldProblem]:
        counts = {name: getattr(self, name) for name in _COUNTS}
        for name, value in counts.items():
            if not _is_count(value):
                yield name, f"{name}={value!r} must be a whole number of at least 1."
        choices = (
            ("activation", ACTIVATIONS),
            ("norm", NORMS),
            ("position", POSITIONS),
            ("rope_scaling", ROPE_SCALINGS),
            ("router_scores", ROUTER_SCORES),
            ("router_group_scores", GROUP_SCORES),
        )
        for name, known in choices:
            if (value := getattr(self, name)) not in known:
                yield name, f"{name}={value!r} is not one of {', '.join(known)}{did_you_mean(str(value), known)}"
        for name in ("norm_eps", "rope_theta"):
            if not (value := getattr(self, name)) > 0:
                yield name, f"{name}={value!r} must be above 0."
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0 <= (share := getattr(self, name)) < 1:
                yield name, f"{name}={share!r} must be at least 0 and below 1."
        if _is_count(self.num_heads) and _is_count(self.num_kv_heads) and self.num_heads % self.num_kv_heads:
            yield (
                "num_kv_heads",
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}, so query heads cannot "
                f"share them evenly. Use num_kv_heads among {divisors(self.num_heads)}.",
            )
        if self.position == "rope" and _is_count(self.head_dim) and self.head_dim % 2:
            sentence = f"head_dim={self.head_dim} is odd, but rotary positions need pairs. Use {self.head_dim + 1}."
            yield "head_dim", sentence
        optional = {name: value for name in _OPTIONAL_COUNTS if (value := getattr(self, name)) is not None}
        bad = [
            (name, f"{name}={value!r} must be a whole number of at least 0.")
            for name, value in optional.items()
            if not _is_number(value)
        ]
        yield from bad or [
            *self._expert_problems(),
            *self._router_problems(),
            *self._latent_problems(),
            *self._rotary_problems(),
        ]
        if _is_count(self.vocab_size) and _is_number(self.padding_rows) and self.padding_rows >= self.vocab_size:
            most = self.vocab_size - 1
            yield (
                "padding_rows",
                f"padding_rows={self.padding_rows} leaves no id of vocab_size={self.vocab_size}. Use {most} at most.",
            )

    def _expert_problems(self) -> Iterator[FieldProblem]:
        if not self.is_moe:
            defaults = {field.name: field.default for field in fields(self)}
            names = [name for name in _EXPERT_FIELDS if getattr(self, name)]
            if names := [*names, *(name for name in ROUTER_FIELDS if getattr(self, name) != defaults[name])]:
                given = self._written(names)
                yield names[0], f"{given} describe experts, but num_experts=0. Set num_experts, or leave them out."
            return
        if not 1 <= self.experts_per_token <= self.num_experts:
            sentence = f"experts_per_token={self.experts_per_token} must be 1 to num_experts={self.num_experts}."
            yield "experts_per_token", sentence
        if self.expert_ffn_hidden_size == 0:
            yield "expert_ffn_hidden_size", "expert_ffn_hidden_size=0 must be at least 1."
        if _is_count(self.num_layers) and self.first_dense_layers >= self.num_layers:
            yield (
                "first_dense_layers",
                f"first_dense_layers={self.first_dense_layers} leaves none of num_layers={self.num_layers} to the "
                "experts. "
                f"Use at most {self.num_layers - 1}, or num_experts=0.",
            )

    def _router_problems(self) -> Iterator[FieldProblem]:
        """What is wrong with the choice of experts, where there are any."""
        if not self.is_moe:
            return
        groups, chosen = self.num_router_groups, self.router_groups_per_token
        if not self.router_scaling > 0:
            yield "router_scaling", f"router_scaling={self.router_scaling!r} must be above 0."
        if self.expert_capacity_factor is not None and not self.expert_capacity_factor > 0:
            yield (
                "expert_capacity_factor",
                f"expert_capacity_factor={self.expert_capacity_factor!r} must be above 0. Leave it out for experts "
                "that take any number.",
            )
        if not groups:
            given = {"router_groups_per_token": (chosen, 0), "router_group_scores": (self.router_group_scores, "max")}
            for name, (value, default) in given.items():
                if value != default:
                    yield (
                        name,
                        f"{name}={value} chooses among groups of experts, but num_router_groups=0. Set that, or "
                        f"leave {name} out.",
                    )
            return
        if self.num_experts % groups:
            yield (
                "num_router_groups",
                f"num_router_groups={groups} does not divide num_experts={self.num_experts}. Use one of "
                f"{divisors(self.num_experts)}.",
            )
            return
        size = self.num_experts // groups
        fewest = -(-self.experts_per_token // size)
        if not fewest <= chosen <= groups:
            yield (
                "router_groups_per_token",
                f"router_groups_per_token={chosen} groups of {size} experts must hold "
                f"experts_per_token={self.experts_per_token} "
                f"and be at most num_router_groups={groups}. Use {fewest} to {groups}.",
            )
        if self.router_group_scores == "top_two" and size < 2:
            yield (
                "router_group_scores",
                f'router_group_scores="top_two" needs two experts in a group, but num_router_groups={groups} '
                f'leaves {size}. Use "max".',
            )

    def _latent_problems(self) -> Iterator[FieldProblem]:
        if not self.is_mla:
            if names := [name for name in LATENT_FIELDS if getattr(self, name)]:
                yield (
                    names[0],
                    f"{self._written(names)} describe latent attention, but kv_lora_rank=0. Set kv_lora_rank, or leave "
                    "them out.",
                )
            return
        if missing := [
            name for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim") if not getattr(self, name)
        ]:
            needed = f"which needs {', '.join(missing)} too"
            yield "kv_lora_rank", f"kv_lora_rank={self.kv_lora_rank} means latent attention, {needed}."
            return
        if self.qk_rope_head_dim % 2:
            yield (
                "qk_rope_head_dim",
                f"qk_rope_head_dim={self.qk_rope_head_dim} is odd, but rotary positions need pairs. Use "
                f"{self.qk_rope_head_dim + 1}.",
            )
        if self.head_dim != (width := self.qk_nope_head_dim + self.qk_rope_head_dim):
            yield (
                "head_dim",
                f"head_dim={self.head_dim} is not qk_nope_head_dim + qk_rope_head_dim = {width}, the width of a "
                f"query head. Use {width}.",
            )
        if self.num_kv_heads != self.num_heads:
            yield (
                "num_kv_heads",
                f"num_kv_heads={self.num_kv_heads} differs from num_heads={self.num_heads}, but latent attention "
                "gives every query head "
                f"a key and a value head. Use {self.num_heads}.",
            )
        if self.position != "rope":
            yield (
                "position",
                f'position="{self.position}" does not go with latent attention, which carries rotary positions. '
                'Use "rope".',
            )

    def _rotary_problems(self) -> Iterator[FieldProblem]:
        """What is wrong with the scaling of rotary positions, one sentence each."""
        used = SCALING_FIELDS.get(self.rope_scaling, ())
        unused = (name for name in _SCALING_NUMBERS if name not in used)
        if given := [name for name in unused if getattr(self, name) != getattr(type(self), name)]:
            kinds = [kind for kind, names in SCALING_FIELDS.items() if set(given) <= set(names)]
            yield (
                given[0],
                f'{self._written(given)} scale rotary positions, but rope_scaling="{self.rope_scaling}" does not use '
                "them. "
                f"Use rope_scaling among {', '.join(kinds) or 'the kinds that do'}, or leave them out.",
            )
        if not used:
            return
        if self.position != "rope":
            yield (
                "rope_scaling",
                f'rope_scaling="{self.rope_scaling}" stretches rotary positions, but position="{self.position}". Use '
                '"rope", or no scaling.',
            )
        for name in ("rope_factor", "rope_beta_fast", "rope_beta_slow"):
            if not (value := getattr(self, name)) > 0:
                yield name, f"{name}={value!r} must be above 0."
        if not 0 <= self.rope_low_freq_factor < self.rope_high_freq_factor:
            yield (
                "rope_low_freq_factor",
                f"rope_low_freq_factor={self.rope_low_freq_factor!r} must be at least 0 and below "
                f"rope_high_freq_factor={self.rope_high_freq_factor!r}.",
            )
        if not self.rope_beta_slow < self.rope_beta_fast:
            sentence = f"rope_beta_slow={self.rope_beta_slow!r} must be below rope_beta_fast={self.rope_beta_fast!r}."
            yield "rope_beta_slow", sentence

    def _written(self, names: Iterable[str]) -> str:
        """Fields as sentences name them: `experts_per_token=2, num_router_groups=4`."""
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def window(self, sequence: int) -> int:
        """The sliding window where it is shorter than the sequences; 0 where every token sees all before it."""
        return self.sliding_window if 0 < self.sliding_window < sequence else 0

    @property
    def original_positions(self) -> int:
        """Length of the sequences that rotary positions were first trained with."""
        return self.rope_original_positions or self.max_positions

    @property
    def gated(self) -> bool:
        """True when the first MLP product has a gate half (SwiGLU, GeGLU)."""
        return self.activation in ("swiglu", "geglu")

    @property
    def is_moe(self) -> bool:
        """True when some layers have experts."""
        return self.num_experts > 0

    @property
    def is_mla(self) -> bool:
        """True for multi-head latent attention."""
        return self.kv_lora_rank > 0

    @property
    def shares_table(self) -> bool:
        """True when the last stage uses the token table too: as its output head, or to embed tokens for
        multi-token prediction."""
        return self.tied_embeddings or self.num_mtp_layers > 0

    def layer_is_moe(self, layer: int) -> bool:
        """True when a layer has experts in the place of the dense MLP. Multi-token-prediction layers count
        on: `num_layers + i`."""
        return self.is_moe and layer >= self.first_dense_layers

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts, without those of multi-token prediction."""
        return self.num_layers - self.first_dense_layers if self.is_moe else 0

    @property
    def expert_width(self) -> int:
        """Width of one expert after the activation."""
        return self.ffn_hidden_size if self.expert_ffn_hidden_size is None else self.expert_ffn_hidden_size

    @property
    def shared_expert_width(self) -> int:
        """Width of the MLP that all tokens take besides their experts; 0 without one."""
        return self.num_shared_experts * self.expert_width

    @property
    def value_head_dim(self) -> int:
        """Width of one value head; that of a query or key head is `head_dim`."""
        return self.v_head_dim if self.is_mla else self.head_dim

    @property
    def query_heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


def _is_count(value: object) -> bool:
    return _is_number(value) and value != 0


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
