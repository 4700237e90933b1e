"""What Hugging Face families have in common: sizes, rotary positions, windows, experts. A family's reader gives its own
fields besides."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..base.errors import ModelError, Problem
from .attention_kinds import pattern_of
from .expert_layers import pattern_of as expert_layers_of
from .model import ModelSpec
from .model_fields import SCALING_FIELDS

Config = Mapping[str, Any]

KINDS = {"full_attention": False, "sliding_attention": True}
"""What `layer_types` may hold -> whether such a layer has a window."""


def size(config: Config, key: str) -> int:
    """A whole number that every config of the family has. Raises `KeyError` where it is absent or null."""
    if (value := config.get(key)) is None:
        raise KeyError(key)
    return int(value)


def given(config: Config, key: str, default: Any) -> Any:
    """The value of a key; the default when it is absent or null, as Hugging Face configs mean it."""
    value = config.get(key)
    return default if value is None else value


def raise_problems(problems: list[str], source: str) -> None:
    """Raises `ModelError` for problems of a file, if there are any."""
    if problems:
        raise ModelError([Problem(problem, origin=source) for problem in problems])


def rotary(config: Config, name: str, source: str, problems: list[str], **more: Any) -> ModelSpec:
    """What all families with rotary positions, RMSNorm and SwiGLU have in common; `more` are a family's own fields, of
    those that turn a part of their heads `rope_dim` too.

    Raises `ModelError` for `problems` and for those of the common keys.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act={config['hidden_act']!r} is not understood; read is 'silu' (SwiGLU).")
    scaling = rope_scaling(rope, problems, partial="rope_dim" in more)
    raise_problems(problems, source)
    heads = size(config, "num_attention_heads")
    hidden = size(config, "hidden_size")
    fields = {
        "num_layers": size(config, "num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": size(config, "intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": int(given(config, "num_key_value_heads", heads)),
        "head_dim": head_width(config),
        "vocab_size": size(config, "vocab_size"),
        "max_positions": size(config, "max_position_embeddings"),
        "norm_eps": float(given(config, "rms_norm_eps", 1e-6)),
        "rope_theta": float(given(config, "rope_theta", given(rope, "rope_theta", 10000.0))),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        **scaling,
    }
    return ModelSpec(name=name, **{**fields, **more})


def rope_scaling(rope: Config, problems: list[str], *, partial: bool = False) -> dict[str, Any]:
    """The fields of `ModelSpec.rope_scaling` from `rope_parameters`, or from `rope_scaling` as files
    before transformers 5 have it. Heads of which only a part turns are those of `partial` families.

    Of `dynamic`, `transformers` takes `max_position_embeddings` for the original length, whatever else is written.
    """
    kind = given(rope, "rope_type", rope.get("type"))
    if kind in (None, "default"):
        kind = "none"
    if kind not in ("none", *SCALING_FIELDS):
        problems.append(f"rope_type={kind!r} is not understood; read are default, {', '.join(SCALING_FIELDS)}.")
        return {}
    if not partial and given(rope, "partial_rotary_factor", 1.0) != 1.0:
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
            found[field] = _SCALING_TYPES.get(field, float)(value)
    return found


_SCALING_TYPES = {"rope_original_positions": int, "rope_truncate": bool}
"""Those of fields that are no fractions."""


def window_fields(
    config: Config, slides: Sequence[bool], problems: list[str], *, usual: int | None = None
) -> dict[str, Any]:
    """`ModelSpec.sliding_window`, of `usual` tokens where the file has no such key, and `window_layers`; `slides` says
    which layers have a window where the file lists no `layer_types`. Nothing where no layer has one, or one that holds
    the longest sequence."""
    window, kinds = config.get("sliding_window", usual), config.get("layer_types")
    if window is None or window >= size(config, "max_position_embeddings"):
        return {}
    if kinds is not None:
        if unknown := sorted({*kinds} - {*KINDS}):
            problems.append(f"layer_types has {', '.join(map(repr, unknown))}; read are {', '.join(KINDS)}.")
            return {}
        if len(kinds) != len(slides):
            problems.append(f"layer_types has {len(kinds)} entries, and num_hidden_layers={len(slides)}.")
            return {}
        slides = [KINDS[kind] for kind in kinds]
    return {"sliding_window": int(window), "window_layers": pattern_of(slides)} if any(slides) else {}


def expert_fields(config: Config, *, width: Any = None, shared: Any = 0, dense: Any = 0) -> dict[str, Any]:
    """The fields of experts; families differ in what they call their number."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    number = next((config[name] for name in names if config.get(name) is not None), None)
    if number is None:
        raise KeyError(names[0])
    return {
        "num_experts": int(number),
        "experts_per_token": size(config, "num_experts_per_tok"),
        "expert_ffn_hidden_size": None if width is None else int(width),
        "num_shared_experts": int(shared),
        "first_dense_layers": int(dense),
    }


def expert_pattern(config: Config, layers: Collection[int], problems: list[str], keys: str) -> dict[str, int]:
    """The fields of which layers have experts; `keys` of the config say so."""
    num_layers = size(config, "num_hidden_layers")
    if (found := expert_layers_of(layers, num_layers)) is None:
        problems.append(f"{keys} put experts into layers that are not every n-th one up to the last; read are such.")
        return {}
    first, step = found
    return {"first_dense_layers": first, "expert_layer_step": step if first + step < num_layers else 1}


def bias_fields(*, attention: bool, mlp: bool) -> dict[str, bool]:
    """The fields of biases on all products of attention, and on all of the MLP."""
    if attention and mlp:
        return {"bias": True}
    return dict.fromkeys(("qkv_bias", "attention_output_bias") if attention else ("mlp_bias",) * mlp, True)


def attention_bias(config: Config) -> dict[str, bool]:
    """Those of a family whose MLPs have none."""
    return bias_fields(attention=bool(config.get("attention_bias")), mlp=False)


def refuse_biases(config: Config) -> list[str]:
    """The problem of a bias on some of the products of latent attention only."""
    return (
        ["attention_bias=true is not understood in this family; read are configs without."]
        if config.get("attention_bias")
        else []
    )


def filled(config: Config, **usual: Any) -> dict[str, Any]:
    """A config with what its family takes where a key is absent or null."""
    return {**config, **{key: given(config, key, value) for key, value in usual.items()}}


def turned_width(config: Config, problems: list[str], *, usual: float = 1.0) -> int:
    """`ModelSpec.rope_dim`: features of a head that turn, 0 for all; a share of `usual` unless the file has one."""
    rope, width = config.get("rope_parameters") or config.get("rope_scaling") or {}, head_width(config)
    share = float(given(rope, "partial_rotary_factor", given(config, "partial_rotary_factor", usual)))
    if not 0 < share <= 1:
        problems.append(f"partial_rotary_factor={share} must be above 0 and at most 1.")
    turned = int(width * share)
    return turned if turned < width else 0


def head_width(config: Config) -> int:
    """Width of a head, by default an even share of the hidden size."""
    even = size(config, "hidden_size") // max(1, size(config, "num_attention_heads"))
    return int(given(config, "head_dim", even))
