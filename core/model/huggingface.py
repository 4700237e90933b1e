"""Hugging Face `config.json` files, read by hand: Llama, Mistral, Mixtral, Qwen, DeepSeek, GPT-2 and Falcon."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..base.errors import ModelError, Problem, did_you_mean
from ..base.files import read_text
from ..base.names import one_line
from ..base.parsing import parse_json
from .huggingface_forms import wrong_forms
from .model import SCALING_FIELDS, ModelSpec

Config = Mapping[str, Any]


def read_config(path: str | Path) -> ModelSpec:
    """The model of a `config.json`, or of the folder that holds one.

    Raises `FileError` for a file that is no JSON, `ModelError` for a family that is not read, missing fields, or
    features that the decoder does not have; `OSError` when there is no such file.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    config = parse_json(read_text(file), str(file))
    if not isinstance(config, dict):
        raise ModelError(f"{file}: a config.json holds one object, this holds a {type(config).__name__}.")
    return model_from_config(config, name=one_line(file.resolve().parent.name) or "custom", source=str(file))


def model_from_config(config: Config, *, name: str, source: str = "config.json") -> ModelSpec:
    """The model that a parsed config describes. Raises `ModelError` as `read_config` does."""
    _raise(wrong_forms(config), source)
    family = config.get("model_type")
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        hint = did_you_mean(family, FAMILIES) if isinstance(family, str) else "."
        raise ModelError(
            f"{source}: model_type={family!r} is not read{hint} Read are {known}. Other decoders can be written "
            "field by field."
        )
    try:
        return FAMILIES[family](config, name, source)
    except KeyError as error:
        raise ModelError(f"{source}: {error.args[0]!r} is missing, which every {family} config has.") from error
    except ModelError as error:
        raise ModelError(
            [each if each.origin == source else Problem(each.sentence, origin=source) for each in error.problems]
        ) from error


def _llama(config: Config, name: str, source: str) -> ModelSpec:
    """`LlamaConfig` and `MistralConfig`: pre-norm RMSNorm, rotary positions, SwiGLU."""
    problems = []
    if bool(config.get("attention_bias", False)) != bool(config.get("mlp_bias", False)):
        problems.append("attention_bias and mlp_bias differ; read are configs with both or neither.")
    return _rotary(config, name, source, problems, bias=bool(config.get("attention_bias", False)))


def _mixtral(config: Config, name: str, source: str) -> ModelSpec:
    """`MixtralConfig`: Mistral with experts, as wide as its MLP, in every layer."""
    return _rotary(config, name, source, [], **_experts(config))


def _qwen2(config: Config, name: str, source: str) -> ModelSpec:
    """`Qwen2Config` (Qwen2, Qwen2.5): Llama with a bias on query, key and value."""
    return _rotary(config, name, source, [], qkv_bias=True)


def _qwen3(config: Config, name: str, source: str) -> ModelSpec:
    """`Qwen3Config`: Llama whose query and key heads, 128 wide unless said, are normalised."""
    return _rotary(config, name, source, _biased(config), qk_norm=True, head_dim=int(_given(config, "head_dim", 128)))


def _qwen3_moe(config: Config, name: str, source: str) -> ModelSpec:
    """`Qwen3MoeConfig`: Qwen3 with experts."""
    problems, dense = _biased(config), list(_given(config, "mlp_only_layers", ()))
    if dense != list(range(len(dense))):
        problems.append(f"mlp_only_layers={dense} is not understood; read are dense layers before all others.")
    if _given(config, "decoder_sparse_step", 1) != 1:
        problems.append(
            f"decoder_sparse_step={config['decoder_sparse_step']} is not understood; read are experts in "
            "every later layer."
        )
    experts = _experts(config, width=_size(config, "moe_intermediate_size"), dense=len(dense))
    experts["normalized_router_weights"] = bool(_given(config, "norm_topk_prob", False))
    return _rotary(config, name, source, problems, qk_norm=True, **experts)


