"""What the families of `core.model.huggingface` call our parameters in their files, and how they arrange the rows.

Sources: the published files' own headers, and `transformers` 5.23 (`models/*/modeling_*.py`, `conversion_mapping.py`).
Arrangements that differ from ours: GPT-2 keeps linear weights as [in, out], and gpt-oss those of experts; DeepSeek,
GLM-4 and Cohere keep the pairs that rotary positions turn side by side (2i, 2i + 1), where ours are half a head apart
(i, i + d/2), and families of whose heads a part turns keep that part's halves together before the rest; queries and
keys are permuted in the same way, so their products stay the same; and some keep gates and up-projections, or all
experts, in one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...core.model.model import ModelSpec
from ...core.model.parameters import TOKEN_TABLE, Parameter, expert_biases, parameters
from .parts import EXPERT, Part, Source, item_dim, item_rows
from .stored import TABLES

BASE_PREFIXES = ("model.", "transformer.")
"""What files of a whole model put before the names of the decoder without its head, and files of the
decoder alone leave out."""


def sources(model: ModelSpec, family: str) -> dict[str, Source]:
    """Where every parameter of the model, and every bias of experts, lies in the files of a
    family, by canonical name."""
    return {
        parameter.name: _source(model, family, parameter) for parameter in (*parameters(model), *expert_biases(model))
    }


def _source(model: ModelSpec, family: str, parameter: Parameter) -> Source:
    whole, _, kind = parameter.name.rpartition(".")
    theirs, place = _place(model, family, whole)
    stacked = parameter.expert and family in STACKED
    kind = "e_score_correction_bias" if kind == "expert_bias" and family not in TABLES else kind
    ending = f".{kind}"
    if stacked and family == "gpt_oss":
        ending = "" if kind == "weight" else f"_{kind}"
    own = _of_expert if parameter.expert and not stacked else str
    names = tuple(f"{theirs}{own(name)}{ending}" for name in _names(model, family)[place])
    rows = item_rows(parameter)
    num_items = parameter.shape[item_dim(parameter) + parameter.expert] // rows - (
        model.padding_rows if place in _TABLES else 0
    )
    is_matrix = len(parameter.shape) == 2 + parameter.expert
    transposed = is_matrix and ((family == "gpt2" and place.startswith("layer.")) or (family == "gpt_oss" and stacked))
    parts = _parts(model, family, place, names, rows, num_items)
    return Source(parameter, parts, num_items, transposed, stacked)


def _of_expert(name: str) -> str:
    """The module of one expert: `mlp.experts.{expert}.up_proj` of `mlp.experts.up_proj`."""
    before, word, after = name.rpartition("experts.")
    return f"{before}{word}{EXPERT}.{after}"


STACKED = ("granitemoe", "gpt_oss", "megatron", "megatron-gated", "torchtitan-llama", "torchtitan-qwen")
"""Families whose files keep all experts in one tensor."""

SIDE_BY_SIDE = ("glm4", "cohere2", "torchtitan-llama")
"""Families whose queries and keys have pairs of neighbouring features."""

_LAYERS = {
    **dict.fromkeys(("gpt2", "falcon", "bloom"), "transformer.h"),
    "mpt": "transformer.blocks",
    "megatron": "decoder.layers",
    "torchtitan": "layers",
}
"""Where files have their layers."""

_TABLES = (TOKEN_TABLE.removesuffix(".weight"), "head.output")
"""Modules whose rows are ids of the vocabulary."""


def _place(model: ModelSpec, family: str, name: str) -> tuple[str, str]:
    """`(prefix in the files, module in a layer)` of a canonical module: `("model.layers.3.", "layer.mlp.up")`.
    Multi-token prediction is, in the files, part of the layer it has."""
    top, _, rest = name.partition(".")
    layers = _LAYERS.get(family.partition("-")[0], "model.layers")
    if top == "layers":
        number, _, module = rest.partition(".")
        return f"{layers}.{number}.", f"layer.{module}"
    if top == "mtp":
        depth, _, module = rest.partition(".")
        return f"{layers}.{model.num_layers + int(depth)}.", f"mtp.{module}"
    return "", name


def _names(model: ModelSpec, family: str) -> Mapping[str, tuple[str, ...]]:
    """Module -> the modules of the files that its rows are taken from."""
    if family in _OWN:
        return _OWN[family]
    queries = {"layer.attention.qkv": tuple(f"self_attn.{part}_proj" for part in "qkv")}
    return {**_ROTARY, **queries, **_CHANGED.get(family, {})}


_GPT2: Mapping[str, tuple[str, ...]] = {
    "embedding.tokens": ("transformer.wte",),
    "embedding.positions": ("transformer.wpe",),
    "layer.attention.norm": ("ln_1",),
    "layer.attention.qkv": ("attn.c_attn",) * 3,
    "layer.attention.output": ("attn.c_proj",),
    "layer.mlp.norm": ("ln_2",),
    "layer.mlp.up": ("mlp.c_fc",),
    "layer.mlp.down": ("mlp.c_proj",),
    "head.norm": ("transformer.ln_f",),
    "head.output": ("lm_head",),
}

_FALCON: Mapping[str, tuple[str, ...]] = {
    "embedding.tokens": ("transformer.word_embeddings",),
    "layer.attention.norm": ("input_layernorm",),
    "layer.attention.qkv": ("self_attention.query_key_value",),
    "layer.attention.output": ("self_attention.dense",),
    "layer.mlp.norm": ("post_attention_layernorm",),
    "layer.mlp.up": ("mlp.dense_h_to_4h",),
    "layer.mlp.down": ("mlp.dense_4h_to_h",),
    "head.norm": ("transformer.ln_f",),
    "head.output": ("lm_head",),
}

_BLOOM: Mapping[str, tuple[str, ...]] = {**_FALCON, "embedding.norm": ("transformer.word_embeddings_layernorm",)}

_MPT: Mapping[str, tuple[str, ...]] = {
    "embedding.tokens": ("transformer.wte",),
    "layer.attention.norm": ("norm_1",),
    "layer.attention.qkv": ("attn.Wqkv",) * 3,
    "layer.attention.output": ("attn.out_proj",),
    "layer.mlp.norm": ("norm_2",),
    "layer.mlp.up": ("ffn.up_proj",),
    "layer.mlp.down": ("ffn.down_proj",),
    "head.norm": ("transformer.norm_f",),
    "head.output": ("lm_head",),
}

_OWN = {"gpt2": _GPT2, "falcon": _FALCON, "bloom": _BLOOM, "mpt": _MPT, **TABLES}

_ROTARY: Mapping[str, tuple[str, ...]] = {
    "embedding.tokens": ("model.embed_tokens",),
    "layer.attention.norm": ("input_layernorm",),
    "layer.attention.query_norm": ("self_attn.q_norm",),
    "layer.attention.key_norm": ("self_attn.k_norm",),
    "layer.attention.all_queries_norm": ("self_attn.q_norm",),
    "layer.attention.all_keys_norm": ("self_attn.k_norm",),
    "layer.attention.core": ("self_attn",),
    "layer.attention.output": ("self_attn.o_proj",),
    "layer.attention.q": ("self_attn.q_proj",),
    "layer.attention.q_down": ("self_attn.q_a_proj",),
    "layer.attention.q_norm": ("self_attn.q_a_layernorm",),
    "layer.attention.q_up": ("self_attn.q_b_proj",),
    "layer.attention.kv_down": ("self_attn.kv_a_proj_with_mqa",),
    "layer.attention.kv_norm": ("self_attn.kv_a_layernorm",),
    "layer.attention.kv_up": ("self_attn.kv_b_proj",),
    "layer.mlp.norm": ("post_attention_layernorm",),
    "layer.mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
    "layer.mlp.down": ("mlp.down_proj",),
    "layer.mlp.router": ("mlp.gate",),
    "layer.mlp.experts.up": ("mlp.experts.gate_proj", "mlp.experts.up_proj"),
    "layer.mlp.experts.down": ("mlp.experts.down_proj",),
    "layer.mlp.shared.up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "layer.mlp.shared.down": ("mlp.shared_experts.down_proj",),
    "mtp.embedding_norm": ("enorm",),
    "mtp.hidden_norm": ("hnorm",),
    "mtp.projection": ("eh_proj",),
    "mtp.norm": ("shared_head.norm",),
    "head.norm": ("model.norm",),
    "head.output": ("lm_head",),
}

_MIXTRAL: Mapping[str, tuple[str, ...]] = {
    "layer.mlp.router": ("block_sparse_moe.gate",),
    "layer.mlp.experts.up": ("block_sparse_moe.experts.w1", "block_sparse_moe.experts.w3"),
    "layer.mlp.experts.down": ("block_sparse_moe.experts.w2",),
}

_PHI3: Mapping[str, tuple[str, ...]] = {
    "layer.attention.qkv": ("self_attn.qkv_proj",) * 3,
    "layer.mlp.up": ("mlp.gate_up_proj",) * 2,
}

_QWEN2_MOE: Mapping[str, tuple[str, ...]] = {
    "layer.mlp.shared.up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "layer.mlp.shared.down": ("mlp.shared_expert.down_proj",),
    "layer.mlp.shared.gate": ("mlp.shared_expert_gate",),
}

_GRANITEMOE: Mapping[str, tuple[str, ...]] = {
    "layer.mlp.router": ("block_sparse_moe.router.layer",),
    "layer.mlp.experts.up": ("block_sparse_moe.input_linear",) * 2,
    "layer.mlp.experts.down": ("block_sparse_moe.output_linear",),
}

_GPT_OSS: Mapping[str, tuple[str, ...]] = {
    "layer.mlp.router": ("mlp.router",),
    "layer.mlp.experts.up": ("mlp.experts.gate_up_proj",),  # gates and up-projections by turns, as ours
    "layer.mlp.experts.down": ("mlp.experts.down_proj",),
}

_GLM4: Mapping[str, tuple[str, ...]] = {
    "layer.attention.post_norm": ("post_self_attn_layernorm",),
    "layer.mlp.up": ("mlp.gate_up_proj",) * 2,
    "layer.mlp.post_norm": ("post_mlp_layernorm",),
}

_OLMO2: Mapping[str, tuple[str, ...]] = {
    "layer.attention.post_norm": ("post_attention_layernorm",),
    "layer.mlp.post_norm": ("post_feedforward_layernorm",),
}

_GEMMA: Mapping[str, tuple[str, ...]] = {
    "layer.attention.post_norm": ("post_attention_layernorm",),
    "layer.mlp.norm": ("pre_feedforward_layernorm",),
    "layer.mlp.post_norm": ("post_feedforward_layernorm",),
}

_CHANGED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "mixtral": _MIXTRAL,
    "phi3": _PHI3,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "qwen2_moe": _QWEN2_MOE,
    "granitemoe": _GRANITEMOE,
    "gpt_oss": _GPT_OSS,
    "glm4": _GLM4,
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
}
"""Family -> what it calls otherwise than most with rotary positions."""


def _parts(
    model: ModelSpec, family: str, place: str, names: tuple[str, ...], size: int, num_items: int
) -> tuple[Part, ...]:
    """The parts of an item of `size` rows, of `num_items`."""
    d, rope, turned = model.head_dim, model.qk_rope_head_dim, _turned_rows(model, family)
    match place, names:
        case "layer.attention.qkv", (q, k, v):
            queries, one = model.query_heads_per_group * d, q == k  # tensor: all queries, all keys, all values
            keys, values = (model.num_heads * d, (model.num_heads + model.num_kv_heads) * d) if one else (0, 0)
            heads = [
                range(first + rows.start, first + rows.stop, rows.step)
                for first in range(0, queries, d)
                for rows in turned
            ]
            return (
                *(Part(q, queries, rows) for rows in (heads if len(turned) > 1 else [range(queries)])),
                *(Part(k, d, rows, keys) for rows in turned),
                Part(v, d, range(d), values),
            )
        case "layer.attention.query_norm" | "layer.attention.key_norm", (name,):
            return tuple(Part(name, d, rows) for rows in turned)
        case "layer.attention.q" | "layer.attention.q_up" | "layer.attention.kv_down", (name,):
            rows = range(size - rope), range(size - rope, size, 2), range(size - rope + 1, size, 2)
            return tuple(Part(name, size, part) for part in rows)
        case _, (name,):
            return (Part(name, size, range(size)),)
        case _, (gate, up) if gate == up:  # one tensor: all gates, all up-projections
            return tuple(Part(name, 1, range(1), num_items * number) for number, name in enumerate(names))
        case _:  # gate and up-projection
            return tuple(Part(name, 1, range(1)) for name in names)


def _turned_rows(model: ModelSpec, family: str) -> list[range]:
    """Rows of a head in files, in our order: the first of each pair that turns, the first half of what does not turn,
    then the second ones."""
    d, part = model.head_dim, model.rope_dim or model.head_dim
    if part == d and family not in SIDE_BY_SIDE:
        return [range(d)]
    middle = (part + d) // 2
    pairs = (range(0, part, 2), range(1, part, 2))
    halves = (range(part // 2), range(part // 2, part))
    first, second = pairs if family in SIDE_BY_SIDE else halves
    return [rows for rows in (first, range(part, middle), second, range(middle, d)) if rows]


def unused_names(model: ModelSpec, names: set[str]) -> list[str]:
    """Of tensors in files that no parameter is read from, those that would change what the model computes.

    Left out are buffers of old files (frequencies, masks), the output head of a tied model, which is its token table,
    multi-token prediction that the model leaves out, and its copies of table and head.
    """
    return sorted(name for name in names if not _is_redundant(model, name))


def _is_redundant(model: ModelSpec, name: str) -> bool:
    bare = name.removeprefix("model.").removeprefix("transformer.")
    if bare.endswith(("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")):
        return True
    if bare == "lm_head.weight":
        return model.tied_embeddings
    layer = re.match(r"layers\.(\d+)\.", bare)
    depth = int(layer[1]) - model.num_layers if layer else -1
    return depth >= model.num_mtp_layers or (
        depth >= 0 and bare.endswith(("embed_tokens.weight", "shared_head.head.weight"))
    )
