"""Hugging Face `config.json` files, read by hand: Llama, Qwen, GPT-2 and Falcon here; others in `huggingface_alibi`,
`huggingface_dense`, `huggingface_windows` and `huggingface_experts`, and what no layer here can express in
`huggingface_refused`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..base.errors import ModelError, Problem, did_you_mean
from ..base.files import read_text
from ..base.names import one_line
from ..base.parsing import parse_json
from . import huggingface_alibi, huggingface_dense, huggingface_experts, huggingface_windows
from .huggingface_forms import wrong_forms
from .huggingface_keys import Config, attention_bias, bias_fields, given, raise_problems, rope_scaling, rotary, size
from .huggingface_refused import why_refused
from .huggingface_windows import qwen_windows
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
        if (reason := why_refused(config)) is not None:
            raise ModelError(f"{source}: model_type={family!r} is not read, because {reason}.")
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
    biases = bias_fields(attention=bool(config.get("attention_bias")), mlp=bool(config.get("mlp_bias")))
    return rotary(config, name, source, [], **biases)


def _qwen2(config: Config, name: str, source: str) -> ModelSpec:
    """`Qwen2Config` (Qwen2, Qwen2.5): Llama with a bias on query, key and value."""
    problems: list[str] = []
    return rotary(config, name, source, problems, qkv_bias=True, **qwen_windows(config, problems))


def _qwen3(config: Config, name: str, source: str) -> ModelSpec:
    """`Qwen3Config`: Llama whose query and key heads, 128 wide unless said, are normalised."""
    problems: list[str] = []
    fields = {
        **attention_bias(config),
        **qwen_windows(config, problems),
        "head_dim": int(given(config, "head_dim", 128)),
    }
    return rotary(config, name, source, problems, qk_norm=True, **fields)


def _falcon(config: Config, name: str, source: str) -> ModelSpec:
    """`FalconConfig` with parallel blocks of one norm (Falcon 7B, Falcon2 11B) or blocks in turn (Falcon RW):
    LayerNorm, rotary positions or ALiBi, one or several key heads, tied embeddings by default.

    Of ALiBi, `transformers` rounds the penalties to bf16, whatever the model's format; here they are not.
    """
    problems = []
    grouped, parallel = bool(config.get("new_decoder_architecture", False)), bool(given(config, "parallel_attn", True))
    if given(config, "num_ln_in_parallel_attn", 2 if grouped else 1) != 1 or (grouped and not parallel):
        problems.append("a norm for attention and one for the MLP are not understood; read are parallel blocks of one.")
    if given(config, "activation", "gelu") != "gelu":
        problems.append(f"activation={config['activation']!r} is not understood; read is 'gelu'.")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    positions = rope_scaling(rope, problems)
    positions["rope_theta"] = float(given(config, "rope_theta", given(rope, "rope_theta", 10000.0)))
    raise_problems(problems, source)
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    if config.get("alibi"):
        positions = {"position": "alibi", "alibi_multiplier": (hidden // max(1, heads)) ** -0.5}
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
        tied_embeddings=bool(given(config, "tie_word_embeddings", True)),
        bias=bool(given(config, "bias", False)),
        parallel_block=parallel,
        **positions,
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
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "falcon": _falcon,
    **huggingface_alibi.FAMILIES,
    **huggingface_dense.FAMILIES,
    **huggingface_windows.FAMILIES,
    **huggingface_experts.FAMILIES,
}
"""`model_type` -> reader."""
