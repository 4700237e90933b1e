"""The form of every key that is read of a Hugging Face `config.json`. Any key may be null, which
stands for its default."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

_COUNTS = """num_hidden_layers hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size
    max_position_embeddings moe_intermediate_size qk_nope_head_dim qk_rope_head_dim q_lora_rank kv_lora_rank v_head_dim
    num_nextn_predict_layers n_shared_experts first_k_dense_replace n_group topk_group num_local_experts num_experts
    n_routed_experts num_experts_per_tok n_embd n_head n_layer n_positions n_inner decoder_sparse_step moe_layer_freq
    sliding_window max_window_layers ffn_hidden_size num_kv_heads num_ln_in_parallel_attn
    shared_expert_intermediate_size attention_chunk_size no_rope_layer_interval n_embed seq_length d_model n_heads
    n_layers expansion_ratio max_seq_len"""
_NUMBERS = """rms_norm_eps rope_theta layer_norm_epsilon layer_norm_eps routed_scaling_factor embedding_multiplier
    residual_multiplier attention_multiplier logits_scaling logit_scale swiglu_alpha swiglu_limit clip_qkv
    partial_rotary_factor"""
_SWITCHES = """attention_bias mlp_bias tie_word_embeddings norm_topk_prob use_sliding_window scale_attn_weights
    scale_attn_by_inverse_layer_idx add_cross_attention alibi parallel_attn new_decoder_architecture multi_query bias
    qkv_bias use_qk_norm attn_temperature_tuning apply_residual_connection_post_layernorm no_bias"""
_TEXTS = "model_type hidden_act activation activation_function scoring_func topk_method"
_ROPE_NUMBERS = """rope_theta factor attention_factor beta_fast beta_slow mscale mscale_all_dim low_freq_factor
    high_freq_factor partial_rotary_factor llama_4_scaling_beta"""


def is_count(value: object) -> bool:
    """A whole number of at least 0; how large it may be is asked of the model (`bounds`)."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_number(value: object) -> bool:
    """A finite number that a float can hold."""
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e300 and math.isfinite(value)
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_pattern(value: object) -> bool:
    return isinstance(value, list) and all(is_count(each) and each <= 1 for each in value)


Form = tuple[str, Callable[[Any], bool]]
"""What a value must be, in words and as a test."""

_COUNT: Form = ("a whole number of at least 0", is_count)
_NUMBER: Form = ("a finite number", is_number)
_SWITCH: Form = ("true or false", lambda value: isinstance(value, bool))
_TEXT: Form = ("a text", _is_text)
_TABLE: Form = ("an object", lambda value: isinstance(value, dict))

FORMS: Mapping[str, Form] = {
    **dict.fromkeys(_COUNTS.split(), _COUNT),
    **dict.fromkeys(_NUMBERS.split(), _NUMBER),
    **dict.fromkeys(_SWITCHES.split(), _SWITCH),
    **dict.fromkeys(_TEXTS.split(), _TEXT),
    "layer_types": ("a list of texts", _is_texts),
    "no_rope_layers": ("a list of 1 and 0", _is_pattern),
    "mlp_only_layers": ("a list of whole numbers", lambda value: isinstance(value, list) and all(map(is_count, value))),
    "rope_parameters": _TABLE,
    "rope_scaling": _TABLE,
    "quantization_config": _TABLE,
    "attn_config": _TABLE,
}
ROPE_FORMS: Mapping[str, Form] = {
    **dict.fromkeys(_ROPE_NUMBERS.split(), _NUMBER),
    "original_max_position_embeddings": _COUNT,
    "rope_type": _TEXT,
    "type": _TEXT,
    "truncate": _SWITCH,
}
MPT_FORMS: Mapping[str, Form] = {
    **dict.fromkeys(("clip_qkv", "softmax_scale", "alibi_bias_max"), _NUMBER),
    **dict.fromkeys(("prefix_lm", "qk_ln", "alibi"), _SWITCH),
    "attn_type": _TEXT,
}
TABLES = {"rope_parameters": ROPE_FORMS, "rope_scaling": ROPE_FORMS, "attn_config": MPT_FORMS}
"""Tables whose own keys have forms."""


def wrong_forms(config: Mapping[str, Any]) -> list[str]:
    """A sentence for every key that has another form than it must have."""
    problems = _wrong(config, FORMS, "")
    for name, forms in TABLES.items():
        if isinstance(config.get(name), dict):
            problems += _wrong(config[name], forms, f"{name}.")
    return problems


def _wrong(table: Mapping[str, Any], forms: Mapping[str, Form], before: str) -> list[str]:
    return [
        f"{before}{name}={table[name]!r} must be {words}."
        for name, (words, fits) in forms.items()
        if table.get(name) is not None and not fits(table[name])
    ]
