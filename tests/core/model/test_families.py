"""Families of Hugging Face files that have norms, factors, biases or experts elsewhere, and the fields that these are
here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardproof.core.base.errors import ModelError
from shardproof.core.model.huggingface import model_from_config
from shardproof.core.model.huggingface_refused import REASONS
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.operators import layer_operators
from shardproof.core.model.parameters import count_parameters, layer_parameters

SIZES = {
    "hidden_size": 48,
    "intermediate_size": 60,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 101,
    "max_position_embeddings": 64,
}
LLAMA = ModelSpec("llama", 6, 48, 60, 6, 3, 8, 101, 64)
EXPERTS = {"num_experts": 4, "experts_per_token": 2}
LATENT_FIELDS = {
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "head_dim": 8,
    "num_kv_heads": 6,
}
QWEN_MOE = {
    **SIZES,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12,
}
OF_DEEPSEEK = {
    **SIZES,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "n_group": 1,
}

MPT = {"d_model": 48, "n_layers": 2, "n_heads": 6}


def read(family: str, **more) -> ModelSpec:
    return model_from_config({**SIZES, **more, "model_type": family}, name=family)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"first_dense_layers": 1, "expert_layer_step": 2}, [1, 3, 5]),
        ({"expert_layer_step": 4}, [0, 4]),
        ({"first_dense_layers": 5, "expert_layer_step": 3}, [5]),
    ],
)
def test_every_nth_layer_has_experts_and_those_of_multi_token_prediction_are_as_the_last(fields, layers):
    model = replace(LLAMA, **EXPERTS, **fields, num_mtp_layers=1)
    assert [layer for layer in range(6) if model.layer_is_moe(layer)] == layers
    assert (model.num_moe_layers, model.layer_is_moe(6)) == (len(layers), 5 in layers)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"pre_norms": False}, "pre_norms=False leaves layers without norms"),
        ({"parallel_block": True, "post_norms": True}, "post_norms=True does not go with parallel_block"),
        ({"norm_bias": False}, 'norm_bias=False is of a LayerNorm, but norm="rmsnorm"'),
        ({"activation": "gelu", "gate_limit": 7.0}, 'gate_limit=7.0 describe a gate, but activation="gelu" has none'),
        ({"expert_layer_step": 2}, "expert_layer_step=2 describe experts, but num_experts=0"),
        ({"whole_qk_norm": True, "qk_norm": True}, "whole_qk_norm norms all heads together, qk_norm each by itself"),
        (
            {**LATENT_FIELDS, "qkv_bias": True},
            r"qkv_bias is not for latent attention \(kv_lora_rank=8\)",
        ),
        ({**LATENT_FIELDS, "qk_norm": True}, r"qk_norm is not for latent attention \(kv_lora_rank=8\)"),
        ({"alibi_multiplier": 0.5}, 'alibi_multiplier is for ALiBi, but position="rope"'),
        ({"position": "alibi", "rope_dim": 4}, 'rope_dim is for rotary positions, but position="alibi"'),
        ({**LATENT_FIELDS, "position": "alibi"}, 'position="alibi" does not go with latent attention'),
        ({"embedding_norm": True, "position": "learned"}, 'embedding_norm is not for position="learned"'),
        ({"embedding_norm": True, "num_mtp_layers": 1}, "embedding_norm does not go with num_mtp_layers=1"),
        ({"whole_qk_norm": True, "norm": "layernorm"}, 'whole_qk_norm is an RMSNorm, but norm="layernorm"'),
        ({"router_bias": True}, "router_bias=True describe experts, but num_experts=0"),
        ({**EXPERTS, "shared_expert_gate": True}, "describe shared experts, but num_shared_experts=0"),
    ],
)
def test_fields_that_describe_nothing_are_refused(fields, expected):
    with pytest.raises(ModelError, match=expected):
        replace(LLAMA, **fields)


def test_a_layer_has_the_norms_and_biases_that_its_model_says():
    names = [operator.role.value for operator in layer_operators(replace(LLAMA, pre_norms=False, post_norms=True), 0)]
    assert [name for name in names if "norm" in name] == ["attention.post_norm", "mlp.post_norm"]
    model = replace(
        LLAMA, attention_output_bias=True, mlp_bias=True, norm="layernorm", norm_bias=False, norm_offset=1.0
    )
    found = {each.name.removeprefix("layers.0."): each for each in layer_parameters(model, 0)}
    biases = {"attention.output.bias", "mlp.up.bias", "mlp.down.bias"}
    assert {name for name in found if name.endswith("bias")} == biases
    assert found["attention.norm.weight"].constant == 0.0  # which multiplies by 1


@pytest.mark.parametrize(
    ("more", "first", "step"),
    [
        ({"decoder_sparse_step": 2}, 1, 2),
        ({"mlp_only_layers": [0, 1]}, 2, 1),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1]}, 3, 2),
        ({"decoder_sparse_step": 6}, 5, 1),
    ],
)
def test_which_layers_of_qwen_have_experts_is_read_from_both_its_keys(more, first, step):
    model = read("qwen2_moe", **QWEN_MOE, **more)
    assert (model.first_dense_layers, model.expert_layer_step) == (first, step)
    assert (model.qkv_bias, model.shared_expert_gate, model.shared_expert_ffn_hidden_size) == (True, True, None)


@pytest.mark.parametrize(
    ("family", "config", "count"),
    [
        (
            "olmo2",
            {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
            | {"num_key_value_heads": 32, "vocab_size": 100352},
            7_298_617_344,  # allenai/OLMo-2-1124-7B
        ),
        (
            "olmoe",
            {"hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16}
            | {"num_key_value_heads": 16, "vocab_size": 50304, "num_experts": 64, "num_experts_per_tok": 8},
            6_919_161_856,  # allenai/OLMoE-1B-7B-0924
        ),
        (
            "gemma",
            {"hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18, "num_attention_heads": 8}
            | {"num_key_value_heads": 1, "head_dim": 256, "vocab_size": 256000, "hidden_act": "gelu"},
            2_506_172_416,  # google/gemma-2b
        ),
        (
            "gpt_oss",
            {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64}
            | {"num_key_value_heads": 8, "vocab_size": 201088, "num_local_experts": 32, "num_experts_per_tok": 4},
            20_914_757_184,  # openai/gpt-oss-20b
        ),
        (
            "bloom",
            {"n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "vocab_size": 250880},
            176_247_271_424,  # bigscience/bloom
        ),
        (
            "mpt",
            {"d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 50432, "attn_config": {"alibi": True}},
            6_649_286_656,  # mosaicml/mpt-7b
        ),
        (
            "falcon",
            {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "vocab_size": 50304, "bias": True}
            | {"multi_query": False, "parallel_attn": False, "alibi": True},
            1_311_625_216,  # tiiuae/falcon-rw-1b
        ),
    ],
)
def test_the_configs_of_published_models_have_their_counts(family, config, count):
    assert count_parameters(read(family, **config)) == count


def test_gpt_oss_without_rotary_parameters_has_those_of_its_class():
    keys = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model = read("gpt_oss", **keys)
    scaling = {"factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096, "rope_type": "yarn"}
    assert model == read("gpt_oss", **keys, rope_scaling=scaling, rope_theta=150000)
    assert (model.rope_scaling, model.rope_truncate, model.norm_eps) == ("yarn", False, 1e-5)


def test_olmo3_scales_positions_of_layers_without_a_window_alone():
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
    old = read("olmo3", rope_theta=500000, rope_scaling=scaling, sliding_window=9)
    both = {"full_attention": {**scaling, "rope_theta": 5e5}, "sliding_attention": {"rope_theta": 5e5}}
    assert old == read("olmo3", rope_parameters=both, sliding_window=9)
    assert (old.window_layers, old.rope_local_theta, old.rope_theta) == ((1, 1, 1, 0), 5e5, 5e5)
    assert read("olmo3", rope_theta=500000, sliding_window=9).rope_local_theta is None


def test_the_config_of_qwen15_moe_has_the_published_count():
    published = {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "vocab_size": 151936,
    }
    assert count_parameters(read("qwen2_moe", **published)) == 14_315_784_192  # the files' tensors (Qwen1.5-MoE-A2.7B)


def test_kimi_k2_is_a_deepseek_v3_of_another_name_and_moe_layer_freq_counts_from_layer_0():
    kimi, deepseek = (read(family, **OF_DEEPSEEK, moe_layer_freq=1) for family in ("kimi_k2", "deepseek_v3"))
    assert replace(kimi, name="deepseek_v3") == deepseek
    every_second = read("deepseek_v3", **OF_DEEPSEEK, moe_layer_freq=2, first_k_dense_replace=1)
    assert (every_second.first_dense_layers, every_second.expert_layer_step) == (2, 2)


def test_biases_of_attention_alone_and_of_the_mlp_alone_are_read():
    attention, mlp = read("llama", attention_bias=True), read("granite", attention_multiplier=8**-0.5, mlp_bias=True)
    assert (attention.bias, attention.qkv_bias, attention.attention_output_bias, attention.mlp_bias) == (
        *(False, True, True, False),
    )
    assert (mlp.bias, mlp.qkv_bias, mlp.mlp_bias) == (False, False, True)


@pytest.mark.parametrize(
    ("family", "more", "expected"),
    [
        ("granite", {"attention_multiplier": 0}, "attention_multiplier=0 must be above 0"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 must be above 0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true is not understood"),
        ("granite", {"attention_multiplier": 8**-0.5, "logits_scaling": 0}, "logits_scaling=0 must be above 0"),
        ("glm4", {"partial_rotary_factor": 2}, "partial_rotary_factor=2.0 must be above 0 and at most 1"),
        ("gemma", {"hidden_act": "silu"}, "hidden_act='silu' is not understood; read is 'gelu_pytorch_tanh'"),
        ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 8.0}, "clip_qkv=8.0 is not understood"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm=true"),
        ("mpt", {**MPT, "attn_config": {"alibi": False}}, "attn_config.alibi=False is not understood; read is True"),
        ("mpt", {**MPT, "attn_config": {"alibi_bias_max": 16}}, "attn_config.alibi_bias_max=16 is not understood"),
        ("mpt", {**MPT, "attn_config": {"qk_ln": "yes"}}, "attn_config.qk_ln='yes' must be true or false"),
        ("mpt", {**MPT, "no_bias": False, "logit_scale": 0.5}, "logit_scale=0.5 is not understood"),
        ("llama4_text", {}, "attn_temperature_tuning=true"),
        ("llama4", {"text_config": {**SIZES, "attention_chunk_size": 32}}, "attention_chunk_size=32"),
        ("deepseek_v32", {"index_topk": 2048}, "index_topk describes attention to tokens that an index chooses"),
        ("qwen3_next", {"layer_types": ["linear_attention"]}, "layer_types describes layers of linear attention"),
    ],
)
def test_what_no_layer_expresses_is_refused_with_its_key(family, more, expected):
    with pytest.raises(ModelError, match=expected):
        read(family, **more)


def test_every_family_that_is_known_and_not_read_names_its_key():
    for family, (keys, meaning) in REASONS.items():
        with pytest.raises(ModelError, match=f"{keys[0]} describes {meaning}"):
            model_from_config({"model_type": family}, name=family)
