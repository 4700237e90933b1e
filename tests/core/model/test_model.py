"""Models: published parameter counts to the last one, validation, and Hugging Face configs."""

import json
from dataclasses import replace

import pytest

from shardproof.core.base.errors import ModelError, PlanError, UnknownNameError
from shardproof.core.model.attention_kinds import layer_window, shorter_window
from shardproof.core.model.huggingface import FAMILIES, model_from_config, read_config
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.model_presets import MODEL_PRESETS, model_preset
from shardproof.core.model.parameters import count_active_parameters, count_parameters

# Counts of the published checkpoints (sum of tensor sizes of the Hugging Face weights, tied tables once).
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
}

# What the papers print, rounded as they print it: name, billions in all, billions a token uses.
PRINTED = [
    ("mixtral-8x7b", 47, 13),  # Jiang et al. 2024, abstract
    ("mixtral-8x22b", 141, 39),  # mistral.ai/news/mixtral-8x22b
    ("deepseek-v2", 236, 21),  # arXiv 2405.04434, abstract
    ("qwen3-235b-a22b", 235, 22),  # Qwen3 technical report, table 2
    ("megatron-22b", 22, 22),  # Korthikanti et al. 2022, table 3, and the two below
    ("mt-nlg-530b", 530, 530),
    ("megatron-1t", 1008, 1008),  # 1T there, 1008.0 in Narayanan et al. 2021, table 1
    ("nemotron4-15b", 16, 16),  # arXiv 2402.16819: 15 B, of them 12.5 B besides both embeddings
    ("nemotron4-340b", 341, 341),  # arXiv 2406.11704, table 1: 331.6 B besides 9.4 B of embeddings
]


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameter_counts_equal_the_published_ones(name, count):
    assert count_parameters(model_preset(name)) == count


@pytest.mark.parametrize(("name", "total", "active"), PRINTED, ids=[name for name, *_ in PRINTED])
def test_total_and_active_parameters_round_to_the_printed_ones(name, total, active):
    model = model_preset(name)
    assert round(count_parameters(model) / 1e9) == total
    assert round(count_active_parameters(model) / 1e9) == active


def test_deepseek_v3_has_671_billion_parameters_of_which_a_token_uses_37_besides_its_prediction_module():
    """The checkpoint's count without its 58 * 256 routing biases, which gradients do not touch,
    and without the module."""
    with_module = model_preset("deepseek-v3")
    model = replace(with_module, num_mtp_layers=0)
    assert count_parameters(model) == 671_026_419_200 - 58 * 256
    assert 37.0e9 < count_active_parameters(model) < 37.6e9
    layer = (
        7168 * 1536 + 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 + 512 * 128 * 256 + 128 * 128 * 7168 + 2 * 7168
    )
    experts = 257 * 3 * 7168 * 2048 + 256 * 7168
    assert count_parameters(with_module) - count_parameters(model) == layer + experts + 2 * 7168**2 + 3 * 7168


def test_grok_1_has_314_billion_parameters_within_a_hundredth():
    assert count_parameters(model_preset("grok-1")) == pytest.approx(314e9, rel=0.01)


@pytest.mark.parametrize(
    ("size", "billions"), [("125m", 0.125), ("350m", 0.356), ("760m", 0.760), ("1.3b", 1.3), ("2.7b", 2.65)]
)
def test_the_gpt3_family_has_the_sizes_of_its_table(size, billions):
    assert count_parameters(model_preset(f"gpt3-{size}")) == pytest.approx(billions * 1e9, rel=0.015)


def test_gpt3_175b_has_174_6_billion_parameters_by_its_formula():
    layers, hidden, vocab, positions = 96, 12288, 50257, 2048
    formula = layers * (12 * hidden**2 + 13 * hidden) + (vocab + positions) * hidden + 2 * hidden
    assert count_parameters(model_preset("gpt3-175b")) == formula == 174_604_259_328


def test_preset_names_are_the_names_of_their_models():
    assert all(model.name == name for name, model in MODEL_PRESETS.items())
    assert len({model.num_heads for model in MODEL_PRESETS.values() if model.num_heads % 3 == 0}) >= 2


def test_an_unknown_preset_offers_the_closest_one():
    with pytest.raises(UnknownNameError, match="did you mean 'llama3-70b'"):
        model_preset("lama3-70b")


