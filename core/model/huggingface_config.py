"""`config.json` of a model, the way back from `core.model.huggingface`.

A family is taken only where the file that would be written reads as the same model again, so that no
field is lost on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from ..base.errors import ModelError
from . import huggingface_alibi
from .attention_kinds import layer_window, of_layer, pattern_of
from .huggingface import model_from_config
from .model import ModelSpec
from .model_fields import SCALING_FIELDS

NAMES = {"fp32": "float32", "bf16": "bfloat16"}
"""`precision.dtype` -> what the files call it."""


def config_of(model: ModelSpec, dtype: str) -> dict[str, Any]:
    """The content of a `config.json` for weights kept as `dtype` (`fp32`, `bf16`), without the
    padding of the vocabulary.

    Raises `ModelError` when no family of `core.model.huggingface` has such a model; it names the closest
    and what it has otherwise.
    """
    plain = as_written(model)
    misfits: dict[str, list[str]] = {}
    for family, writer in _WRITERS.items():
        config = {
            "architectures": [ARCHITECTURES[family]],
            "model_type": family,
            "dtype": NAMES[dtype],
            **writer(plain),
        }
        try:
            again = model_from_config(config, name=model.name)
        except ModelError:  # a family that does not even have the model's shape
            continue
        if again == plain:
            return config
        misfits[family] = list(_misfit(plain, again))
    closest = min(misfits, key=lambda family: len(misfits[family]))
    raise ModelError(
        f"model {model.name} is of no family that Hugging Face files are written for ({', '.join(_WRITERS)}); the "
        f"closest is {closest}, "
        f"but for {', '.join(misfits[closest])}."
    )


def as_written(model: ModelSpec) -> ModelSpec:
    """The model as its files describe it: without padding of the vocabulary and without what only training chooses,
    patterns of layers as short as they can be."""
    defaults: dict[str, Any] = {field.name: field.default for field in fields(ModelSpec)}
    changed: dict[str, Any] = {name: defaults[name] for name in TRAINING_FIELDS}
    for name in ("window_layers", "rope_layers"):  # what a longer pattern says of the layers there are
        pattern = getattr(model, name)
        changed[name] = pattern_of([of_layer(pattern, layer) for layer in range(model.num_layers)])
    return replace(model, vocab_size=model.vocab_size - model.padding_rows, padding_rows=0, **changed)


TRAINING_FIELDS = ("hidden_dropout", "attention_dropout", "expert_capacity_factor")
"""Fields of a model that change how it is trained and not what its weights compute."""


def _misfit(ours: ModelSpec, theirs: ModelSpec) -> Iterator[str]:
    for field in fields(ModelSpec):
        if (value := getattr(ours, field.name)) != getattr(theirs, field.name):
            yield f"{field.name}={value!r}"


def _llama(model: ModelSpec) -> dict[str, Any]:
    return {**_rotary(model), **_attention_bias(model), "mlp_bias": model.bias or model.mlp_bias}


def _attention_bias(model: ModelSpec) -> dict[str, bool]:
    return {"attention_bias": model.bias or (model.qkv_bias and model.attention_output_bias)}


def _granite(model: ModelSpec) -> dict[str, Any]:
    return {
        **_llama(model),
        "embedding_multiplier": model.embedding_multiplier,
        "residual_multiplier": model.residual_multiplier,
        "attention_multiplier": model.attention_scale or model.head_dim**-0.5,
        "logits_scaling": _inverse(model.logit_multiplier),
    }


def _inverse(x: float) -> float:
    """The shortest number of which `x` is the inverse.

    >>> _inverse(1 / 49), _inverse(1 / 0.3)
    (49.0, 0.3)
    """
    candidates = (round(1 / x, digits) for digits in range(17))
    return next((each for each in candidates if each and 1 / each == x), 1 / x)


def _granitemoe(model: ModelSpec) -> dict[str, Any]:
    experts = {"num_local_experts": model.num_experts, "num_experts_per_tok": model.experts_per_token}
    return {key: value for key, value in _granite(model).items() if key != "mlp_bias"} | experts


def _glm4(model: ModelSpec) -> dict[str, Any]:
    return {**_partly_turned(model), "attention_bias": model.qkv_bias, **_NO_PADDING}


def _partly_turned(model: ModelSpec) -> dict[str, Any]:
    """The keys of a family of whose heads a part may turn."""
    share, found = model.rope_dim / model.head_dim if model.rope_dim else 1.0, _rotary(model)
    return {**found, "rope_parameters": {**found["rope_parameters"], "partial_rotary_factor": share}}


def _cohere2(model: ModelSpec) -> dict[str, Any]:
    found = {key: value for key, value in _rotary(model).items() if key != "rms_norm_eps"}
    return {
        **found,
        **_attention_bias(model),
        "layer_norm_eps": model.norm_eps,
        "logit_scale": model.logit_multiplier,
        "sliding_window": model.sliding_window or model.max_positions,
        "layer_types": _layer_types(model),
    }


def _mistral(model: ModelSpec) -> dict[str, Any]:
    return {**_rotary(model), "sliding_window": model.sliding_window or None}


def _ministral(model: ModelSpec) -> dict[str, Any]:
    return {**_mistral(model), "layer_types": _layer_types(model)}


def _layer_types(model: ModelSpec) -> list[str]:
    windows = (layer_window(model, layer) for layer in range(model.num_layers))
    return ["sliding_attention" if window else "full_attention" for window in windows]


def _phi3(model: ModelSpec) -> dict[str, Any]:
    keys = {**_mistral(model), **_partly_turned(model)}
    return keys | {"original_max_position_embeddings": model.max_positions, **_NO_PADDING}


def _gemma2(model: ModelSpec) -> dict[str, Any]:
    return {
        **_gemma(model),
        "attn_logit_softcapping": model.attention_softcap or None,
        "final_logit_softcapping": model.logit_softcap or None,
    }


def _gemma3(model: ModelSpec) -> dict[str, Any]:
    return {**_gemma2(model), "rope_parameters": _two_ropes(model, model.rope_local_theta or 10000.0)}


def _two_ropes(model: ModelSpec, local_theta: float) -> dict[str, Any]:
    """`rope_parameters` of layers without a window and with one."""
    local = {"rope_type": "default", "rope_theta": local_theta}
    return {"full_attention": _rope(model), "sliding_attention": local}


def _gemma1(model: ModelSpec) -> dict[str, Any]:
    return {**_rotary(model), **_attention_bias(model), "hidden_act": "gelu_pytorch_tanh", **_NO_PADDING}


def _olmo2(model: ModelSpec) -> dict[str, Any]:
    return {**_rotary(model), **_attention_bias(model), **_NO_PADDING}


def _olmo3(model: ModelSpec) -> dict[str, Any]:
    windows = {"sliding_window": model.sliding_window or model.max_positions, "layer_types": _layer_types(model)}
    ropes = _two_ropes(model, model.rope_local_theta or model.rope_theta)
    return {**_olmo2(model), **windows, "rope_parameters": ropes}


def _olmoe(model: ModelSpec) -> dict[str, Any]:
    experts = {"num_experts": model.num_experts, "num_experts_per_tok": model.experts_per_token}
    found = {**_olmo2(model), **experts, "norm_topk_prob": model.normalized_router_weights}
    return {key: value for key, value in found.items() if key != "head_dim"}  # an even share of the hidden size


def _gpt_oss(model: ModelSpec) -> dict[str, Any]:
    return {
        **_mixtral(model),
        "attention_bias": model.bias or model.qkv_bias,
        "sliding_window": model.sliding_window or model.max_positions,
        "layer_types": _layer_types(model),
        "swiglu_limit": model.gate_limit,
        **_NO_PADDING,
    }


def _gemma(model: ModelSpec) -> dict[str, Any]:
    """What both generations have in common."""
    scalar = float(_inverse((model.attention_scale or model.head_dim**-0.5) ** 2))
    return {
        **_rotary(model),
        **_attention_bias(model),
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": int(scalar) if scalar.is_integer() else scalar,
        "sliding_window": model.sliding_window or model.max_positions,
        "layer_types": _layer_types(model),
        **_NO_PADDING,
    }


_NO_PADDING = {"pad_token_id": None}
"""Else the class has an id of its own published models, beyond smaller vocabularies."""


def _smollm3(model: ModelSpec) -> dict[str, Any]:
    windowed = model.sliding_window > 0
    return {
        **_llama(model),
        **_NO_PADDING,
        "no_rope_layers": [int(of_layer(model.rope_layers, layer)) for layer in range(model.num_layers)],
        "use_sliding_window": windowed,
        **({"sliding_window": model.sliding_window, "layer_types": _layer_types(model)} if windowed else {}),
    }


def _qwen2(model: ModelSpec) -> dict[str, Any]:
    windowed = model.sliding_window > 0
    return {
        **_rotary(model),
        "use_sliding_window": windowed,
        "sliding_window": model.sliding_window or None,
        **({"max_window_layers": 0} if windowed else {}),
        **({"layer_types": _layer_types(model)} if model.window_layers else {}),
    }


def _qwen3(model: ModelSpec) -> dict[str, Any]:
    return {**_qwen2(model), **_attention_bias(model)}


def _mixtral(model: ModelSpec) -> dict[str, Any]:
    return {**_mistral(model), "num_local_experts": model.num_experts, "num_experts_per_tok": model.experts_per_token}


def _qwen3_moe(model: ModelSpec) -> dict[str, Any]:
    return {
        **_qwen3(model),
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.expert_width,
        "mlp_only_layers": [layer for layer in range(model.num_layers) if not model.layer_is_moe(layer)],
        "decoder_sparse_step": 1,
        "norm_topk_prob": model.normalized_router_weights,
    }


def _qwen2_moe(model: ModelSpec) -> dict[str, Any]:
    found = {**_qwen3_moe(model), "qkv_bias": model.qkv_bias}
    del found["attention_bias"]
    return {**found, "shared_expert_intermediate_size": model.shared_expert_width}


def _glm4_moe(model: ModelSpec) -> dict[str, Any]:
    return {
        **_wide_experts(model),
        **_partly_turned(model),
        "attention_bias": model.qkv_bias,
        "use_qk_norm": model.qk_norm,
        "num_nextn_predict_layers": model.num_mtp_layers,
    }


def _deepseek(model: ModelSpec) -> dict[str, Any]:
    """What both generations have in common."""
    return {
        **_rotary(model),
        "attention_bias": False,
        "q_lora_rank": model.q_lora_rank or None,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_nope_head_dim,
        "qk_rope_head_dim": model.qk_rope_head_dim,
        "v_head_dim": model.v_head_dim,
        "moe_layer_freq": 1,
        "scoring_func": model.router_scores,
        **_wide_experts(model),
    }


def _wide_experts(model: ModelSpec) -> dict[str, Any]:
    """Experts of DeepSeek and those who took them over."""
    return {
        "n_routed_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.expert_width,
        "n_shared_experts": model.num_shared_experts,
        "first_k_dense_replace": model.first_dense_layers,
        "norm_topk_prob": model.normalized_router_weights,
        "routed_scaling_factor": model.router_scaling,
        "n_group": model.num_router_groups or 1,
        "topk_group": model.router_groups_per_token or 1,
    }


def _deepseek_v2(model: ModelSpec) -> dict[str, Any]:
    return {**_deepseek(model), "topk_method": "group_limited_greedy" if model.num_router_groups else "greedy"}


def _deepseek_v3(model: ModelSpec) -> dict[str, Any]:
    return {**_deepseek(model), "topk_method": "noaux_tc", "num_nextn_predict_layers": model.num_mtp_layers}


def _rotary(model: ModelSpec) -> dict[str, Any]:
    """What all families with rotary positions have in common."""
    return {
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.qk_rope_head_dim if model.is_mla else model.head_dim,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": _rope(model),
        "tie_word_embeddings": model.tied_embeddings,
    }


def _rope(model: ModelSpec) -> dict[str, Any]:
    """`rope_parameters`; numbers that are their defaults are left out."""
    kind = model.rope_scaling
    changed = {
        name: value
        for name in SCALING_FIELDS.get(kind, ())
        if (value := getattr(model, name)) != getattr(ModelSpec, name)
    }
    numbers = {_ROPE_NAMES.get(name, name.removeprefix("rope_")): value for name, value in changed.items()}
    return {"rope_type": "default" if kind == "none" else kind, "rope_theta": model.rope_theta, **numbers}


_ROPE_NAMES = {"rope_original_positions": "original_max_position_embeddings"}


def _gpt2(model: ModelSpec) -> dict[str, Any]:
    activations = {"gelu_tanh": "gelu_new", "gelu": "gelu"}
    return {
        "activation_function": activations.get(model.activation, model.activation),
        "n_embd": model.hidden_size,
        "n_head": model.num_heads,
        "n_inner": model.ffn_hidden_size,
        "n_layer": model.num_layers,
        "n_positions": model.max_positions,
        "vocab_size": model.vocab_size,
        "layer_norm_epsilon": model.norm_eps,
        "tie_word_embeddings": model.tied_embeddings,
    }


def _falcon(model: ModelSpec) -> dict[str, Any]:
    return {
        "activation": model.activation,
        "alibi": model.position == "alibi",
        "bias": model.bias,
        "ffn_hidden_size": model.ffn_hidden_size,
        "hidden_size": model.hidden_size,
        "layer_norm_epsilon": model.norm_eps,
        "max_position_embeddings": model.max_positions,
        "multi_query": model.num_kv_heads == 1,
        "new_decoder_architecture": model.num_kv_heads > 1 and model.parallel_block,
        "num_attention_heads": model.num_heads,
        "num_hidden_layers": model.num_layers,
        "num_kv_heads": model.num_kv_heads,
        "num_ln_in_parallel_attn": 1,
        "parallel_attn": model.parallel_block,
        "rope_theta": model.rope_theta,
        "rope_parameters": _rope(model),
        "tie_word_embeddings": model.tied_embeddings,
        "vocab_size": model.vocab_size,
    }


_WRITERS: dict[str, Callable[[ModelSpec], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _mistral,
    "ministral": _ministral,
    "phi3": _phi3,
    "gemma": _gemma1,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "smollm3": _smollm3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "falcon": _falcon,
    "qwen2_moe": _qwen2_moe,
    "granite": _granite,
    "granitemoe": _granitemoe,
    "glm4": _glm4,
    "glm4_moe": _glm4_moe,
    "cohere2": _cohere2,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
    **huggingface_alibi.WRITERS,
}
"""Family -> its keys, most general names first: the first family that reads back as the same model is taken."""

ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "falcon": "FalconForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    **huggingface_alibi.ARCHITECTURES,
}
"""Family -> the class that `transformers` loads its files with."""
