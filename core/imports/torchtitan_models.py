"""torchtitan's models by name and flavor, as fields of a plan, or the reason why our layers do not express them.

Shapes are facts of torchtitan/models/<family>/__init__.py and model/args.py at v0.2.2 (llama2: models/llama/__init__.py
at 0f88ce7 of 2024), which later releases keep.
"""

from __future__ import annotations

from typing import Any

Fields = dict[str, Any]


def _llama(
    layers: int, width: int, heads: int, kv_heads: int = 0, *, multiple: int = 256, times: float = 1.0, **more: Any
) -> Fields:
    """Fields of a Llama, whose MLP is as wide as torchtitan's FeedForward makes it: two thirds of 4 widths, `times`
    more, rounded up to a `multiple`."""
    return {
        "num_layers": layers,
        "hidden_size": width,
        "ffn_hidden_size": _mlp_width(width, multiple, times),
        "num_heads": heads,
        "num_kv_heads": kv_heads or heads,
        "head_dim": width // heads,
        **more,
    }


def _mlp_width(width: int, multiple: int, times: float) -> int:
    hidden = int(times * int(8 * width / 3))
    return -(-hidden // multiple) * multiple


def _qwen(layers: int, width: int, mlp: int, heads: int, kv_heads: int = 8, **more: Any) -> Fields:
    return {
        "num_layers": layers,
        "hidden_size": width,
        "ffn_hidden_size": mlp,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": 151936,
        "qk_norm": True,
        "norm_eps": 1e-6,
        "rope_theta": 1e6,
        **more,
    }


_LLAMA2: Fields = {"vocab_size": 32000}
_LLAMA3_SCALING: Fields = {
    "rope_theta": 500000.0,
    "rope_scaling": "llama3",
    "rope_factor": 8.0,
    "rope_original_positions": 8192,
}
_BIASED: Fields = {"expert_bias": True}
"""MoEArgs.load_balance_coeff (torchtitan/models/moe/moe.py) is 1e-3 unless a flavor says otherwise: none here does."""

_LATENT: Fields = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 192,
    "rope_scaling": "yarn",
    "rope_factor": 40.0,
    "rope_original_positions": 4096,
}
_SMALL_DEEPSEEK: Fields = {
    "num_layers": 6,
    "hidden_size": 256,
    "ffn_hidden_size": 1024,
    "num_heads": 16,
    "num_kv_heads": 16,
    "vocab_size": 2048,
    "num_experts": 8,
    "experts_per_token": 3,
    "num_shared_experts": 2,
    "expert_ffn_hidden_size": 256,
    "first_dense_layers": 1,
    "normalized_router_weights": False,
    "rope_mscale": 0.7,
    "rope_mscale_all_dim": 0.7,
    **_LATENT,
    **_BIASED,
}
_LLAMA4_16: Fields = {
    **_llama(48, 5120, 40, 8, multiple=2048, times=1.2),
    "vocab_size": 202048,
    "rope_theta": 500000.0,
    "num_experts": 16,
    "experts_per_token": 1,
    "num_shared_experts": 1,
    "expert_ffn_hidden_size": 8192,  # auto_scale_hidden_dim: an MLP's, over top_k + num_shared_experts
    "router_scores": "sigmoid",
    "normalized_router_weights": False,
    **_BIASED,
}


def _gpt_oss(layers: int, experts: int, **more: Any) -> Fields:
    """Fields of a gpt-oss (models/gpt_oss/__init__.py of 2026; before, the debugmodel had the whole vocabulary, and the
    ramp between rotary pairs rounded ends)."""
    return {
        "num_layers": layers,
        "hidden_size": 2880,
        "ffn_hidden_size": 2880,
        "num_heads": 64,
        "num_kv_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "num_experts": experts,
        "experts_per_token": 4,
        "bias": True,
        "router_bias": True,
        "activation": "quick_geglu",
        "gate_offset": 1.0,
        "gate_limit": 7.0,
        "attention_sinks": True,
        "sliding_window": 128,
        "window_layers": [1, 0],
        "rope_theta": 150000.0,
        "rope_scaling": "yarn",
        "rope_factor": 32.0,
        "rope_original_positions": 4096,
        "rope_truncate": False,
        **_BIASED,
        **more,
    }


