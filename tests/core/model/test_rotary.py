"""Frequencies of rotary positions against transformers' own functions, by way of the config files that both read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardproof.core.base.errors import ModelError
from shardproof.core.model.huggingface import model_from_config
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.model_presets import model_preset
from shardproof.core.model.rotary import attention_scale, rotary_frequencies, rotary_growth

BASE = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
}
LATENT = {
    **BASE,
    "model_type": "deepseek_v2",
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "topk_method": "greedy",
}
YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
SCALINGS = {
    "none": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": YARN,
    "yarn-mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn-attention-factor": {**YARN, "attention_factor": 1.5},
    "yarn-between-pairs": {**YARN, "truncate": False},
}


@pytest.mark.parametrize("sequence", [512, 8192])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_growth_are_those_of_transformers(name, sequence):
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    config = {**BASE, "rope_parameters": {"rope_theta": BASE["rope_theta"], **SCALINGS[name]}}
    model = model_from_config(config, name="scaled")
    theirs = LlamaConfig(**config)
    kind = theirs.rope_parameters["rope_type"]
    if kind == "default":
        expected, growth = [500000.0 ** (-2 * i / 64) for i in range(32)], 1.0
    else:
        frequencies, growth = rope_utils.ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", seq_len=sequence)
        expected = frequencies.tolist()
    assert rotary_frequencies(model, sequence) == pytest.approx(expected, rel=2e-6)
    assert rotary_growth(model) == pytest.approx(growth, rel=1e-12)


def test_the_kinds_differ_from_each_other():
    models = [model_from_config({**BASE, "rope_parameters": scaling}, name="scaled") for scaling in SCALINGS.values()]
    found = {(rotary_frequencies(model, 8192), rotary_growth(model)) for model in models}
    assert len(found) == len(SCALINGS)


@pytest.mark.parametrize("name", ["none", "yarn", "yarn-mscale"])
def test_latent_attention_scales_scores_as_transformers_does(name):
    deepseek = pytest.importorskip("transformers.models.deepseek_v2.modeling_deepseek_v2")
    from transformers import DeepseekV2Config

    config = {**LATENT, "rope_parameters": {"rope_theta": BASE["rope_theta"], **SCALINGS[name]}}
    theirs = deepseek.DeepseekV2Attention(DeepseekV2Config(**config), layer_idx=0)
    assert attention_scale(model_from_config(config, name="latent")) == pytest.approx(theirs.scaling, rel=1e-12)


def test_files_before_transformers_5_are_read_too():
    new = model_from_config(
        {**BASE, "rope_parameters": {"rope_theta": BASE["rope_theta"], **SCALINGS["llama3"]}}, name="m"
    )
    kind = {("type" if key == "rope_type" else key): value for key, value in SCALINGS["llama3"].items()}
    assert model_from_config({**BASE, "rope_scaling": kind}, name="m") == new
    assert (new.rope_scaling, new.rope_factor, new.original_positions) == ("llama3", 8.0, 1024)


@pytest.mark.parametrize(
    ("rope", "sentence"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "rope_type='longrope' is not understood; read are default, linear"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not understood"),
    ],
)
def test_what_is_not_read_is_said(rope, sentence):
    with pytest.raises(ModelError, match=sentence):
        model_from_config({**BASE, "rope_parameters": rope}, name="m")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"rope_factor": 2.0}, 'rope_factor=2.0 scale rotary positions, but rope_scaling="none" does not use them'),
        ({"rope_scaling": "linear", "rope_beta_fast": 8.0}, "Use rope_scaling among yarn"),
        ({"rope_scaling": "yarn", "rope_beta_slow": 64.0}, "rope_beta_slow=64.0 must be below rope_beta_fast=32.0"),
        (
            {"rope_scaling": "llama3", "rope_low_freq_factor": 4.0},
            ("rope_low_freq_factor=4.0 must be at least 0 and below"),
        ),
        ({"rope_scaling": "linear", "rope_factor": 0.0}, "rope_factor=0.0 must be above 0"),
        ({"rope_scaling": "yarm"}, "did you mean 'yarn'"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(fields, sentence):
    with pytest.raises(ModelError, match=sentence):
        replace(model_preset("tiny-llama"), **fields)


def test_learned_positions_do_not_stretch():
    with pytest.raises(ModelError, match="stretches rotary positions"):
        replace(model_preset("tiny-gpt"), rope_scaling="linear", rope_factor=2.0)


def test_a_tie_of_the_ramp_does_not_divide_by_zero():
    model = ModelSpec("m", 1, 8, 8, 1, 1, 4, 8, 4, rope_scaling="yarn", rope_factor=2.0)
    assert all(frequency > 0 for frequency in rotary_frequencies(model, 4))