MIXTURE = {"num_experts": 8, "experts_per_token": 2}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"num_experts": -1}, "num_experts=-1 must be a whole number of at least 0"),
        ({"experts_per_token": 2}, "experts_per_token=2 describe experts, but num_experts=0"),
        ({"num_experts": 8}, "experts_per_token=0 must be 1 to num_experts=8"),
        ({**MIXTURE, "experts_per_token": 9}, "experts_per_token=9 must be 1 to num_experts=8"),
        ({**MIXTURE, "expert_ffn_hidden_size": 0}, "expert_ffn_hidden_size=0 must be a whole number of at least 1"),
        ({**MIXTURE, "first_dense_layers": 2}, "leaves none of num_layers=2 to the experts. Use at most 1"),
        ({"router_scores": "sigmoid"}, "router_scores=sigmoid describe experts, but num_experts=0"),
        ({**MIXTURE, "router_scaling": 0.0}, "router_scaling=0.0 must be above 0"),
        ({**MIXTURE, "expert_capacity_factor": 0.0}, "expert_capacity_factor=0.0 must be above 0"),
        (
            {**MIXTURE, "router_groups_per_token": 1},
            ("num_router_groups=0. Set that, or leave router_groups_per_token out"),
        ),
        (
            {**MIXTURE, "num_router_groups": 3},
            ("num_router_groups=3 does not divide num_experts=8. Use one of [1, 2, 4, 8]"),
        ),
        ({**MIXTURE, "experts_per_token": 3, "num_router_groups": 4, "router_groups_per_token": 1}, "Use 2 to 4"),
        (
            {**MIXTURE, "num_router_groups": 8, "router_groups_per_token": 4, "router_group_scores": "top_two"},
            "num_router_groups=8 leaves 1",
        ),
        ({"v_head_dim": 8}, "v_head_dim=8 describe latent attention, but kv_lora_rank=0"),
        ({"kv_lora_rank": 16}, "needs qk_nope_head_dim, qk_rope_head_dim, v_head_dim too"),
        ({**LATENT, "qk_nope_head_dim": 6}, "head_dim=8 is not qk_nope_head_dim + qk_rope_head_dim = 10"),
        ({**LATENT, "qk_nope_head_dim": 5, "qk_rope_head_dim": 3}, "qk_rope_head_dim=3 is odd"),
        ({**LATENT, "num_kv_heads": 4}, "num_kv_heads=4 differs from num_heads=8"),
        ({**LATENT, "position": "learned"}, "does not go with latent attention"),
    ],
)
def test_experts_and_latent_attention_are_checked(fields, expected):
    shape = {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_heads": 8,
        "num_kv_heads": 8,
        "head_dim": 8,
    }
    with pytest.raises(ModelError) as caught:
        ModelSpec(**{"name": "bad", "vocab_size": 256, "max_positions": 128, **shape, **fields})
    (problem,) = caught.value.problems
    assert expected in problem


def test_the_layers_of_deepseek_v3_are_3_dense_and_58_with_experts_and_its_prediction_layer_has_experts():
    model = model_preset("deepseek-v3")
    assert [model.layer_is_moe(layer) for layer in (0, 2, 3, 60, 61)] == [False, False, True, True, True]
    assert (model.num_moe_layers, model.expert_width, model.shared_expert_width, model.value_head_dim) == (
        58,
        2048,
        2048,
        128,
    )
    dense = model_preset("llama3-8b")
    assert (dense.num_moe_layers, dense.shared_expert_width, dense.value_head_dim, dense.layer_is_moe(31)) == (
        0,
        0,
        128,
        False,
    )
    assert model_preset("mixtral-8x7b").expert_width == 14336


def test_every_problem_of_a_model_is_reported_together():
    with pytest.raises(ModelError) as caught:
        ModelSpec("bad", 0, 64, 128, 6, 4, 7, 256, 128, activation="swigul", norm_eps=0.0)  # type: ignore[arg-type]
    message = str(caught.value)
    assert len(caught.value.problems) == 5
    for expected in (
        "num_layers=0",
        "'swiglu'",
        "norm_eps=0.0",
        ("num_kv_heads=4 does not divide num_heads=6"),
        "head_dim=7 is odd",
    ):
        assert expected in message


LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
# huggingface.co/mistralai/Mixtral-8x7B-v0.1, Qwen/Qwen2.5-7B, Qwen/Qwen3-30B-A3B,
# deepseek-ai/DeepSeek-V3, DeepSeek-V2-Lite
MIXTRAL = {
    **{key: value for key, value in LLAMA.items() if key != "rope_theta"},
    "model_type": "mixtral",
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "attention_bias": False,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "attention_bias": False,
    "hidden_act": "silu",
}
DEEPSEEK_LITE = {
    **DEEPSEEK,
    "model_type": "deepseek_v2",
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_nextn_predict_layers": None,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": None,
    "vocab_size": 102400,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "n_ctx": 1024,
}


def test_the_config_of_llama3_8b_reads_as_the_preset():
    assert model_from_config(LLAMA, name="llama3-8b") == model_preset("llama3-8b")


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (MIXTRAL, "mixtral-8x7b"),
        (QWEN2, "qwen2.5-7b"),
        (QWEN3_MOE, "qwen3-30b-a3b"),
        (DEEPSEEK, "deepseek-v3"),
        (DEEPSEEK_LITE, "deepseek-v2-lite"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_published_config_with_experts_or_biases_reads_as_its_preset(config, name):
    assert model_from_config(config, name=name) == model_preset(name)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**QWEN3_MOE, "mlp_only_layers": [0, 5]}, "decoder_sparse_step and mlp_only_layers put experts into layers"),
        ({**DEEPSEEK, "attention_bias": True}, "attention_bias=true"),
        ({**DEEPSEEK, "scoring_func": "softmax"}, "scoring_func='softmax' is not understood in deepseek_v3"),
        (
            {**DEEPSEEK_LITE, "topk_method": "noaux_tc"},
            ("topk_method='noaux_tc' is not understood; read are greedy, group_limited_greedy"),
        ),
        ({**DEEPSEEK_LITE, "norm_topk_prob": True}, "norm_topk_prob=true is not understood in deepseek_v2"),
        ({**DEEPSEEK, "num_experts_per_tok": 300}, "experts_per_token=300 must be 1 to num_experts=256"),
        (
            {key: value for key, value in MIXTRAL.items() if key != "num_local_experts"},
            ("'num_local_experts' is missing"),
        ),
    ],
)
def test_a_mixture_variant_that_is_not_modelled_is_refused(config, expected):
    with pytest.raises(ModelError, match=expected):
        model_from_config(config, name="variant")


def test_dense_layers_before_the_experts_are_read_from_both_ways_of_writing_them():
    assert model_from_config({**QWEN3_MOE, "mlp_only_layers": [0, 1]}, name="x").first_dense_layers == 2
    assert model_from_config({**DEEPSEEK, "first_k_dense_replace": 0}, name="x").first_dense_layers == 0


def test_a_deepseek_v2_config_that_limits_groups_reads_as_such_a_router_and_a_bare_qwen3_router_is_not_normalised():
    config = {
        **DEEPSEEK_LITE,
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
        "routed_scaling_factor": 16.0,
    }
    model = model_from_config(config, name="x")
    assert (model.num_router_groups, model.router_groups_per_token, model.router_group_scores) == (8, 3, "max")
    assert (model.router_scores, model.normalized_router_weights, model.router_scaling, model.expert_bias) == (
        "softmax",
        False,
        16.0,
        False,
    )
    bare = {key: value for key, value in QWEN3_MOE.items() if key != "norm_topk_prob"}
    assert not model_from_config(bare, name="x").normalized_router_weights


FALCON = {
    "model_type": "falcon",
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "multi_query": True,
    "parallel_attn": True,
    "new_decoder_architecture": False,
    "bias": False,
    "alibi": False,
    "layer_norm_epsilon": 1e-5,
    "vocab_size": 65024,
}
"""huggingface.co/tiiuae/falcon-7b, config.json."""


def test_the_config_of_falcon_7b_reads_as_a_parallel_block_with_its_published_count():
    model = model_from_config(FALCON, name="falcon-7b")
    assert (model.parallel_block, model.num_kv_heads, model.head_dim, model.norm) == (True, 1, 64, "layernorm")
    # the file's tensors: 7,217,189,760, of which the output head is the token table again
    assert count_parameters(model) == 7_217_189_760 - 65024 * 4544


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"new_decoder_architecture": True, "num_kv_heads": 8}, "a norm for attention and one for the MLP"),
        (
            {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1, "parallel_attn": False},
            "a norm for attention and one for the MLP",
        ),
        ({"activation": "relu"}, "activation='relu' is not understood"),
        ({"multi_query": "yes"}, "multi_query='yes' must be true or false"),
    ],
)
def test_a_falcon_that_is_not_modelled_is_refused(change, expected):
    with pytest.raises(ModelError, match=expected):
        model_from_config({**FALCON, **change}, name="falcon")


