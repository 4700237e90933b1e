"""Hugging Face `config.json` files of families with experts: Mixtral, Qwen, DeepSeek and Kimi, GLM, Granite, OLMoE,
gpt-oss and Llama 4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .huggingface_dense import granite_fields
from .huggingface_keys import (
    Config,
    attention_bias,
    bias_fields,
    expert_fields,
    expert_pattern,
    filled,
    given,
    raise_problems,
    refuse_biases,
    rotary,
    size,
    turned_width,
    window_fields,
)
from .huggingface_windows import qwen_windows
from .model import ModelSpec
from .model_fields import QUICK_GELU


def _mixtral(config: Config, name: str, source: str) -> ModelSpec:
    """`MixtralConfig`: Mistral with experts, as wide as its MLP, in every layer."""
    problems: list[str] = []
    windows = window_fields(config, [True] * size(config, "num_hidden_layers"), problems)
    return rotary(config, name, source, problems, **expert_fields(config), **windows)


def _qwen3_moe(config: Config, name: str, source: str) -> ModelSpec:
    """`Qwen3MoeConfig`: Qwen3 with experts."""
    return _qwen_moe(config, name, source, attention_bias(config), qk_norm=True)


def _qwen2_moe(config: Config, name: str, source: str) -> ModelSpec:
    """`Qwen2MoeConfig`: Qwen2 with experts, and one that all tokens take, of its own width and weighed by a gate."""
    biases = {"qkv_bias": bool(given(config, "qkv_bias", True))}
    shared = size(config, "shared_expert_intermediate_size")
    same = shared == size(config, "moe_intermediate_size")
    return _qwen_moe(
        config,
        name,
        source,
        biases,
        num_shared_experts=1,
        shared_expert_ffn_hidden_size=None if same else shared,
        shared_expert_gate=True,
    )


def _qwen_moe(config: Config, name: str, source: str, biases: dict[str, bool], **more: Any) -> ModelSpec:
    """What both generations have in common: experts in every n-th layer, but for those named dense."""
    problems: list[str] = []
    step, dense = max(1, given(config, "decoder_sparse_step", 1)), set(given(config, "mlp_only_layers", ()))
    layers = [layer for layer in range(step - 1, size(config, "num_hidden_layers"), step) if layer not in dense]
    fields = expert_fields(config, width=size(config, "moe_intermediate_size"))
    fields |= expert_pattern(config, layers, problems, "decoder_sparse_step and mlp_only_layers")
    fields["normalized_router_weights"] = bool(given(config, "norm_topk_prob", False))
    return rotary(config, name, source, problems, **{**biases, **fields, **qwen_windows(config, problems), **more})


def _deepseek(config: Config, name: str, source: str) -> ModelSpec:
    """`DeepseekV2Config` and `DeepseekV3Config`, which Kimi K2 has too: latent attention, shared experts, the first
    layers dense."""
    problems = refuse_biases(config)
    step, first = max(1, given(config, "moe_layer_freq", 1)), int(given(config, "first_k_dense_replace", 0))
    layers = [layer for layer in range(0, size(config, "num_hidden_layers"), step) if layer >= first]
    pattern = expert_pattern(config, layers, problems, "moe_layer_freq and first_k_dense_replace")
    nope, rope = size(config, "qk_nope_head_dim"), size(config, "qk_rope_head_dim")
    router = _deepseek_router(config, problems)
    return rotary(
        config,
        name,
        source,
        problems,
        head_dim=nope + rope,
        num_kv_heads=size(config, "num_attention_heads"),
        q_lora_rank=int(given(config, "q_lora_rank", 0)),
        kv_lora_rank=size(config, "kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=size(config, "v_head_dim"),
        num_mtp_layers=int(given(config, "num_nextn_predict_layers", 0)),
        **{**_wide_experts(config), **pattern},
        **router,
    )


def _wide_experts(config: Config) -> dict[str, Any]:
    """Experts and shared ones, of a width of their own."""
    width, shared = size(config, "moe_intermediate_size"), given(config, "n_shared_experts", 0)
    return expert_fields(config, width=width, shared=shared)


def _deepseek_router(config: Config, problems: list[str]) -> dict[str, Any]:
    """The router of `DeepseekV2Config` (softmax, greedy or limited to the groups with the best expert) and of
    `DeepseekV3Config` (sigmoid with a bias, limited to the groups with the best two). The first is never normalised."""
    third = config["model_type"] != "deepseek_v2"
    scores, method = given(config, "scoring_func", "sigmoid" if third else "softmax"), config.get("topk_method")
    known = ("noaux_tc", None) if third else ("greedy", "group_limited_greedy", None)
    if scores != ("sigmoid" if third else "softmax"):
        problems.append(f"scoring_func={scores!r} is not understood in {config['model_type']}.")
    if method not in known:
        problems.append(f"topk_method={method!r} is not understood; read are {', '.join(filter(None, known))}.")
    if not third and config.get("norm_topk_prob"):
        problems.append(
            "norm_topk_prob=true is not understood in deepseek_v2, whose transformers code does not normalise."
        )
    router: dict[str, Any] = {
        "router_scores": scores,
        "normalized_router_weights": third and bool(given(config, "norm_topk_prob", True)),
        "router_scaling": float(given(config, "routed_scaling_factor", 2.5 if third else 1.0)),
        "expert_bias": third,
    }
    if third or method == "group_limited_greedy":
        groups = {
            "num_router_groups": int(given(config, "n_group", 8)),
            "router_groups_per_token": int(given(config, "topk_group", 4)),
        }
        router |= (
            {**groups, "router_group_scores": "top_two" if third else "max"} if groups["num_router_groups"] > 1 else {}
        )
    return router


def _glm4_moe(config: Config, name: str, source: str) -> ModelSpec:
    """`Glm4MoeConfig` (GLM-4.5): experts as DeepSeek-V3's, grouped attention with biases on query, key and value."""
    problems: list[str] = []
    defaults = {"routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
    filled = {key: given(config, key, value) for key, value in defaults.items()}
    router = _deepseek_router({**config, **filled}, problems)
    dense = {"first_dense_layers": int(given(config, "first_k_dense_replace", 1))}
    return rotary(
        config,
        name,
        source,
        problems,
        rope_dim=turned_width(config, problems, usual=0.5),
        qkv_bias=bool(given(config, "attention_bias", False)),
        qk_norm=bool(given(config, "use_qk_norm", False)),
        num_mtp_layers=int(given(config, "num_nextn_predict_layers", 0)),
        **{**_wide_experts(config), **dense},
        **router,
    )


def _granitemoe(config: Config, name: str, source: str) -> ModelSpec:
    """`GraniteMoeConfig`: Granite with experts, as wide as its MLP, in every layer."""
    problems: list[str] = []
    fields = granite_fields(config, problems)
    return rotary(config, name, source, problems, **attention_bias(config), **fields, **expert_fields(config))


def _olmoe(config: Config, name: str, source: str) -> ModelSpec:
    """`OlmoeConfig` (arXiv 2409.02060): experts as wide as its MLP in every layer, one norm of all queries and one of
    all keys."""
    problems = []
    if config.get("clip_qkv") is not None:
        problems.append(f"clip_qkv={config['clip_qkv']} is not understood; read is null.")
    fields = {"whole_qk_norm": True, "normalized_router_weights": bool(given(config, "norm_topk_prob", False))}
    config = filled(config, rms_norm_eps=1e-5)
    return rotary(config, name, source, problems, **attention_bias(config), **expert_fields(config), **fields)


def _gpt_oss(config: Config, name: str, source: str) -> ModelSpec:
    """`GptOssConfig`: biases everywhere, routers with one, experts with limited gates; attention with sinks, and a
    window in every second layer."""
    problems: list[str] = []
    config = filled(config, rms_norm_eps=1e-5, head_dim=64)
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config["rope_parameters"] = _GPT_OSS_ROPE
    rope = config.get("rope_parameters") or config["rope_scaling"]
    config["rope_theta"] = given(config, "rope_theta", given(rope, "rope_theta", 150000.0))
    if given(config, "swiglu_alpha", QUICK_GELU) != QUICK_GELU:
        problems.append(f"swiglu_alpha={config['swiglu_alpha']} is not understood; read is {QUICK_GELU}.")
    limits = {"activation": "quick_geglu", "gate_offset": 1.0, "gate_limit": float(given(config, "swiglu_limit", 7.0))}
    experts = {**expert_fields(config), "router_bias": True}
    biases = bias_fields(attention=bool(given(config, "attention_bias", True)), mlp=True)
    slides = [layer % 2 == 0 for layer in range(size(config, "num_hidden_layers"))]
    windows = window_fields(config, slides, problems, usual=128)
    return rotary(config, name, source, problems, attention_sinks=True, **biases, **limits, **experts, **windows)


_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The scaling that `GptOssConfig` takes where a file has none."""


def _llama4(config: Config, name: str, source: str) -> ModelSpec:
    """`Llama4TextConfig`: a router whose weight multiplies what goes into an expert, one shared expert, experts in
    every n-th layer, and attention in chunks in most layers. What decides is refused, all of it together."""
    text = config.get("text_config") if config["model_type"] == "llama4" else config
    if not isinstance(text, dict):
        raise KeyError("text_config")
    problems = ["num_local_experts: weights of experts multiply what goes into them; ours what comes out."]
    if given(text, "attn_temperature_tuning", True):
        problems.append("attn_temperature_tuning=true is not understood; read is a scale that no position changes.")
    chunk = given(text, "attention_chunk_size", 8192)
    if chunk < size(text, "max_position_embeddings"):
        problems.append(f"attention_chunk_size={chunk} is not understood; read is attention to all tokens before.")
    if given(text, "use_qk_norm", True):
        problems.append("use_qk_norm=true is a norm of turned heads without weights; ours has some, and comes before.")
    raise_problems(problems, source)
    raise AssertionError("the first of them is always there")


FAMILIES: dict[str, Callable[[Config, str, str], ModelSpec]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "glm4_moe": _glm4_moe,
    "granitemoe": _granitemoe,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
    "llama4_text": _llama4,
}
"""`model_type` -> reader."""