def _deepseek(config: Config, name: str, source: str) -> ModelSpec:
    """`DeepseekV2Config` and `DeepseekV3Config`: latent attention, shared experts, the first layers dense."""
    problems = _biased(config)
    if _given(config, "moe_layer_freq", 1) != 1:
        problems.append(
            f"moe_layer_freq={config['moe_layer_freq']} is not understood; read are experts in every later layer."
        )
    nope, rope = _size(config, "qk_nope_head_dim"), _size(config, "qk_rope_head_dim")
    router = _deepseek_router(config, problems)
    return _rotary(
        config,
        name,
        source,
        problems,
        head_dim=nope + rope,
        num_kv_heads=_size(config, "num_attention_heads"),
        q_lora_rank=int(_given(config, "q_lora_rank", 0)),
        kv_lora_rank=_size(config, "kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=_size(config, "v_head_dim"),
        num_mtp_layers=int(_given(config, "num_nextn_predict_layers", 0)),
        **_experts(
            config,
            width=_size(config, "moe_intermediate_size"),
            shared=_given(config, "n_shared_experts", 0),
            dense=_given(config, "first_k_dense_replace", 0),
        ),
        **router,
    )


def _deepseek_router(config: Config, problems: list[str]) -> dict[str, Any]:
    """The router of `DeepseekV2Config` (softmax, greedy or limited to the groups with the best expert) and of
    `DeepseekV3Config` (sigmoid with a bias, limited to the groups with the best two). The first is never normalised."""
    third = config["model_type"] == "deepseek_v3"
    scores, method = _given(config, "scoring_func", "sigmoid" if third else "softmax"), config.get("topk_method")
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
        "normalized_router_weights": third and bool(_given(config, "norm_topk_prob", True)),
        "router_scaling": float(_given(config, "routed_scaling_factor", 2.5 if third else 1.0)),
        "expert_bias": third,
    }
    if third or method == "group_limited_greedy":
        groups = {
            "num_router_groups": int(_given(config, "n_group", 8)),
            "router_groups_per_token": int(_given(config, "topk_group", 4)),
        }
        router |= (
            {**groups, "router_group_scores": "top_two" if third else "max"} if groups["num_router_groups"] > 1 else {}
        )
    return router


def _rotary(config: Config, name: str, source: str, problems: list[str], **more: Any) -> ModelSpec:
    """What all families with rotary positions, RMSNorm and SwiGLU have in common; `more` are a family's own fields.

    Raises `ModelError` for `problems` and for those of the common keys.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act={config['hidden_act']!r} is not understood; read is 'silu' (SwiGLU).")
    window = _window(config, problems)
    scaling = _rope_scaling(rope, problems)
    _raise(problems, source)
    heads = _size(config, "num_attention_heads")
    hidden = _size(config, "hidden_size")
    fields = {
        "num_layers": _size(config, "num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": _size(config, "intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": int(_given(config, "num_key_value_heads", heads)),
        "head_dim": int(_given(config, "head_dim", hidden // max(1, heads))),
        "vocab_size": _size(config, "vocab_size"),
        "max_positions": _size(config, "max_position_embeddings"),
        "norm_eps": float(_given(config, "rms_norm_eps", 1e-6)),
        "rope_theta": float(_given(config, "rope_theta", _given(rope, "rope_theta", 10000.0))),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "sliding_window": window,
        **scaling,
    }
    return ModelSpec(name=name, **{**fields, **more})


def _rope_scaling(rope: Config, problems: list[str]) -> dict[str, Any]:
    """The fields of `ModelSpec.rope_scaling` from `rope_parameters`, or from `rope_scaling` as files
    before transformers 5 have it.

    Of `dynamic`, `transformers` takes `max_position_embeddings` for the original length, whatever else is written.
    """
    kind = _given(rope, "rope_type", rope.get("type"))
    if kind in (None, "default"):
        kind = "none"
    if kind not in ("none", *SCALING_FIELDS):
        problems.append(f"rope_type={kind!r} is not understood; read are default, {', '.join(SCALING_FIELDS)}.")
        return {}
    if rope.get("truncate") is False:
        problems.append("truncate=false of yarn is not understood; read is a ramp between whole pairs.")
    if _given(rope, "partial_rotary_factor", 1.0) != 1.0:
        problems.append(
            f"partial_rotary_factor={rope['partial_rotary_factor']} is not understood; read are heads "
            "that turn as a whole."
        )
    found: dict[str, Any] = {"rope_scaling": kind}
    for field in SCALING_FIELDS.get(kind, ()):
        value = rope.get(
            "original_max_position_embeddings" if field == "rope_original_positions" else field.removeprefix("rope_")
        )
        if value is not None and (kind, field) != ("dynamic", "rope_original_positions"):
            found[field] = int(value) if field == "rope_original_positions" else float(value)
    return found


def _experts(config: Config, *, width: Any = None, shared: Any = 0, dense: Any = 0) -> dict[str, Any]:
    """The fields of experts; families differ in what they call their number."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    number = next((config[name] for name in names if config.get(name) is not None), None)
    if number is None:
        raise KeyError(names[0])
    return {
        "num_experts": int(number),
        "experts_per_token": _size(config, "num_experts_per_tok"),
        "expert_ffn_hidden_size": None if width is None else int(width),
        "num_shared_experts": int(shared),
        "first_dense_layers": int(dense),
    }


def _biased(config: Config) -> list[str]:
    """The problem of a bias on some of a layer's products only."""
    return (
        [("attention_bias=true is not understood in this family; read are configs without.")]
        if config.get("attention_bias")
        else []
    )


