"""Hugging Face `config.json` files of families that have norms, factors or biases elsewhere than Llama: Granite, GLM-4,
OLMo 2 and 3, and Cohere's second."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .attention_kinds import pattern_of
from .huggingface_keys import (
    KINDS,
    Config,
    attention_bias,
    bias_fields,
    filled,
    given,
    head_width,
    rotary,
    size,
    turned_width,
    window_fields,
)
from .model import ModelSpec


def _granite(config: Config, name: str, source: str) -> ModelSpec:
    """`GraniteConfig`: Llama with factors."""
    problems: list[str] = []
    biases = bias_fields(attention=bool(config.get("attention_bias")), mlp=bool(config.get("mlp_bias")))
    return rotary(config, name, source, problems, **biases, **granite_fields(config, problems))


def granite_fields(config: Config, problems: list[str]) -> dict[str, Any]:
    """The factors of Granite, dense or with experts."""
    scale = float(given(config, "attention_multiplier", 1.0))
    if scale <= 0:
        problems.append(f"attention_multiplier={scale:g} must be above 0.")
    plain = math.isclose(scale, head_width(config) ** -0.5, rel_tol=1e-6)
    if (divisor := float(given(config, "logits_scaling", 1.0))) <= 0:
        problems.append(f"logits_scaling={divisor:g} must be above 0.")
    return {
        "attention_scale": None if plain or scale <= 0 else scale,
        "embedding_multiplier": float(given(config, "embedding_multiplier", 1.0)),
        "residual_multiplier": float(given(config, "residual_multiplier", 1.0)),
        "logit_multiplier": 1.0 / divisor if divisor > 0 else 1.0,
    }


def _glm4(config: Config, name: str, source: str) -> ModelSpec:
    """`Glm4Config`: norms before and behind both halves, biases on query, key and value."""
    problems: list[str] = []
    fields = {"qkv_bias": bool(given(config, "attention_bias", True)), "post_norms": True}
    return rotary(config, name, source, problems, rope_dim=turned_width(config, problems, usual=0.5), **fields)


def _olmo2(config: Config, name: str, source: str) -> ModelSpec:
    """`Olmo2Config` (arXiv 2501.00656, section 3.2): norms behind both halves only, and one of all queries and one of
    all keys."""
    return rotary(filled(config, rms_norm_eps=1e-5), name, source, [], **attention_bias(config), **_OLMO_NORMS)


_OLMO_NORMS = {"pre_norms": False, "post_norms": True, "whole_qk_norm": True}


def _olmo3(config: Config, name: str, source: str) -> ModelSpec:
    """`Olmo3Config`: OLMo 2 with a window in all but every fourth layer; rotary positions are scaled in the others
    alone."""
    problems: list[str] = []
    slides = [bool((layer + 1) % 4) for layer in range(size(config, "num_hidden_layers"))]
    windows = window_fields(config, slides, problems, usual=4096)
    rope = given(config, "rope_parameters", {})
    if "full_attention" not in rope:  # as files before transformers 5 have it
        rope = {"full_attention": {**rope, **given(config, "rope_scaling", {})}}
    whole, local = rope["full_attention"], given(rope, "sliding_attention", {})
    if given(local, "rope_type", "default") != "default":
        problems.append(f"rope_type={local['rope_type']!r} of sliding_attention is not understood; read is 'default'.")
    theta = float(given(config, "rope_theta", given(whole, "rope_theta", 5e5)))
    base = float(given(local, "rope_theta", theta))
    scaled = given(whole, "rope_type", given(whole, "type", "default")) != "default"
    fields = {**_OLMO_NORMS, **attention_bias(config), **windows, "rope_theta": theta}
    if windows and (scaled or base != theta):
        fields["rope_local_theta"] = base
    config = filled({**config, "rope_parameters": whole}, rms_norm_eps=1e-5)
    return rotary(config, name, source, problems, **fields)


def _cohere2(config: Config, name: str, source: str) -> ModelSpec:
    """`Cohere2Config`: parallel blocks of one LayerNorm without bias, a factor of logits, tied embeddings by default;
    windows with rotary positions in most layers, and neither in the others."""
    problems: list[str] = []
    slides = [bool((layer + 1) % 4) for layer in range(size(config, "num_hidden_layers"))]
    windows = window_fields(config, slides, problems, usual=4096)
    kinds = given(config, "layer_types", ())
    turns = [KINDS.get(kind, True) for kind in kinds] or slides
    return rotary(
        {**config, "rms_norm_eps": given(config, "layer_norm_eps", 1e-5)},
        name,
        source,
        problems,
        norm="layernorm",
        norm_bias=False,
        parallel_block=True,
        logit_multiplier=float(given(config, "logit_scale", 0.0625)),
        tied_embeddings=bool(given(config, "tie_word_embeddings", True)),
        rope_layers=pattern_of(turns),
        **attention_bias(config),
        **windows,
    )


FAMILIES: dict[str, Callable[[Config, str, str], ModelSpec]] = {
    "granite": _granite,
    "glm4": _glm4,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "cohere2": _cohere2,
}
"""`model_type` -> reader."""
