"""The keys of `[model]`."""

from __future__ import annotations

from typing import Any

from ...model.model import ACTIVATIONS, GROUP_SCORES, ROPE_SCALINGS, ROUTER_SCORES
from .key import Key


def model_keys() -> tuple[Key, ...]:
    """Of `[model]`."""
    count: dict[str, Any] = {"section": "model", "type": "int", "minimum": 1}
    number: dict[str, Any] = {"section": "model", "type": "int", "minimum": 0}
    share: dict[str, Any] = {
        "section": "model",
        "type": "float",
        "minimum": 0,
        "below": 1,
        "read_by": "backend.tensor_parallel.dropout",
    }
    here, parameters, operators, rotary, loss = (
        "core.plan.build",
        "core.model.parameters",
        "core.model.operators",
        "core.model.rotary",
        "backend.tensor_parallel.cross_entropy",
    )
    router: dict[str, Any] = {"section": "model", "read_by": "backend.model.router"}
    return (
        Key("model", "preset", "str", "name of a known model; other keys override its fields", here, attribute=None),
        Key("model", "config", "path", "path of a Hugging Face config.json", here, attribute=None),
        Key("model", "name", "str", "what reports call the model", "core.plan.plan", default_note="custom"),
        Key(name="num_layers", doc="transformer layers", read_by=parameters, **count),
        Key(name="hidden_size", doc="width of the residual stream", read_by=operators, **count),
        Key(name="ffn_hidden_size", doc="MLP width after the activation", read_by=operators, **count),
        Key(name="num_heads", doc="query heads", read_by="simulator.cost.flops", **count),
        Key(name="num_kv_heads", doc="key/value heads", read_by=operators, default_note="num_heads", **count),
        Key(
            name="head_dim",
            doc="width of one head",
            read_by=operators,
            default_note="hidden_size / num_heads",
            **count,
        ),
        Key(name="vocab_size", doc="rows of the token table", read_by=operators, **count),
        Key(
            name="max_positions",
            doc="rows of a learned position table",
            read_by=operators,
            default_note="batch.sequence",
            **count,
        ),
        Key("model", "activation", "str", "MLP activation", "backend.model.mlp", choices=ACTIVATIONS),
        Key(
            "model",
            "norm",
            "str",
            "normalisation before attention and MLP",
            parameters,
            choices=("layernorm", "rmsnorm"),
        ),
        Key("model", "norm_eps", "float", "added to the variance", "backend.tensor_parallel.norm", above=0),
        Key("model", "position", "str", "how positions enter", operators, choices=("learned", "rope")),
        Key("model", "rope_theta", "float", "base of the rotary frequencies", rotary, above=0),
        Key(
            "model",
            "rope_scaling",
            "str",
            ("how rotary positions are stretched for longer sequences"),
            rotary,
            choices=ROPE_SCALINGS,
        ),
        Key("model", "rope_factor", "float", "times longer than the original sequences", rotary, above=0),
        Key(
            name="rope_original_positions",
            doc="length of the original sequences; 0 is max_positions",
            **{**number, "read_by": "core.model.model"},
        ),
        Key(
            "model",
            "rope_low_freq_factor",
            "float",
            ("llama3: original sequences hold so many turns of a pair that slows down"),
            rotary,
        ),
        Key("model", "rope_high_freq_factor", "float", "llama3: and so many of one that does not", rotary, above=0),
        Key(
            "model",
            "rope_beta_fast",
            "float",
            ("yarn: turns in an original sequence from which pairs keep their speed"),
            rotary,
            above=0,
        ),
        Key(
            "model",
            "rope_beta_slow",
            "float",
            ("yarn: turns up to which they slow down by the factor"),
            rotary,
            above=0,
        ),
        Key("model", "rope_mscale", "float", "yarn: growth of turned queries and keys", rotary, minimum=0),
        Key("model", "rope_mscale_all_dim", "float", "yarn: growth of whole queries and keys", rotary, minimum=0),
        Key(
            "model",
            "rope_attention_factor",
            "float",
            "yarn: the growth itself",
            rotary,
            above=0,
            default_note="from the factor",
        ),
        Key("model", "tied_embeddings", "bool", "output table is the token table", "core.model.blocks"),
        Key("model", "bias", "bool", "bias on every linear layer but router and output head", operators),
        Key("model", "qkv_bias", "bool", "bias on query, key and value", operators),
        Key("model", "qk_norm", "bool", "norm of every query and key head", operators),
        Key("model", "parallel_block", "bool", "attention and MLP take the same normed input", operators),
        Key(name="num_experts", doc="experts of a MoE layer; 0 is a dense model", read_by=parameters, **number),
        Key(name="experts_per_token", doc="experts that each token takes", read_by="core.program.experts", **number),
        Key(
            name="num_shared_experts",
            doc=("experts that every token takes, besides its own"),
            read_by="core.model.model",
            **number,
        ),
        Key(
            name="expert_ffn_hidden_size",
            doc="width of one expert",
            read_by="core.model.model",
            default_note="ffn_hidden_size",
            **count,
        ),
        Key(
            name="first_dense_layers", doc="layers before the first with experts", read_by="core.model.model", **number
        ),
        Key(name="router_scores", type="str", doc="what a router makes of its logits", choices=ROUTER_SCORES, **router),
        Key(
            name="normalized_router_weights",
            type="bool",
            doc=("a token's chosen scores are divided by their sum"),
            **router,
        ),
        Key(name="router_scaling", type="float", doc="times that the experts' results are weighed", above=0, **router),
        Key(
            name="num_router_groups",
            type="int",
            doc=("groups of experts that a router chooses first; 0 is none"),
            minimum=0,
            **router,
        ),
        Key(
            name="router_groups_per_token",
            type="int",
            doc=("groups whose experts a token may take"),
            minimum=0,
            **router,
        ),
        Key(
            name="router_group_scores",
            type="str",
            doc=("score of a group: best, or sum of two best"),
            choices=GROUP_SCORES,
            **router,
        ),
        Key(name="expert_bias", type="bool", doc="a bias per expert, in the choice only, balances them", **router),
        Key(
            name="expert_capacity_factor",
            type="float",
            doc="most of a sequence's choices that an expert takes, over its even share; the others are dropped",
            above=0,
            default_note="no limit",
            **router,
        ),
        Key(
            name="q_lora_rank",
            doc=("latent attention: rank of the queries; 0 is full rank"),
            read_by=operators,
            **number,
        ),
        Key(
            name="kv_lora_rank",
            doc=("latent attention: rank of keys and values; 0 is ordinary attention"),
            read_by=operators,
            **number,
        ),
        Key(
            name="qk_nope_head_dim",
            doc=("latent attention: width of a head without positions"),
            read_by=operators,
            **number,
        ),
        Key(
            name="qk_rope_head_dim",
            doc=("latent attention: width of a head with rotary positions"),
            read_by=operators,
            **number,
        ),
        Key(name="v_head_dim", doc="latent attention: width of a value head", read_by="core.model.model", **number),
        Key(
            name="sliding_window",
            doc=("tokens that a token attends to, itself the last; 0 is all"),
            read_by="core.model.model",
            **number,
        ),
        Key(
            name="padding_rows",
            doc=("last rows of the token table that are no ids and get no probability"),
            read_by=loss,
            **number,
        ),
        Key(
            name="num_mtp_layers",
            doc=("multi-token-prediction modules after the last layer"),
            read_by="core.model.blocks",
            **number,
        ),
        Key(name="hidden_dropout", doc="share of hidden-state elements dropped in training", **share),
        Key(
            name="attention_dropout",
            doc="share of attention probabilities dropped in training",
            **{**share, "read_by": "backend.model.attention_core"},
        ),
    )
