"""`config.json` of families that look like Llama, whose layers differ in what a token attends to or whether they have
positions: Mistral, Ministral, Phi-3 and Phi-4, SmolLM3, Gemma; and the windows of Qwen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..base.errors import ModelError
from .attention_kinds import every_nth, of_layer, pattern_of
from .huggingface_keys import Config, attention_bias, bias_fields, given, rotary, size, turned_width, window_fields
from .model import ModelSpec


def qwen_windows(config: Config, problems: list[str]) -> dict[str, Any]:
    """Qwen names a window that `use_sliding_window` turns on, in Qwen2 and Qwen3 from layer `max_window_layers` on."""
    if not given(config, "use_sliding_window", False):
        return {}
    layers, by_layer = size(config, "num_hidden_layers"), config["model_type"] in ("qwen2", "qwen3")
    first = int(given(config, "max_window_layers", 28)) if by_layer else 0
    return window_fields(config, [layer >= first for layer in range(layers)], problems)


def _mistral(config: Config, name: str, source: str) -> ModelSpec:
    """`MistralConfig` and `MinistralConfig`: Llama with a window, in all layers or those of `layer_types` (which
    `transformers` reads of Ministral only)."""
    problems: list[str] = []
    windows = window_fields(config, [True] * size(config, "num_hidden_layers"), problems, usual=4096)
    return rotary(config, name, source, problems, **windows)


def _ministral3(config: Config, name: str, source: str) -> ModelSpec:
    """`Ministral3Config`: Mistral whose queries grow behind the original sequence by `llama_4_scaling_beta`."""
    problems: list[str] = []
    if (rope := config.get("rope_parameters")) is None:
        raise KeyError("rope_parameters")
    longer = size(config, "max_position_embeddings") > size(rope, "original_max_position_embeddings")
    if longer and (beta := rope.get("llama_4_scaling_beta")):
        problems.append(
            f"llama_4_scaling_beta={beta} is not understood: queries behind original_max_position_embeddings grow. "
            "Set max_position_embeddings to that for sequences within it."
        )
    windows = window_fields(config, [True] * size(config, "num_hidden_layers"), problems)
    return rotary(config, name, source, problems, head_dim=int(given(config, "head_dim", 128)), **windows)


def _phi3(config: Config, name: str, source: str) -> ModelSpec:
    """`Phi3Config` (Phi-3, Phi-4): Llama with a window in all layers, of whose heads a part may turn."""
    problems: list[str] = []
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_dim = turned_width({**config, "head_dim": None}, problems)
    head_dim = size(config, "hidden_size") // max(1, size(config, "num_attention_heads"))
    if (kind := given(rope, "rope_type", rope.get("type"))) not in (None, "default"):
        problems.append(f"rope_type={kind!r} is not understood in phi3, whose pairs then have a factor each.")
    windows = window_fields(config, [True] * size(config, "num_hidden_layers"), problems)
    return rotary(config, name, source, problems, head_dim=head_dim, rope_dim=rope_dim, **windows)


def _smollm3(config: Config, name: str, source: str) -> ModelSpec:
    """`SmolLM3Config`: Llama with layers that have no positions, every fourth unless said; these may have a window."""
    problems: list[str] = []
    layers = size(config, "num_hidden_layers")
    rope, listed = given(config, "rope_parameters", {}), config.get("no_rope_layers")
    pattern = every_nth(int(given(config, "no_rope_layer_interval", 4))) if listed is None else tuple(listed)
    if listed is not None and len(listed) < layers:
        problems.append(f"no_rope_layers has {len(listed)} entries, and num_hidden_layers={layers}.")
    turns = [of_layer(pattern, layer) for layer in range(layers)]
    windowed = bool(given(config, "use_sliding_window", False))
    windows = window_fields(config, [not each for each in turns], problems) if windowed else {}
    return rotary(
        config,
        name,
        source,
        problems,
        rope_theta=float(given(config, "rope_theta", given(rope, "rope_theta", 2e6))),
        tied_embeddings=bool(given(config, "tie_word_embeddings", True)),
        rope_layers=pattern_of(turns),
        **bias_fields(attention=bool(config.get("attention_bias")), mlp=bool(config.get("mlp_bias"))),
        **windows,
    )


def _gemma(config: Config, name: str, source: str) -> ModelSpec:
    """`GemmaConfig` (arXiv 2403.08295, section 2): norms with an offset, embeddings times the root of their width. Of
    its two names of the activation `gelu` means the approximation, as the first files have it."""
    problems: list[str] = []
    if (activation := given(config, "hidden_act", "gelu_pytorch_tanh")) not in ("gelu", "gelu_pytorch_tanh"):
        problems.append(f"hidden_act={activation!r} is not understood; read is 'gelu_pytorch_tanh'.")
    fields = {**_gemma_fields({**config, "query_pre_attn_scalar": None}, problems), "post_norms": False}
    return rotary(_as_llama(config), name, source, problems, **{**fields, "attention_scale": None})


def _gemma2(config: Config, name: str, source: str) -> ModelSpec:
    """`Gemma2Config` (arXiv 2408.00118, section 2): capped scores and logits, a window in every second layer."""
    problems: list[str] = []
    slides = [layer % 2 == 0 for layer in range(size(config, "num_hidden_layers"))]
    windows = window_fields(config, slides, problems, usual=4096)
    caps = {
        "attention_softcap": float(config.get("attn_logit_softcapping", 50.0) or 0.0),
        "logit_softcap": float(config.get("final_logit_softcapping", 30.0) or 0.0),
    }
    return rotary(_as_llama(config), name, source, problems, **_gemma_fields(config, problems), **caps, **windows)


def _gemma3(config: Config, name: str, source: str) -> ModelSpec:
    """`Gemma3TextConfig` (arXiv 2503.19786, section 2): normed queries and keys, a window and a smaller base of rotary
    positions in all but every sixth layer. Versions before transformers 5 give that base a key of its own."""
    problems: list[str] = []
    step = int(given(config, "sliding_window_pattern", 6))
    slides = [bool((layer + 1) % step) for layer in range(size(config, "num_hidden_layers"))]
    windows = window_fields(config, slides, problems, usual=4096)
    rope = given(config, "rope_parameters", {})
    whole, local = given(rope, "full_attention", {}), given(rope, "sliding_attention", {})
    if given(local, "rope_type", "default") != "default":
        problems.append(f"rope_type={local['rope_type']!r} of sliding_attention is not understood; read is 'default'.")
    base = float(given(local, "rope_theta", given(config, "rope_local_base_freq", 10000.0)))
    theta = float(given(config, "rope_theta", given(whole, "rope_theta", 1e6)))
    caps = {
        "attention_softcap": float(given(config, "attn_logit_softcapping", 0.0)),
        "logit_softcap": float(given(config, "final_logit_softcapping", 0.0)),
    }
    fields = {**_gemma_fields(config, problems), **caps, **windows, "qk_norm": True, "rope_theta": theta}
    if windows:
        fields["rope_local_theta"] = base
    scaled = {**_as_llama(config), "rope_parameters": whole or given(config, "rope_scaling", {})}
    return rotary(scaled, name, source, problems, **fields)


def _as_llama(config: Config) -> dict[str, Any]:
    """Without the activation, which Gemma names twice."""
    return {key: value for key, value in config.items() if key != "hidden_act"}


def _gemma_fields(config: Config, problems: list[str]) -> dict[str, Any]:
    """What all generations have: norms with an offset, from the second on before and behind both halves and with a
    scale of scores of their own; embeddings times the root of their width, tied by default."""
    if given(config, "use_bidirectional_attention", False):
        problems.append("use_bidirectional_attention=true is not understood; read are decoders.")
    if (activation := given(config, "hidden_activation", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
        problems.append(f"hidden_activation={activation!r} is not understood; read is 'gelu_pytorch_tanh'.")
    head_dim, scalar = int(given(config, "head_dim", 256)), float(given(config, "query_pre_attn_scalar", 256))
    if scalar <= 0:
        problems.append(f"query_pre_attn_scalar={scalar:g} must be above 0.")
    return {
        "activation": "geglu_tanh",
        "norm_offset": 1.0,
        "post_norms": True,
        "head_dim": head_dim,
        "attention_scale": None if scalar == head_dim or scalar <= 0 else scalar**-0.5,
        "embedding_multiplier": size(config, "hidden_size") ** 0.5,
        "tied_embeddings": bool(given(config, "tie_word_embeddings", True)),
        **attention_bias(config),
    }


def _with_a_tower(config: Config, name: str, source: str) -> ModelSpec:
    """A decoder behind a vision tower. Raises `ModelError`."""
    raise ModelError(
        f"{source}: vision_config is a tower before the decoder, which a plan does not have. The decoder alone is read "
        "from a config.json that holds what text_config does."
    )


FAMILIES: dict[str, Callable[[Config, str, str], ModelSpec]] = {
    "mistral": _mistral,
    "ministral": _mistral,
    "ministral3": _ministral3,
    "mistral3": _with_a_tower,
    "gemma3": _with_a_tower,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "smollm3": _smollm3,
}
"""`model_type` -> reader."""