def test_the_config_of_gpt2_reads_as_the_preset():
    assert model_from_config(GPT2, name="gpt2") == model_preset("gpt2")


def test_rope_theta_is_found_where_newer_configs_put_it():
    config = {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    del config["rope_theta"]
    assert model_from_config(config, name="llama3-8b") == model_preset("llama3-8b")


def test_a_file_or_its_folder_can_be_named(tmp_path):
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(folder) == read_config(folder / "config.json")
    assert read_config(folder).name == "my-llama"


def test_mistral_is_a_llama_with_a_window():
    config = {**LLAMA, "model_type": "mistral", "sliding_window": None}
    assert model_from_config(config, name="llama3-8b") == model_preset("llama3-8b")
    assert model_from_config({**config, "sliding_window": 8192}, name="llama3-8b") == model_preset("llama3-8b")
    windowed = model_from_config({**config, "sliding_window": 4096}, name="windowed")
    window = layer_window(windowed, 0)
    assert (window, shorter_window(window, 4096), shorter_window(window, 4097)) == (4096, 0, 4096)


@pytest.mark.parametrize(
    ("more", "window"),
    [
        ({"use_sliding_window": False, "sliding_window": 64}, 0),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, 64),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 999}, 0),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 64,
                "layer_types": ["sliding_attention"] * QWEN2["num_hidden_layers"],
            },
            64,
        ),
    ],
)
def test_qwen_turns_its_window_on_for_all_layers_or_none(more, window):
    assert model_from_config({**QWEN2, **more}, name="x").sliding_window == window


PHI = {**LLAMA, "model_type": "phi3", "max_position_embeddings": 8192}
SMOL = {**LLAMA, "model_type": "smollm3"}
WINDOW = {"sliding_window": 512}


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (
            {**QWEN2, **WINDOW, "use_sliding_window": True, "max_window_layers": 26, "num_hidden_layers": 28},
            {"window_layers": (*[0] * 26, 1, 1)},
        ),
        (
            {**LLAMA, **WINDOW, "model_type": "mistral", "layer_types": ["full_attention", "sliding_attention"] * 16},
            {"sliding_window": 512, "window_layers": (0, 1)},
        ),
        ({**LLAMA, "model_type": "ministral"}, {"sliding_window": 4096, "window_layers": ()}),
        ({**PHI, **WINDOW, "partial_rotary_factor": 0.75}, {"rope_dim": 96, "sliding_window": 512}),
        ({**PHI, "rope_parameters": {"rope_theta": 9.0, "partial_rotary_factor": 0.5}}, {"rope_dim": 64}),
        (PHI, {"rope_dim": 0, "sliding_window": 0}),
        (SMOL, {"rope_layers": (1, 1, 1, 0), "tied_embeddings": False, "sliding_window": 0}),
        (
            {**SMOL, **WINDOW, "use_sliding_window": True, "no_rope_layers": [1, 0] * 16},
            {"rope_layers": (1, 0), "window_layers": (0, 1), "sliding_window": 512},
        ),
    ],
)
def test_layers_that_differ_are_read_as_the_shortest_pattern(config, fields):
    model = model_from_config(config, name="x")
    assert {name: getattr(model, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**PHI, "rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "rope_type='longrope'"),
        ({**PHI, "partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        ({**LLAMA, "rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({**LLAMA, **WINDOW, "model_type": "mistral", "layer_types": ["full_attention"] * 3}, "3 entries"),
        ({**LLAMA, **WINDOW, "model_type": "mistral", "layer_types": ["chunked"] * 32}, "'chunked'"),
        ({**SMOL, "no_rope_layers": [1]}, "no_rope_layers has 1 entries"),
        ({**SMOL, "no_rope_layers": [2] * 32}, "must be a list of 1 and 0"),
        (
            {
                **LLAMA,
                "model_type": "ministral3",
                "rope_parameters": {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1},
            },
            "llama_4_scaling_beta=0.1",
        ),
        ({"model_type": "mistral3", "text_config": {}}, "vision_config"),
        ({"model_type": "gemma3", "text_config": {}}, "vision_config"),
    ],
)
def test_what_a_plan_does_not_have_is_refused_by_the_key_that_asks_for_it(config, expected):
    with pytest.raises(ModelError, match=expected):
        model_from_config(config, name="x")


def test_an_unread_family_names_those_that_are_read():
    with pytest.raises(ModelError) as caught:
        model_from_config({"model_type": "gpt_neox"}, name="pythia", source="here/config.json")
    assert "here/config.json" in str(caught.value) and all(family in str(caught.value) for family in FAMILIES)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"vocab_size": "many"}, "vocab_size='many' must be a whole number"),
        ({"num_key_value_heads": 5}, "num_kv_heads=5 does not divide num_heads=32"),
    ],
)
def test_a_llama_variant_that_is_not_modelled_is_refused(changes, expected):
    with pytest.raises(ModelError, match=expected):
        model_from_config({**LLAMA, **changes}, name="variant")


