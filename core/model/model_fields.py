"""The fields of a decoder transformer, and what follows from them: `ModelSpec` without its rules."""

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Literal

from ..base.bounds import EXPERTS, HEADS, LAYERS, TABLE, TOKENS, WIDTH, Bound
from ..base.errors import ModelError
from ..base.option import Bounded, noun, option

SHARED_FIELDS = ("shared_expert_ffn_hidden_size", "shared_expert_gate")
EXPERT_FIELDS = (
    "experts_per_token",
    "num_shared_experts",
    "expert_ffn_hidden_size",
    "first_dense_layers",
    "expert_layer_step",
    *SHARED_FIELDS,
)
ROUTER_FIELDS = (
    "router_scores",
    "normalized_router_weights",
    "router_scaling",
    "num_router_groups",
    "router_groups_per_token",
    "router_group_scores",
    "router_bias",
    "expert_bias",
    "expert_capacity_factor",
)
LATENT_FIELDS = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_ROUTER_COUNTS = ("num_router_groups", "router_groups_per_token")
_OPTIONAL_COUNTS = (
    "num_experts",
    *EXPERT_FIELDS,
    *_ROUTER_COUNTS,
    "kv_lora_rank",
    *LATENT_FIELDS,
    "num_mtp_layers",
    "padding_rows",
    "sliding_window",
)
_ATTENTION_FIELDS = (
    "window_layers",
    "attention_softcap",
    "logit_softcap",
    "attention_sinks",
    "attention_scale",
    "rope_dim",
    "rope_local_theta",
    "rope_layers",
    "alibi_multiplier",
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
        "rope_truncate",
    ),
}
"""Kind of rotary scaling (`core.model.rotary`) -> the numbers that it uses."""

SCALING_NUMBERS = tuple(dict.fromkeys(name for names in SCALING_FIELDS.values() for name in names))
ROPE_FIELDS = ("rope_scaling", *SCALING_NUMBERS)

NORM_FIELDS = ("pre_norms", "post_norms", "norm_offset", "norm_bias")
MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logit_multiplier")
GATE_FIELDS = ("gate_limit", "gate_offset")
GATED = ("swiglu", "geglu", "geglu_tanh", "quick_geglu")
"""Activations with a gate."""
QUICK_GELU = 1.702
"""The slope of the sigmoid in `quick_geglu`."""

REFINEMENTS = (
    "qkv_bias",
    "attention_output_bias",
    "mlp_bias",
    "qk_norm",
    "whole_qk_norm",
    "parallel_block",
    "embedding_norm",
    *NORM_FIELDS,
    *MULTIPLIERS,
    *GATE_FIELDS,
    *ROPE_FIELDS,
    *_OPTIONAL_COUNTS,
    *_ATTENTION_FIELDS,
    *(name for name in ROUTER_FIELDS if name not in _ROUTER_COUNTS),
)
"""What a plain decoder does without: finer biases and norms, factors, limits of a gate, experts, latent attention,
multi-token prediction, padding of the token table."""


