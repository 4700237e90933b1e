"""Hugging Face `config.json` files, read by hand: Llama, Mixtral, Qwen, DeepSeek, GPT-2, Falcon, and the families of
`huggingface_windows`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..base.errors import ModelError, Problem, did_you_mean
from ..base.files import read_text
from ..base.names import one_line
from ..base.parsing import parse_json
from .huggingface_forms import wrong_forms
from .huggingface_keys import (
    Config,
    expert_fields,
    given,
    one_bias,
    raise_problems,
    refuse_biases,
    rope_scaling,
    rotary,
    size,
    window_fields,
)
from .huggingface_windows import WINDOWED, qwen_windows
from .model import ModelSpec


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
    raise_problems(wrong_forms(config), source)
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
    """`LlamaConfig`: pre-norm RMSNorm, rotary positions, SwiGLU."""
    problems: list[str] = []
    return rotary(config, name, source, problems, **one_bias(config, problems))


def _mixtral(config: Config, name: str, source: str) -> ModelSpec:
    """`MixtralConfig`: Mistral with experts, as wide as its MLP, in every layer."""
    problems: list[str] = []
    windows = window_fields(config, [True] * size(config, "num_hidden_layers"), problems)
    return rotary(config, name, source, problems, **expert_fields(config), **windows)


def _qwen2(config: Config, name: str, source: str) -> ModelSpec:
    """`Qwen2Config` (Qwen2, Qwen2.5): Llama with a bias on query, key and value."""
    problems: list[str] = []
    return rotary(config, name, source, problems, qkv_bias=True, **qwen_windows(config, problems))


def _qwen3(config: Config, name: str, source: str) -> ModelSpec:
    """`Qwen3Config`: Llama whose query and key heads, 128 wide unless said, are normalised."""
    problems, head_dim = refuse_biases(config), int(given(config, "head_dim", 128))
    return rotary(config, name, source, problems, qk_norm=True, head_dim=head_dim, **qwen_windows(config, problems))


def _qwen3_moe(config: Config, name: str, source: str) -> ModelSpec:
    """`Qwen3MoeConfig`: Qwen3 with experts."""
    problems, dense = refuse_biases(config), list(given(config, "mlp_only_layers", ()))
    if dense != list(range(len(dense))):
        problems.append(f"mlp_only_layers={dense} is not understood; read are dense layers before all others.")
    if given(config, "decoder_sparse_step", 1) != 1:
        problems.append(
            f"decoder_sparse_step={config['decoder_sparse_step']} is not understood; read are experts in "
            "every later layer."
        )
    mixture = expert_fields(config, width=size(config, "moe_intermediate_size"), dense=len(dense))
    mixture["normalized_router_weights"] = bool(given(config, "norm_topk_prob", False))
    windows = qwen_windows(config, problems)
    return rotary(config, name, source, problems, qk_norm=True, **mixture, **windows)


def _deepseek(config: Config, name: str, source: str) -> ModelSpec:
    """`DeepseekV2Config` and `DeepseekV3Config`: latent attention, shared experts, the first layers dense."""
    problems = refuse_biases(config)
    if given(config, "moe_layer_freq", 1) != 1:
        problems.append(
            f"moe_layer_freq={config['moe_layer_freq']} is not understood; read are experts in every later layer."
        )
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
        **expert_fields(
            config,
            width=size(config, "moe_intermediate_size"),
            shared=given(config, "n_shared_experts", 0),
            dense=given(config, "first_k_dense_replace", 0),
        ),
        **router,
    )


def _deepseek_router(config: Config, problems: list[str]) -> dict[str, Any]:
    """The router of `DeepseekV2Config` (softmax, greedy or limited to the groups with the best expert) and of
    `DeepseekV3Config` (sigmoid with a bias, limited to the groups with the best two). The first is never normalised."""
    third = config["model_type"] == "deepseek_v3"
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


def _falcon(config: Config, name: str, source: str) -> ModelSpec:
    """`FalconConfig` with parallel blocks of one norm (Falcon 7B, Falcon2 11B): LayerNorm, rotary positions, one or
    several key heads, tied embeddings by default."""
    problems = []
    grouped = bool(config.get("new_decoder_architecture", False))
    if config.get("alibi"):
        problems.append("alibi=true is not understood; read are rotary positions.")
    if given(config, "num_ln_in_parallel_attn", 2 if grouped else 1) != 1 or not given(config, "parallel_attn", True):
        problems.append("a norm for attention and one for the MLP are not understood; read are parallel blocks of one.")
    if given(config, "activation", "gelu") != "gelu":
        problems.append(f"activation={config['activation']!r} is not understood; read is 'gelu'.")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = rope_scaling(rope, problems)
    raise_problems(problems, source)
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    shared = given(config, "multi_query", True) and not grouped
    return ModelSpec(
        name=name,
        num_layers=size(config, "num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=int(given(config, "ffn_hidden_size", 4 * hidden)),
        num_heads=heads,
        num_kv_heads=1 if shared else int(given(config, "num_kv_heads", heads)),
        head_dim=hidden // max(1, heads),
        vocab_size=size(config, "vocab_size"),
        max_positions=int(given(config, "max_position_embeddings", 2048)),
        activation="gelu",
        norm="layernorm",
        norm_eps=float(given(config, "layer_norm_epsilon", 1e-5)),
        rope_theta=float(given(config, "rope_theta", given(rope, "rope_theta", 10000.0))),
        tied_embeddings=bool(given(config, "tie_word_embeddings", True)),
        bias=bool(given(config, "bias", False)),
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
    raise_problems(problems, source)
    hidden, heads = size(config, "n_embd"), size(config, "n_head")
    return ModelSpec(
        name=name,
        num_layers=size(config, "n_layer"),
        hidden_size=hidden,
        ffn_hidden_size=int(given(config, "n_inner", 4 * hidden)),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // max(1, heads),
        vocab_size=size(config, "vocab_size"),
        max_positions=size(config, "n_positions"),
        activation=activations[activation],  # type: ignore[arg-type]
        norm="layernorm",
        norm_eps=float(given(config, "layer_norm_epsilon", 1e-5)),
        position="learned",
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        bias=True,
    )


_GPT2_VARIANTS = ("scale_attn_by_inverse_layer_idx", "add_cross_attention")

FAMILIES: dict[str, Callable[[Config, str, str], ModelSpec]] = {
    "llama": _llama,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt2": _gpt2,
    "falcon": _falcon,
    **WINDOWED,
}
"""`model_type` -> reader."""
