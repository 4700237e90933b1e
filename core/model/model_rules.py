"""The rules of a decoder: which of its fields go together, each broken one in a sentence."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import fields

from ..base.divisors import divisors
from ..base.option import FieldProblem
from .model_fields import (
    EXPERT_FIELDS,
    GATE_FIELDS,
    LATENT_FIELDS,
    ROUTER_FIELDS,
    SCALING_FIELDS,
    SCALING_NUMBERS,
    SHARED_FIELDS,
    ModelFields,
)

_GROUPED_ONLY = (
    *("rope_layers", "rope_dim", "rope_local_theta"),
    *("attention_sinks", "attention_scale", "qk_norm", "whole_qk_norm", "qkv_bias"),
)
"""Fields of attention that latent attention does not have."""


def model_problems(model: ModelFields, wrong: Collection[str]) -> Iterator[FieldProblem]:
    """What is wrong with a model besides single values: the field, and the sentence about it. The values of the fields
    in `wrong` can be anything."""
    if not {"num_heads", "num_kv_heads"} & {*wrong} and model.num_heads % model.num_kv_heads:
        yield (
            "num_kv_heads",
            f"num_kv_heads={model.num_kv_heads} does not divide num_heads={model.num_heads}, so query heads cannot "
            f"share them evenly. Use num_kv_heads among {divisors(model.num_heads)}.",
        )
    if model.position == "rope" and "head_dim" not in wrong and model.head_dim % 2:
        sentence = f"head_dim={model.head_dim} is odd, but rotary positions need pairs. Use {model.head_dim + 1}."
        yield "head_dim", sentence
    if not wrong:
        yield from _block(model)
        yield from _experts(model)
        yield from _router(model)
        yield from _latent(model)
        yield from _rotary(model)
        yield from _attention(model)
    if not {"vocab_size", "padding_rows"} & {*wrong} and model.padding_rows >= model.vocab_size:
        most = model.vocab_size - 1
        yield (
            "padding_rows",
            f"padding_rows={model.padding_rows} leaves no id of vocab_size={model.vocab_size}. Use {most} at most.",
        )


def _block(model: ModelFields) -> Iterator[FieldProblem]:
    """What is wrong with the norms and gates of a layer."""
    if not model.pre_norms and not model.post_norms:
        sentence = "pre_norms=False leaves layers without norms. Set post_norms, or leave pre_norms out."
        yield "pre_norms", sentence
    if model.parallel_block and (model.post_norms or not model.pre_norms):
        name = "post_norms" if model.post_norms else "pre_norms"
        yield name, f"{_written(model, [name])} does not go with parallel_block, whose layers have one norm."
    if model.embedding_norm and model.position == "learned":
        sentence = 'embedding_norm is not for position="learned", whose table is added to embeddings as they are.'
        yield "embedding_norm", f'{sentence} Use "rope" or "alibi", or leave it out.'
    if model.embedding_norm and model.num_mtp_layers:
        sentence = f"embedding_norm does not go with num_mtp_layers={model.num_mtp_layers}, which norms embeddings too."
        yield "embedding_norm", f"{sentence} Leave one of them out."
    if not model.norm_bias and model.norm != "layernorm":
        sentence = f'norm_bias=False is of a LayerNorm, but norm="{model.norm}" has no bias. Leave it out.'
        yield "norm_bias", sentence
    if not model.gated and (names := _given(model, GATE_FIELDS)):
        sentence = f'{_written(model, names)} describe a gate, but activation="{model.activation}" has none.'
        yield names[0], f"{sentence} Use a gated one, or leave them out."


def _experts(model: ModelFields) -> Iterator[FieldProblem]:
    """What is wrong with the experts of layers."""
    if not model.is_moe:
        if names := _given(model, (*EXPERT_FIELDS, *ROUTER_FIELDS)):
            given = _written(model, names)
            yield names[0], f"{given} describe experts, but num_experts=0. Set num_experts, or leave them out."
        return
    if not 1 <= model.experts_per_token <= model.num_experts:
        sentence = f"experts_per_token={model.experts_per_token} must be 1 to num_experts={model.num_experts}."
        yield "experts_per_token", sentence
    if model.first_dense_layers >= model.num_layers:
        yield (
            "first_dense_layers",
            f"first_dense_layers={model.first_dense_layers} leaves none of num_layers={model.num_layers} to the "
            "experts. "
            f"Use at most {model.num_layers - 1}, or num_experts=0.",
        )
    if not model.num_shared_experts and (names := _given(model, SHARED_FIELDS)):
        sentence = f"{_written(model, names)} describe shared experts, but num_shared_experts=0."
        yield names[0], f"{sentence} Set that, or leave them out."


def _router(model: ModelFields) -> Iterator[FieldProblem]:
    """What is wrong with the choice of experts, where there are any."""
    if not model.is_moe:
        return
    groups, chosen = model.num_router_groups, model.router_groups_per_token
    if not groups:
        given = {"router_groups_per_token": (chosen, 0), "router_group_scores": (model.router_group_scores, "max")}
        for name, (value, default) in given.items():
            if value != default:
                yield (
                    name,
                    f"{name}={value} chooses among groups of experts, but num_router_groups=0. Set that, or "
                    f"leave {name} out.",
                )
        return
    if model.num_experts % groups:
        yield (
            "num_router_groups",
            f"num_router_groups={groups} does not divide num_experts={model.num_experts}. Use one of "
            f"{divisors(model.num_experts)}.",
        )
        return
    size = model.num_experts // groups
    fewest = -(-model.experts_per_token // size)
    if not fewest <= chosen <= groups:
        yield (
            "router_groups_per_token",
            f"router_groups_per_token={chosen} groups of {size} experts must hold "
            f"experts_per_token={model.experts_per_token} "
            f"and be at most num_router_groups={groups}. Use {fewest} to {groups}.",
        )
    if model.router_group_scores == "top_two" and size < 2:
        yield (
            "router_group_scores",
            f'router_group_scores="top_two" needs two experts in a group, but num_router_groups={groups} '
            f'leaves {size}. Use "max".',
        )


def _latent(model: ModelFields) -> Iterator[FieldProblem]:
    """What is wrong with latent attention."""
    if not model.is_mla:
        if names := [name for name in LATENT_FIELDS if getattr(model, name)]:
            yield (
                names[0],
                f"{_written(model, names)} describe latent attention, but kv_lora_rank=0. Set kv_lora_rank, or leave "
                "them out.",
            )
        return
    if missing := [name for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim") if not getattr(model, name)]:
        needed = f"which needs {', '.join(missing)} too"
        yield "kv_lora_rank", f"kv_lora_rank={model.kv_lora_rank} means latent attention, {needed}."
        return
    if model.qk_rope_head_dim % 2:
        yield (
            "qk_rope_head_dim",
            f"qk_rope_head_dim={model.qk_rope_head_dim} is odd, but rotary positions need pairs. Use "
            f"{model.qk_rope_head_dim + 1}.",
        )
    if model.head_dim != (width := model.qk_nope_head_dim + model.qk_rope_head_dim):
        yield (
            "head_dim",
            f"head_dim={model.head_dim} is not qk_nope_head_dim + qk_rope_head_dim = {width}, the width of a "
            f"query head. Use {width}.",
        )
    if model.num_kv_heads != model.num_heads:
        yield (
            "num_kv_heads",
            f"num_kv_heads={model.num_kv_heads} differs from num_heads={model.num_heads}, but latent attention "
            "gives every query head "
            f"a key and a value head. Use {model.num_heads}.",
        )
    if model.position != "rope":
        yield (
            "position",
            f'position="{model.position}" does not go with latent attention, which carries rotary positions. '
            'Use "rope".',
        )


def _rotary(model: ModelFields) -> Iterator[FieldProblem]:
    """What is wrong with the scaling of rotary positions, one sentence each."""
    used = SCALING_FIELDS.get(model.rope_scaling, ())
    unused = (name for name in SCALING_NUMBERS if name not in used)
    if given := [name for name in unused if getattr(model, name) != getattr(type(model), name)]:
        kinds = [kind for kind, names in SCALING_FIELDS.items() if set(given) <= set(names)]
        yield (
            given[0],
            f'{_written(model, given)} scale rotary positions, but rope_scaling="{model.rope_scaling}" does not use '
            "them. "
            f"Use rope_scaling among {', '.join(kinds) or 'the kinds that do'}, or leave them out.",
        )
    if not used:
        return
    if model.position != "rope":
        yield (
            "rope_scaling",
            f'rope_scaling="{model.rope_scaling}" stretches rotary positions, but position="{model.position}". Use '
            '"rope", or no scaling.',
        )
    if not 0 <= model.rope_low_freq_factor < model.rope_high_freq_factor:
        yield (
            "rope_low_freq_factor",
            f"rope_low_freq_factor={model.rope_low_freq_factor!r} must be at least 0 and below "
            f"rope_high_freq_factor={model.rope_high_freq_factor!r}.",
        )
    if not model.rope_beta_slow < model.rope_beta_fast:
        sentence = f"rope_beta_slow={model.rope_beta_slow!r} must be below rope_beta_fast={model.rope_beta_fast!r}."
        yield "rope_beta_slow", sentence


def _attention(model: ModelFields) -> Iterator[FieldProblem]:
    """What is wrong with the fields that alter attention, where each is right by itmodel."""
    for name, instead in (("window_layers", "sliding_window=0"), ("rope_layers", "another position")):
        if (pattern := getattr(model, name)) and 1 not in pattern:
            yield name, f"{name}={list(pattern)} leaves no layer with what it is for. Use {instead} instead."
    for name in ("window_layers", "rope_local_theta"):
        if getattr(model, name) and not model.sliding_window:
            yield name, f"{name} is for layers with a window, but sliding_window=0. Set that, or leave {name} out."
    if model.whole_qk_norm and model.qk_norm:
        yield "whole_qk_norm", "whole_qk_norm norms all heads together, qk_norm each by itself. Leave one of them out."
    if model.whole_qk_norm and model.norm != "rmsnorm":
        yield "whole_qk_norm", f'whole_qk_norm is an RMSNorm, but norm="{model.norm}". Use "rmsnorm", or leave it out.'
    if model.position != "rope":
        for name in ("rope_layers", "rope_dim", "rope_local_theta"):
            if getattr(model, name):
                yield (
                    name,
                    f'{name} is for rotary positions, but position="{model.position}". Use "rope", or leave it out.',
                )
    if model.position != "alibi" and model.alibi_multiplier != 1:
        sentence = f'alibi_multiplier is for ALiBi, but position="{model.position}". Use "alibi", or leave it out.'
        yield "alibi_multiplier", sentence
    if model.is_mla:
        for name in _GROUPED_ONLY:
            if getattr(model, name):
                yield name, f"{name} is not for latent attention (kv_lora_rank={model.kv_lora_rank}). Leave it out."
    if model.rope_dim and (model.rope_dim % 2 or model.rope_dim > model.head_dim):
        most = model.head_dim - model.head_dim % 2
        yield (
            "rope_dim",
            f"rope_dim={model.rope_dim} must be even and at most head_dim={model.head_dim}: its pairs turn. "
            f"Use {most}, or 0 for all.",
        )


def _given(model: ModelFields, names: Iterable[str]) -> list[str]:
    """Those of some fields that are not at their defaults."""
    defaults = {field.name: field.default for field in fields(model)}
    return [name for name in names if getattr(model, name) != defaults[name]]


def _written(model: ModelFields, names: Iterable[str]) -> str:
    """Fields as sentences name them: `experts_per_token=2, num_router_groups=4`."""
    return ", ".join(f"{name}={getattr(model, name)}" for name in names)