@noun()
class ModelFields(Bounded, section="model", problem_type=ModelError):
    """A decoder as `ModelSpec` describes it, whose fields may not go together.

    With `num_experts`, every `expert_layer_step`-th layer from `first_dense_layers` on has a router and experts, of
    which each token takes `experts_per_token` and all shared ones. With `kv_lora_rank`, attention is multi-head latent
    attention. With `num_mtp_layers`, modules of multi-token prediction follow the last layer.

    Raises `ModelError` for single values that are wrong.
    """

    name: str = option("what reports call the model", default_note="custom", read_by="core.plan.plan")
    num_layers: int = option("transformer layers", minimum=1, bound=LAYERS, read_by="core.model.parameters")
    hidden_size: int = option("width of the residual stream", minimum=1, bound=WIDTH, read_by="core.model.operators")
    ffn_hidden_size: int = option(
        "MLP width after the activation",
        minimum=1,
        bound=WIDTH,
        more="A SwiGLU has two products of that width before it.",
        read_by="core.model.operators",
    )
    num_heads: int = option("query heads", minimum=1, bound=HEADS, read_by="simulator.cost.flops")
    num_kv_heads: int = option(
        "key/value heads", minimum=1, bound=HEADS, default_note="num_heads", read_by="core.model.operators"
    )
    head_dim: int = option(
        "width of one head",
        minimum=1,
        bound=WIDTH,
        default_note="hidden_size / num_heads",
        read_by="core.model.operators",
    )
    vocab_size: int = option("rows of the token table", minimum=1, bound=TABLE, read_by="core.model.operators")
    max_positions: int = option(
        "rows of a learned position table",
        minimum=1,
        bound=TOKENS,
        default_note="batch.sequence",
        read_by="core.model.operators",
    )
    activation: Literal["gelu", "gelu_tanh", "swiglu", "geglu", "geglu_tanh", "quick_geglu", "relu_squared"] = option(
        "MLP activation",
        default="swiglu",
        more=(
            "A gate goes through silu, gelu, gelu's approximation by tanh (Gemma), or x sigmoid(1.702 x) (gpt-oss), "
            "and multiplies the up-projection."
        ),
        read_by="backend.model.mlp",
    )
    norm: Literal["layernorm", "rmsnorm"] = option(
        "normalisation before attention and MLP", default="rmsnorm", read_by="core.model.parameters"
    )
    norm_eps: float = option("added to the variance", default=1e-5, above=0, read_by="backend.tensor_parallel.norm")
    position: Literal["learned", "rope", "alibi"] = option(
        "how positions enter",
        default="rope",
        more=(
            "By a table that is added to embeddings; by turning queries and keys; or by scores that fall with the "
            "distance (ALiBi: Press et al. 2022, arXiv 2108.12409)."
        ),
        read_by="core.model.operators",
    )
    rope_theta: float = option("base of the rotary frequencies", default=10000.0, above=0, read_by="core.model.rotary")
    _: KW_ONLY
    rope_scaling: Literal["none", "linear", "dynamic", "llama3", "yarn"] = option(
        "how rotary positions are stretched for longer sequences",
        default="none",
        more=(
            "Sequences are `rope_factor` times longer than the `rope_original_positions` of the first training; "
            "`core.model.rotary` says what each kind and its further numbers mean."
        ),
        read_by="core.model.rotary",
    )
    rope_factor: float = option(
        "times longer than the original sequences", default=1.0, above=0, read_by="core.model.rotary"
    )
    rope_original_positions: int = option(
        "length of the original sequences; 0 is max_positions",
        default=0,
        minimum=0,
        bound=TOKENS,
        read_by="core.model.model_fields",
    )
    rope_low_freq_factor: float = option(
        "llama3: original sequences hold so many turns of a pair that slows down",
        default=1.0,
        read_by="core.model.rotary",
    )
    rope_high_freq_factor: float = option(
        "llama3: and so many of one that does not", default=4.0, above=0, read_by="core.model.rotary"
    )
    rope_beta_fast: float = option(
        "yarn: turns in an original sequence from which pairs keep their speed",
        default=32.0,
        above=0,
        read_by="core.model.rotary",
    )
    rope_beta_slow: float = option(
        "yarn: turns up to which they slow down by the factor", default=1.0, above=0, read_by="core.model.rotary"
    )
    rope_truncate: bool = option(
        "yarn: the ramp begins and ends at whole pairs",
        default=True,
        more="gpt-oss rounds neither end.",
        read_by="core.model.rotary",
    )
    rope_mscale: float = option(
        "yarn: growth of turned queries and keys", default=0.0, minimum=0, read_by="core.model.rotary"
    )
    rope_mscale_all_dim: float = option(
        "yarn: growth of whole queries and keys", default=0.0, minimum=0, read_by="core.model.rotary"
    )
    rope_attention_factor: float | None = option(
        "yarn: the growth itself", default=None, above=0, default_note="from the factor", read_by="core.model.rotary"
    )
    tied_embeddings: bool = option("output table is the token table", default=False, read_by="core.model.blocks")
    bias: bool = option(
        "bias on every linear layer but router and output head", default=False, read_by="core.model.operators"
    )
    qkv_bias: bool = option(
        "bias on query, key and value",
        default=False,
        more="It is for these alone, without `bias`.",
        read_by="core.model.operators",
    )
    attention_output_bias: bool = option(
        "bias on the output product of attention",
        default=False,
        more="It is for this alone, without `bias`.",
        read_by="core.model.operators",
    )
    mlp_bias: bool = option(
        "bias on both products of MLPs and experts",
        default=False,
        more="It is for these alone, without `bias`.",
        read_by="core.model.operators",
    )
    qk_norm: bool = option("norm of every query and key head", default=False, read_by="core.model.operators")
    whole_qk_norm: bool = option(
        "one norm of all query heads of a token, and one of all its key heads",
        default=False,
        more="OLMo 2, arXiv 2501.00656, section 3.2; OLMoE. Ranks of tensor parallelism add up its squares.",
        read_by="core.model.operators",
    )
    parallel_block: bool = option(
        "attention and MLP take the same normed input",
        default=False,
        more="Both are added to the input (GPT-J; Falcon, arXiv 2311.16867, section 3.3): a layer has one norm.",
        read_by="core.model.operators",
    )
    pre_norms: bool = option("attention and MLP take normed inputs", default=True, read_by="core.model.operators")
    post_norms: bool = option(
        "what attention and MLP make is normed before it is added",
        default=False,
        more=(
            "Besides the norms before them (Gemma 2, arXiv 2408.00118, section 2; GLM-4), or with `pre_norms = false` "
            "in their place (OLMo 2, arXiv 2501.00656, section 3.2)."
        ),
        read_by="core.model.operators",
    )
    norm_offset: float = option(
        "added to the weights of norms where they multiply",
        default=0.0,
        minimum=0,
        more="With 1 they start at 0 (Gemma; Megatron-LM's `--apply-layernorm-1p`).",
        read_by="backend.tensor_parallel.norm",
    )
    norm_bias: bool = option("a LayerNorm has a bias", default=True, read_by="core.model.parameters")
    embedding_norm: bool = option(
        "embeddings are normed before the first layer",
        default=False,
        more="BLOOM, arXiv 2211.05100, section 3.2.2; `--embed-layernorm` of bigscience's Megatron-DeepSpeed.",
        read_by="core.model.operators",
    )
    embedding_multiplier: float = option(
        "times that a token's embedding enters",
        default=1.0,
        above=0,
        more="Granite; Gemma has the square root of `hidden_size`.",
        read_by="backend.tensor_parallel.embedding",
    )
    residual_multiplier: float = option(
        "times that what attention and MLP make is added", default=1.0, above=0, read_by="backend.model.block"
    )
    logit_multiplier: float = option(
        "times that logits count",
        default=1.0,
        above=0,
        more="Cohere's `logit_scale`, one over Granite's `logits_scaling`.",
        read_by="backend.model.multi_token",
    )
    gate_limit: float | None = option(
        "largest gate, and largest magnitude of its up-projection",
        default=None,
        above=0,
        default_note="no limit",
        more="Both are clamped before the activation (gpt-oss has 7).",
        read_by="backend.model.mlp",
    )
    gate_offset: float = option(
        "added to the up-projection that a gate multiplies",
        default=0.0,
        more="gpt-oss has 1.",
        read_by="backend.model.mlp",
    )
    num_experts: int = option(
        "experts of a MoE layer; 0 is a dense model",
        default=0,
        minimum=0,
        bound=EXPERTS,
        more="The layers from `first_dense_layers` on have a router and experts.",
        read_by="core.model.parameters",
    )
    experts_per_token: int = option(
        "experts that each token takes", default=0, minimum=0, bound=EXPERTS, read_by="core.program.experts"
    )
    num_shared_experts: int = option(
        "experts that every token takes, besides its own",
        default=0,
        minimum=0,
        bound=EXPERTS,
        more="They have the width of the others unless it is given, and are computed as one MLP.",
        read_by="core.model.model_fields",
    )
    shared_expert_ffn_hidden_size: int | None = option(
        "width of all shared experts together",
        default=None,
        minimum=1,
        bound=WIDTH,
        default_note="num_shared_experts * expert_ffn_hidden_size",
        read_by="core.model.model_fields",
    )
    shared_expert_gate: bool = option(
        "a sigmoid of each token weighs what the shared experts make",
        default=False,
        more="Qwen2-MoE, arXiv 2407.10671; it is of one product without bias.",
        read_by="core.model.operators",
    )
    expert_ffn_hidden_size: int | None = option(
        "width of one expert",
        default=None,
        minimum=1,
        bound=WIDTH,
        default_note="ffn_hidden_size",
        read_by="core.model.model_fields",
    )
    first_dense_layers: int = option(
        "layers before the first with experts", default=0, minimum=0, bound=LAYERS, read_by="core.model.model_fields"
    )
    expert_layer_step: int = option(
        "every n-th layer from `first_dense_layers` on has experts",
        default=1,
        minimum=1,
        bound=LAYERS,
        more="The others are dense; those of multi-token prediction are as the last (Llama 4; Megatron-LM).",
        read_by="core.model.model_fields",
    )
    router_scores: Literal["softmax", "sigmoid"] = option(
        "what a router makes of its logits",
        default="softmax",
        more="A token takes the experts with the highest.",
        read_by="backend.model.router",
    )
    normalized_router_weights: bool = option(
        "a token's chosen scores are divided by their sum",
        default=True,
        more="That makes of a softmax over all experts one over the chosen.",
        read_by="backend.model.router",
    )
    router_scaling: float = option(
        "times that the experts' results are weighed", default=1.0, above=0, read_by="backend.model.router"
    )
    num_router_groups: int = option(
        "groups of experts that a router chooses first; 0 is none",
        default=0,
        minimum=0,
        bound=EXPERTS,
        read_by="backend.model.router",
    )
    router_groups_per_token: int = option(
        "groups whose experts a token may take",
        default=0,
        minimum=0,
        bound=EXPERTS,
        more="Groups are of neighbouring experts, and are chosen by `router_group_scores`.",
        read_by="backend.model.router",
    )
    router_group_scores: Literal["max", "top_two"] = option(
        "score of a group: best, or sum of two best",
        default="max",
        more="The best score in a group is DeepSeek-V2's (section 2.2.2), the sum of the two best DeepSeek-V3's.",
        read_by="backend.model.router",
    )
    router_bias: bool = option(
        "bias on the logits of a router",
        default=False,
        more="It is trained as others are.",
        read_by="core.model.operators",
    )
    expert_bias: bool = option(
        "a bias per expert, in the choice only, balances them",
        default=False,
        more="It is added to the scores where they are compared, not where they weigh (arXiv 2408.15664).",
        read_by="backend.model.router",
    )
    expert_capacity_factor: float | None = option(
        "most of a sequence's choices that an expert takes, over its even share; the others are dropped",
        default=None,
        above=0,
        bound=EXPERTS,
        default_note="no limit",
        read_by="backend.model.router",
    )
    q_lora_rank: int = option(
        "latent attention: rank of the queries; 0 is full rank",
        default=0,
        minimum=0,
        bound=WIDTH,
        more="With it queries come from a low-rank vector too.",
        read_by="core.model.operators",
    )
    kv_lora_rank: int = option(
        "latent attention: rank of keys and values; 0 is ordinary attention",
        default=0,
        minimum=0,
        bound=WIDTH,
        more=(
            "It is multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values come "
            "from one low-rank vector a token."
        ),
        read_by="core.model.operators",
    )
    qk_nope_head_dim: int = option(
        "latent attention: width of a head without positions",
        default=0,
        minimum=0,
        bound=WIDTH,
        more="`head_dim` is the sum of this and `qk_rope_head_dim`.",
        read_by="core.model.operators",
    )
    qk_rope_head_dim: int = option(
        "latent attention: width of a head with rotary positions",
        default=0,
        minimum=0,
        bound=WIDTH,
        read_by="core.model.operators",
    )
    v_head_dim: int = option(
        "latent attention: width of a value head", default=0, minimum=0, bound=WIDTH, read_by="core.model.model_fields"
    )
    sliding_window: int = option(
        "tokens that a token attends to, itself the last; 0 is all",
        default=0,
        minimum=0,
        bound=TOKENS,
        more="Mistral 7B, arXiv 2310.06825, section 2.",
        read_by="core.model.attention_kinds",
    )
    window_layers: tuple[int, ...] = option(
        "which layers have the window, 1 or 0 each, over and over",
        default=(),
        minimum=0,
        maximum=1,
        default_note="all",
        more="`[1, 0]` is every second one, from the first on (Gemma 2, arXiv 2408.00118, section 2).",
        read_by="core.model.attention_kinds",
    )
    rope_layers: tuple[int, ...] = option(
        "which layers have rotary positions, 1 or 0 each, over and over",
        default=(),
        minimum=0,
        maximum=1,
        default_note="all",
        more="`[1, 1, 1, 0]` leaves every fourth without (Yang et al. 2025, arXiv 2501.18795).",
        read_by="core.model.attention_kinds",
    )
    rope_dim: int = option(
        "features of a head that rotary positions turn; 0 is all",
        default=0,
        minimum=0,
        bound=WIDTH,
        more="The others carry no position (GPT-J; Black et al. 2022, arXiv 2204.06745, section 2.1.1).",
        read_by="core.model.rotary",
    )
    rope_local_theta: float | None = option(
        "base of the rotary frequencies in layers with a window",
        default=None,
        above=0,
        default_note="rope_theta",
        more="There `rope_scaling` stretches nothing (Gemma 3, arXiv 2503.19786, section 2).",
        read_by="core.model.rotary",
    )
    attention_scale: float | None = option(
        "what scores are multiplied by before the softmax",
        default=None,
        above=0,
        default_note="1/sqrt(head_dim)",
        read_by="core.model.rotary",
    )
    attention_softcap: float = option(
        "c that scores are held below by c tanh(score / c); 0 is none",
        default=0.0,
        minimum=0,
        more="Gemma 2, arXiv 2408.00118, section 2.",
        read_by="backend.model.written_attention",
    )
    alibi_multiplier: float = option(
        "times that ALiBi's slopes count",
        default=1.0,
        above=0,
        more="Falcon scales scores behind them, which makes it 1/sqrt(head_dim).",
        read_by="core.model.alibi",
    )
    attention_sinks: bool = option(
        "a learned score per head that takes a share of the probabilities and has no value",
        default=False,
        more="gpt-oss (arXiv 2508.10925, section 2.2); Megatron-LM's `--softmax-type learnable`.",
        read_by="core.model.operators",
    )
    logit_softcap: float = option(
        "c that logits are held below by c tanh(logit / c); 0 is none",
        default=0.0,
        minimum=0,
        more="Gemma 2, arXiv 2408.00118, section 2.",
        read_by="backend.model.transformer",
    )
    padding_rows: int = option(
        "last rows of the token table that are no ids and get no probability",
        default=0,
        minimum=0,
        bound=TABLE,
        more="They are among the `vocab_size` rows, and are never predicted.",
        read_by="backend.tensor_parallel.cross_entropy",
    )
    num_mtp_layers: int = option(
        "multi-token-prediction modules after the last layer",
        default=0,
        minimum=0,
        bound=Bound(100, "models published have one (DeepSeek-V3)"),
        more="They stand next to the output head (DeepSeek-V3, arXiv 2412.19437, section 2.2).",
        read_by="core.model.blocks",
    )
    hidden_dropout: float = option(
        "share of hidden-state elements dropped in training",
        default=0.0,
        minimum=0,
        below=1,
        more="They are those behind the embedding and every attention and MLP.",
        read_by="backend.tensor_parallel.dropout",
    )
    attention_dropout: float = option(
        "share of attention probabilities dropped in training",
        default=0.0,
        minimum=0,
        below=1,
        read_by="backend.model.attention_core",
    )

    @property
    def original_positions(self) -> int:
        """Length of the sequences that rotary positions were first trained with."""
        return self.rope_original_positions or self.max_positions

    @property
    def gated(self) -> bool:
        """True when the first MLP product has a gate half (SwiGLU, GeGLU)."""
        return self.activation in GATED

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
        place = min(layer, self.num_layers - 1) - self.first_dense_layers
        return self.is_moe and place >= 0 and place % self.expert_layer_step == 0

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts, without those of multi-token prediction."""
        return sum(map(self.layer_is_moe, range(self.num_layers)))

    @property
    def expert_width(self) -> int:
        """Width of one expert after the activation."""
        return self.ffn_hidden_size if self.expert_ffn_hidden_size is None else self.expert_ffn_hidden_size

    @property
    def shared_expert_width(self) -> int:
        """Width of the MLP that all tokens take besides their experts; 0 without one."""
        given = self.shared_expert_ffn_hidden_size
        return self.num_shared_experts * self.expert_width if given is None else given

    @property
    def value_head_dim(self) -> int:
        """Width of one value head; that of a query or key head is `head_dim`."""
        return self.v_head_dim if self.is_mla else self.head_dim

    @property
    def query_heads_per_group(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads
