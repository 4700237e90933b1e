"""Families of Hugging Face `config.json` files that the decoder cannot express, each with the key that decides."""

from __future__ import annotations

from collections.abc import Mapping

from .huggingface_keys import Config

STATE_SPACE = "layers with a state that is carried from token to token instead of attention"
LINEAR = "layers of linear attention"

REASONS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "deepseek_v32": (("index_topk",), "attention to tokens that an index chooses"),
    "glm_moe_dsa": (("index_topk",), "attention to tokens that an index chooses"),
    "qwen3_next": (("linear_num_value_heads", "layer_types", "full_attention_interval"), LINEAR),
    "qwen3_5": (("text_config", "layer_types"), LINEAR),
    "qwen3_5_moe": (("text_config", "layer_types"), LINEAR),
    "kimi_linear": (("linear_attn_config",), LINEAR),
    "minimax": (("layer_types", "attn_type_list"), LINEAR),
    "olmo_hybrid": (("layer_types",), LINEAR),
    "falcon_h1": (("mamba_d_ssm", "mamba_d_state"), STATE_SPACE),
    "falcon_mamba": (("state_size",), STATE_SPACE),
    "mamba": (("state_size",), STATE_SPACE),
    "mamba2": (("state_size",), STATE_SPACE),
    "jamba": (("mamba_d_state",), STATE_SPACE),
    "bamba": (("mamba_d_state",), STATE_SPACE),
    "zamba2": (("mamba_d_state",), STATE_SPACE),
    "nemotron_h": (("hybrid_override_pattern", "ssm_state_size"), STATE_SPACE),
    "granitemoehybrid": (("layer_types", "mamba_d_state"), STATE_SPACE),
    "lfm2": (("layer_types", "conv_L_cache"), "layers of short convolutions"),
    "recurrent_gemma": (("block_types", "lru_width"), STATE_SPACE),
    "rwkv": (("attention_hidden_size",), STATE_SPACE),
}
"""`model_type` -> (keys, the first of which that a config has is named; what they mean)."""


def why_refused(config: Config) -> str | None:
    """The key of a config that no layer here can express, with what it means; None for a family that is not known."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in REASONS:
        return None
    keys, meaning = REASONS[family]
    key = next((key for key in keys if config.get(key) is not None), keys[0])
    return f"{key} describes {meaning}, which the layers here cannot express"
