"""Hugging Face `config.json` files of families with ALiBi, read and written: BLOOM and MPT. Falcon, some of whose
models have it, is in `huggingface`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .huggingface_keys import Config, given, raise_problems, size
from .model import ModelSpec


def _bloom(config: Config, name: str, source: str) -> ModelSpec:
    """`BloomConfig` (arXiv 2211.05100, section 3.2): GPT with ALiBi and normed embeddings."""
    if config.get("apply_residual_connection_post_layernorm"):
        sentence = "apply_residual_connection_post_layernorm=true is not understood; read are residuals before norms."
        raise_problems([sentence], source)
    hidden = int(given(config, "n_embed", given(config, "hidden_size", 0))) or size(config, "hidden_size")
    heads, layers = (_either(config, *keys) for keys in (_HEADS, _LAYERS))
    return ModelSpec(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        activation="gelu_tanh",
        bias=True,
        embedding_norm=True,
        max_positions=int(given(config, "seq_length", 2048)),
        **_common(config, hidden, heads),
    )


def _mpt(config: Config, name: str, source: str) -> ModelSpec:
    """`MptConfig` (MPT-7B, MPT-30B): GPT with ALiBi and without any bias."""
    attention = config.get("attn_config") or {}
    usual = {**_USUAL_ATTENTION, "softmax_scale": attention.get("softmax_scale")}
    problems = [
        f"attn_config.{key}={attention[key]!r} is not understood; read is {usual[key]!r}."
        for key in usual
        if attention.get(key) is not None and attention[key] != usual[key]
    ]
    problems += [f"{key}={config[key]!r} is not understood." for key in ("logit_scale",) if config.get(key) is not None]
    if not given(config, "no_bias", True):
        problems.append("no_bias=false is not understood; read are layers without biases.")
    raise_problems(problems, source)
    hidden, scale = size(config, "d_model"), usual["softmax_scale"]
    return ModelSpec(
        name=name,
        num_layers=size(config, "n_layers"),
        hidden_size=hidden,
        ffn_hidden_size=int(given(config, "expansion_ratio", 4)) * hidden,
        activation="gelu",
        norm_bias=False,
        attention_scale=None if scale is None else float(scale),
        max_positions=int(given(config, "max_seq_len", 2048)),
        **_common(config, hidden, size(config, "n_heads")),
    )


def _common(config: Config, hidden: int, heads: int) -> dict[str, Any]:
    """What both families have."""
    return {
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // max(1, heads),
        "vocab_size": size(config, "vocab_size"),
        "norm": "layernorm",
        "norm_eps": float(given(config, "layer_norm_epsilon", 1e-5)),
        "position": "alibi",
        "tied_embeddings": bool(given(config, "tie_word_embeddings", True)),
    }


def _either(config: Config, *keys: str) -> int:
    """The one of several keys of a number that a config has. Raises `KeyError` where it has none."""
    return size(config, next((key for key in keys if config.get(key) is not None), keys[0]))


_HEADS, _LAYERS = ("n_head", "num_attention_heads"), ("n_layer", "num_hidden_layers")
_USUAL_ATTENTION: dict[str, Any] = {
    "attn_type": "multihead_attention",
    "clip_qkv": None,
    "prefix_lm": False,
    "qk_ln": False,
    "alibi": True,
    "alibi_bias_max": 8,
}

FAMILIES: dict[str, Callable[[Config, str, str], ModelSpec]] = {"bloom": _bloom, "mpt": _mpt}
"""`model_type` -> reader."""


def _written(model: ModelSpec) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "layer_norm_epsilon": model.norm_eps,
        "tie_word_embeddings": model.tied_embeddings,
    }


def _bloom_keys(model: ModelSpec) -> dict[str, Any]:
    return {
        **_written(model),
        "hidden_size": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "seq_length": model.max_positions,
        "apply_residual_connection_post_layernorm": False,
    }


def _mpt_keys(model: ModelSpec) -> dict[str, Any]:
    return {
        **_written(model),
        "d_model": model.hidden_size,
        "n_layers": model.num_layers,
        "n_heads": model.num_heads,
        "expansion_ratio": model.ffn_hidden_size // model.hidden_size,
        "max_seq_len": model.max_positions,
        "no_bias": True,
        "attn_config": {"alibi": True, "alibi_bias_max": 8, "softmax_scale": model.attention_scale},
    }


WRITERS: dict[str, Callable[[ModelSpec], dict[str, Any]]] = {"bloom": _bloom_keys, "mpt": _mpt_keys}
"""Family -> its keys."""

ARCHITECTURES = {"bloom": "BloomForCausalLM", "mpt": "MptForCausalLM"}
