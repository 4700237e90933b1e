"""`config.json` of families that look like Llama, whose layers differ in what a token attends to or whether they have
positions: Mistral, Ministral, Phi-3 and Phi-4, SmolLM3; and the windows of Qwen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..base.errors import ModelError
from .attention_kinds import every_nth, of_layer, pattern_of
from .huggingface_keys import Config, bias_fields, given, rotary, size, window_fields
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
    share = float(given(rope, "partial_rotary_factor", given(config, "partial_rotary_factor", 1.0)))
    head_dim = size(config, "hidden_size") // max(1, size(config, "num_attention_heads"))
    if not 0 < share <= 1:
        problems.append(f"partial_rotary_factor={share} must be above 0 and at most 1.")
    if (kind := given(rope, "rope_type", rope.get("type"))) not in (None, "default"):
        problems.append(f"rope_type={kind!r} is not understood in phi3, whose pairs then have a factor each.")
    windows = window_fields(config, [True] * size(config, "num_hidden_layers"), problems)
    turned = int(head_dim * share)
    rope_dim = turned if turned < head_dim else 0
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
    "phi3": _phi3,
    "smollm3": _smollm3,
}
"""`model_type` -> reader."""