MODELS: dict[str, dict[str, Fields]] = {
    "llama2": {
        "debugmodel": _llama(8, 256, 16, **_LLAMA2),
        "271M": _llama(16, 1024, 8, **_LLAMA2),
        "1B": _llama(18, 2048, 16, **_LLAMA2),
        "7B": {"preset": "llama2-7b"},
        "13B": {"preset": "llama2-13b"},
        "26B": _llama(80, 5120, 40, **_LLAMA2),
        "70B": {"preset": "llama2-70b"},
    },
    "llama3": {
        "debugmodel": _llama(6, 256, 16, vocab_size=2048, **_LLAMA3_SCALING),
        "1B": {"preset": "llama3.2-1b"},
        "3B": {"preset": "llama3.2-3b"},
        "8B": {"preset": "llama3.1-8b"},
        "70B": {"preset": "llama3.1-70b"},
        "405B": {"preset": "llama3.1-405b"},
    },
    "llama4": {
        "17bx16e": _LLAMA4_16,
        "17bx128e": {**_LLAMA4_16, "num_experts": 128, "first_dense_layers": 1, "expert_layer_step": 2},
    },
    "gpt_oss": {
        "debugmodel": _gpt_oss(4, 8, hidden_size=256, vocab_size=2048),
        "20b": _gpt_oss(24, 32),
        "120b": _gpt_oss(36, 128),
    },
    "deepseek_v3": {
        "debugmodel": _SMALL_DEEPSEEK,
        "16B": {"preset": "deepseek-v2-lite", "norm_eps": 1e-5, **_BIASED},
        "236B": {
            "preset": "deepseek-v2",
            "norm_eps": 1e-5,
            "rope_mscale": 1.0,
            "rope_mscale_all_dim": 1.0,
            "router_group_scores": "top_two",
            **_BIASED,
        },
        "671B": {"preset": "deepseek-v3", "norm_eps": 1e-5, "num_mtp_layers": 0},
    },
    "qwen3": {
        "debugmodel": _qwen(8, 256, 3072, 16, vocab_size=2048, tied_embeddings=True),
        "0.6B": _qwen(28, 1024, 3072, 16, tied_embeddings=True),
        "1.7B": _qwen(28, 2048, 6144, 16, tied_embeddings=True),
        "4B": _qwen(36, 2560, 9728, 32, tied_embeddings=True),
        "8B": {"preset": "qwen3-8b"},
        "14B": _qwen(40, 5120, 17408, 40),
        "32B": {"preset": "qwen3-32b"},
        "debugmodel_moe": _qwen(
            8,
            256,
            3072,
            16,
            vocab_size=2048,
            num_experts=64,
            experts_per_token=8,
            expert_ffn_hidden_size=768,
            **_BIASED,
        ),
        "30B-A3B": {"preset": "qwen3-30b-a3b", **_BIASED},
        "235B-A22B": {"preset": "qwen3-235b-a22b", "rope_theta": 5e6, **_BIASED},
    },
}
"""Family -> flavor -> fields of the plan's [model]."""

_WIDTH = "experts of a width that is not recorded here"
_IROPE = "layers without positions (every_n_layers_nope) and attention within blocks of a sequence"

NOT_EXPRESSED: dict[str, dict[str, str]] = {
    "llama4": {
        "debugmodel": _WIDTH,
        "debugmodel_irope": _IROPE,
        "17bx16e_irope": _IROPE,
        "17bx128e_irope": _IROPE,
    },
    "flux": {"": "an image model (double and single stream blocks): no decoder of text"},
    "vlm": {"": "a vision encoder before the decoder"},
    "qwen3_5": {"": "gated linear attention in three of four layers (GatedDeltaNet)"},
    "muse_glimmer": {"": "layers of its own kind (torchtitan/models/muse_glimmer)"},
    "kimi_k2_7": {"": "a vision tower before the decoder (torchtitan/models/kimi_k2_7)"},
    "hf_placeholder": {"": "a model of transformers, named elsewhere ([hf_transformers] model): its shape is not here"},
}
"""Family -> flavor (empty: all) -> the field of the model that our layers lack."""

_SUFFIXES = ("_flex_attn", "_varlen_attn", "_flex", "_varlen")
"""Flavors that differ in their attention kernel only; both mask what lies in another document."""

_FUSED = ("_non_fused_qkv", "_fused_qkv")
"""Flavors that differ in how many products make queries, keys and values; modelled are three."""

_FAMILY_SUFFIXES = ("_simple_fsdp", "_auto_parallel", "_ft")
_FAMILY_NAMES = {
    "transformers_modeling_backend": "hf_placeholder",
    "transformers_backend": "hf_placeholder",
    "deepseekv3": "deepseek_v3",
    "local_map_deepseek_v3": "deepseek_v3",
    "Siglip2": "vlm",
    "llama3-siglip2": "vlm",
}


def family_of(name: str, flavor: str) -> str:
    """The family that a model's name means: experiments train the same models under names of their own
    (`simple_fsdp.llama3`, `llama3_ft`), and `llama` is Llama 3 unless the flavor is one of Llama 2 alone."""
    last = name.rpartition(".")[2]
    for suffix in _FAMILY_SUFFIXES:
        last = last.removesuffix(suffix)
    if last == "llama":
        return "llama2" if flavor in MODELS["llama2"] and flavor not in MODELS["llama3"] else "llama3"
    return _FAMILY_NAMES.get(last, last)


def split_flavor(flavor: str) -> tuple[str, str]:
    """The shape's flavor and the attention that its suffix names: `flex`, `varlen` or nothing."""
    for suffix in _FUSED:
        flavor = flavor.removesuffix(suffix)
    for suffix in _SUFFIXES:
        if flavor.endswith(suffix):
            return flavor.removesuffix(suffix), suffix.split("_")[1]
    return flavor, ""


def flavor_named(family: str, flavor: str) -> str | None:
    """The flavor as the table spells it, whatever its letters' case; None where there is none."""
    return next((each for each in MODELS.get(family, ()) if each.lower() == flavor.lower()), None)