def test_a_missing_field_is_named():
    with pytest.raises(ModelError, match="'intermediate_size' is missing"):
        model_from_config({key: value for key, value in LLAMA.items() if key != "intermediate_size"}, name="short")


@pytest.mark.parametrize(("text", "expected"), [("{", "not JSON"), ("[]", "one object")])
def test_a_file_that_is_no_config_says_so(tmp_path, text, expected):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(PlanError, match=expected):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-llama"])
def test_transformers_counts_the_same_parameters(name):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = model_preset(name)
    if model.position == "learned":
        config = transformers.GPT2Config(
            n_embd=model.hidden_size,
            n_layer=model.num_layers,
            n_head=model.num_heads,
            n_positions=model.max_positions,
            vocab_size=model.vocab_size,
            bos_token_id=0,
            eos_token_id=0,
        )
        kind = transformers.GPT2LMHeadModel
    else:
        config = transformers.LlamaConfig(
            hidden_size=model.hidden_size,
            intermediate_size=model.ffn_hidden_size,
            num_hidden_layers=model.num_layers,
            num_attention_heads=model.num_heads,
            num_key_value_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            vocab_size=model.vocab_size,
            max_position_embeddings=model.max_positions,
            rms_norm_eps=model.norm_eps,
            tie_word_embeddings=model.tied_embeddings,
            bos_token_id=0,
            eos_token_id=0,
        )
        kind = transformers.LlamaForCausalLM
    with torch.device("meta"):
        oracle = kind(config)
    assert sum(parameter.numel() for parameter in oracle.parameters()) == count_parameters(model)
    assert model_from_config(config.to_dict(), name=name) == model


FAMILY_CLASSES = [
    ("Falcon", {}),
    ("Falcon", {"multi_query": False, "bias": True}),
    ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1}),
    ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("Qwen2", {}),
    ("Qwen3", {"head_dim": 24}),
    (
        "Qwen3Moe",
        {
            "head_dim": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "mlp_only_layers": [0],
        },
    ),
    ("DeepseekV2", {"q_lora_rank": None, "n_shared_experts": 2}),
    ("DeepseekV3", {"q_lora_rank": 48, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_mtp_layers": 0}),
]
LATENT_CONFIG = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
}


@pytest.mark.parametrize(("family", "fields"), FAMILY_CLASSES, ids=[family for family, _ in FAMILY_CLASSES])
def test_transformers_counts_the_same_parameters_in_every_family(family, fields):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    common = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 128,
        "max_position_embeddings": 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    latent = LATENT_CONFIG if family.startswith("Deepseek") else {}
    config = getattr(transformers, f"{family}Config")(**{**common, **latent, **fields})
    with torch.device("meta"):
        oracle = getattr(transformers, f"{family}ForCausalLM")(config)
    model = model_from_config(config.to_dict(), name="small")
    assert sum(parameter.numel() for parameter in oracle.parameters()) == count_parameters(model)


def test_presets_show_experts_and_latent_attention(capsys):
    from shardproof.core.commands.cli import main

    assert main(["presets"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert rows["mixtral-8x7b"].endswith("2 of 8 experts, 12.9 B active")
    assert "latent heads 128" in rows["deepseek-v3"] and rows["llama3-8b"].endswith("heads 32/8")
    assert main(["presets", "deepseek-v2-lite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_active_parameters"] == count_active_parameters(
        model_preset("deepseek-v2-lite")
    )