def _falcon(config: Config, name: str, source: str) -> ModelSpec:
    """`FalconConfig` with parallel blocks of one norm (Falcon 7B, Falcon2 11B): LayerNorm, rotary positions, one or
    several key heads, tied embeddings by default."""
    problems = []
    grouped = bool(config.get("new_decoder_architecture", False))
    if config.get("alibi"):
        problems.append("alibi=true is not understood; read are rotary positions.")
    if _given(config, "num_ln_in_parallel_attn", 2 if grouped else 1) != 1 or not _given(config, "parallel_attn", True):
        problems.append("a norm for attention and one for the MLP are not understood; read are parallel blocks of one.")
    if _given(config, "activation", "gelu") != "gelu":
        problems.append(f"activation={config['activation']!r} is not understood; read is 'gelu'.")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = _rope_scaling(rope, problems)
    _raise(problems, source)
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    shared = _given(config, "multi_query", True) and not grouped
    return ModelSpec(
        name=name,
        num_layers=_size(config, "num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=int(_given(config, "ffn_hidden_size", 4 * hidden)),
        num_heads=heads,
        num_kv_heads=1 if shared else int(_given(config, "num_kv_heads", heads)),
        head_dim=hidden // max(1, heads),
        vocab_size=_size(config, "vocab_size"),
        max_positions=int(_given(config, "max_position_embeddings", 2048)),
        activation="gelu",
        norm="layernorm",
        norm_eps=float(_given(config, "layer_norm_epsilon", 1e-5)),
        rope_theta=float(_given(config, "rope_theta", _given(rope, "rope_theta", 10000.0))),
        tied_embeddings=bool(_given(config, "tie_word_embeddings", True)),
        bias=bool(_given(config, "bias", False)),
        parallel_block=True,
        **scaling,
    )


def _gpt2(config: Config, name: str, source: str) -> ModelSpec:
    """`GPT2Config`: pre-norm LayerNorm, learned positions, biases everywhere, tied embeddings by default."""
    activations = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
    activation = config.get("activation_function", "gelu_new")
    problems = []
    if activation not in activations:
        problems.append(f"activation_function={activation!r} is not understood; read are {', '.join(activations)}.")
    problems += [
        f"{key}=true is not understood; read are plain GPT-2 layers." for key in _GPT2_VARIANTS if config.get(key)
    ]
    if config.get("scale_attn_weights", True) is not True:
        problems.append("scale_attn_weights=false is not understood; read is attention scaled by 1/sqrt(head_dim).")
    _raise(problems, source)
    hidden, heads = _size(config, "n_embd"), _size(config, "n_head")
    return ModelSpec(
        name=name,
        num_layers=_size(config, "n_layer"),
        hidden_size=hidden,
        ffn_hidden_size=int(_given(config, "n_inner", 4 * hidden)),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // max(1, heads),
        vocab_size=_size(config, "vocab_size"),
        max_positions=_size(config, "n_positions"),
        activation=activations[activation],  # type: ignore[arg-type]
        norm="layernorm",
        norm_eps=float(_given(config, "layer_norm_epsilon", 1e-5)),
        position="learned",
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        bias=True,
    )


_GPT2_VARIANTS = ("scale_attn_by_inverse_layer_idx", "add_cross_attention")

FAMILIES: dict[str, Callable[[Config, str, str], ModelSpec]] = {
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt2": _gpt2,
    "falcon": _falcon,
}
"""`model_type` -> reader."""


def _size(config: Config, key: str) -> int:
    """A whole number that every config of the family has. Raises `KeyError` where it is absent or null."""
    if (value := config.get(key)) is None:
        raise KeyError(key)
    return int(value)


def _given(config: Config, key: str, default: Any) -> Any:
    """The value of a key; the default when it is absent or null, as Hugging Face configs mean it."""
    value = config.get(key)
    return default if value is None else value


def _window(config: Config, problems: list[str]) -> int:
    """`ModelSpec.sliding_window`, 0 where it holds the longest sequence or the family has none. Qwen names a window
    that `use_sliding_window` turns off, and layers before `max_window_layers` that do without."""
    family, layers = config["model_type"], _size(config, "num_hidden_layers")
    qwen = family.startswith("qwen")
    window = config.get("sliding_window", 4096 if family == "mistral" else None)
    if (
        not (qwen or family in ("mistral", "mixtral"))
        or window is None
        or not _given(config, "use_sliding_window", not qwen)
    ):
        return 0
    if window >= _size(config, "max_position_embeddings"):
        return 0
    first = min(layers, int(_given(config, "max_window_layers", 28))) if family in ("qwen2", "qwen3") else 0
    usual = [*["full_attention"] * (first > 0), *["sliding_attention"] * (layers > first)]
    kinds = set(_given(config, "layer_types", usual))
    if kinds == {"full_attention"}:
        return 0
    if kinds != {"sliding_attention"}:
        problems.append(
            f"sliding_window={window} is that of some layers only; read are configs with a window in all layers or "
            "in none. "
            "Set it to null for sequences within the window."
        )
    return int(window)


def _raise(problems: list[str], source: str) -> None:
    if problems:
        raise ModelError([Problem(problem, origin=source) for problem in problems])
