"""`config.json` files that are written read back as the same model."""

import json
from dataclasses import replace

import pytest

from shardproof.core.base.errors import ModelError
from shardproof.core.model.huggingface import model_from_config
from shardproof.core.model.huggingface_config import ARCHITECTURES, config_of
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.model_presets import MODEL_PRESETS, model_preset

OF_NO_FAMILY = ("nemotron4-15b", "nemotron4-340b", "grok-1", "tiny-moe")
LLAMA = ModelSpec("llama", 2, 48, 60, 6, 3, 8, 101, 64)


@pytest.mark.parametrize("name", [name for name in MODEL_PRESETS if name not in OF_NO_FAMILY])
def test_the_config_of_a_preset_reads_as_the_preset(name):
    config = config_of(model_preset(name), "bf16")
    assert model_from_config(json.loads(json.dumps(config)), name=name) == model_preset(name)
    assert (config["dtype"], config["architectures"]) == ("bfloat16", [ARCHITECTURES[config["model_type"]]])


@pytest.mark.parametrize("name", OF_NO_FAMILY)
def test_a_model_of_no_family_is_refused_with_what_the_closest_lacks(name):
    with pytest.raises(
        ModelError, match=rf"model {name} is of no family .*; the closest is (llama|mixtral), but for \w+="
    ):
        config_of(model_preset(name), "bf16")


@pytest.mark.parametrize(
    ("fields", "family"),
    [
        ({"bias": True}, "llama"),
        ({"qkv_bias": True, "tied_embeddings": True}, "qwen2"),
        ({"qk_norm": True}, "qwen3"),
        ({"num_experts": 4, "experts_per_token": 2}, "mixtral"),
        (
            {
                "qk_norm": True,
                "num_experts": 4,
                "experts_per_token": 2,
                "expert_ffn_hidden_size": 12,
                "first_dense_layers": 1,
            },
            "qwen3_moe",
        ),
        ({"rope_scaling": "linear", "rope_factor": 2.0}, "llama"),
        (
            {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_positions": 32, "rope_low_freq_factor": 2.0},
            "llama",
        ),
        ({"rope_scaling": "yarn", "rope_factor": 4.0, "rope_beta_fast": 16.0, "qk_norm": True}, "qwen3"),
        ({"head_dim": 16}, "llama"),
        ({"sliding_window": 16}, "mistral"),
        ({"sliding_window": 16, "qkv_bias": True}, "qwen2"),
        ({"sliding_window": 16, "qk_norm": True}, "qwen3"),
        ({"sliding_window": 16, "num_experts": 4, "experts_per_token": 2}, "mixtral"),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_every_field_of_a_family_survives_writing_and_reading(fields, family):
    model = replace(LLAMA, **fields)
    config = config_of(model, "fp32")
    assert config["model_type"] == family
    assert model_from_config(config, name="llama") == model


def test_an_original_length_that_no_reader_of_dynamic_scaling_minds_is_not_written_in_silence():
    model = replace(LLAMA, rope_scaling="dynamic", rope_factor=2.0, rope_original_positions=32)
    with pytest.raises(ModelError, match="the closest is llama, but for rope_original_positions=32"):
        config_of(model, "fp32")


def test_padding_and_what_only_training_chooses_are_not_written():
    trained = replace(LLAMA, vocab_size=104, padding_rows=3, hidden_dropout=0.1, attention_dropout=0.1)
    assert config_of(trained, "fp32") == config_of(LLAMA, "fp32")
