"""Models: published parameter counts to the last one, validation, and Hugging Face configs."""

import json

import pytest

from shardproof.core.errors import ModelError, UnknownNameError
from shardproof.core.huggingface import FAMILIES, model_from_config, read_config
from shardproof.core.model import ModelSpec
from shardproof.core.model_presets import MODEL_PRESETS, model_preset

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
    "llama3.1-405b": 405_853_388_800,
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameter_counts_equal_the_published_ones(name, count):
    assert model_preset(name).num_parameters == count


def test_gpt3_175b_has_174_6_billion_parameters_by_its_formula():
    layers, hidden, vocab, positions = 96, 12288, 50257, 2048
    formula = layers * (12 * hidden**2 + 13 * hidden) + (vocab + positions) * hidden + 2 * hidden
    assert model_preset("gpt3-175b").num_parameters == formula == 174_604_259_328


def test_preset_names_are_the_names_of_their_models():
    assert all(model.name == name for name, model in MODEL_PRESETS.items())
    assert len({model.num_heads for model in MODEL_PRESETS.values() if model.num_heads % 3 == 0}) >= 2


def test_an_unknown_preset_offers_the_closest_one():
    with pytest.raises(UnknownNameError, match="did you mean 'llama3-70b'"):
        model_preset("lama3-70b")


def test_every_problem_of_a_model_is_reported_together():
    with pytest.raises(ModelError) as caught:
        ModelSpec("bad", 0, 64, 128, 6, 4, 7, 256, 128, activation="swigul", norm_eps=0.0)  # type: ignore[arg-type]
    message = str(caught.value)
    assert len(caught.value.problems) == 5
    for expected in ("num_layers=0", "'swiglu'", "norm_eps=0.0", "num_kv_heads=4 does not divide num_heads=6", "head_dim=7 is odd"):
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
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257, "n_ctx": 1024}


def test_the_config_of_llama3_8b_reads_as_the_preset():
    assert model_from_config(LLAMA, name="llama3-8b") == model_preset("llama3-8b")


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


def test_mistral_is_a_llama_unless_its_window_is_short():
    config = {**LLAMA, "model_type": "mistral", "sliding_window": None}
    assert model_from_config(config, name="llama3-8b") == model_preset("llama3-8b")
    with pytest.raises(ModelError, match="sliding_window=4096 is shorter than max_position_embeddings=8192"):
        model_from_config({**config, "sliding_window": 4096}, name="windowed")


def test_an_unread_family_names_those_that_are_read():
    with pytest.raises(ModelError) as caught:
        model_from_config({"model_type": "mixtral"}, name="moe", source="here/config.json")
    assert "here/config.json" in str(caught.value) and all(family in str(caught.value) for family in FAMILIES)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"attention_bias": True}, "attention_bias and mlp_bias differ"),
        ({"vocab_size": "many"}, "wrong type"),
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
    with pytest.raises(ModelError, match=expected):
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
    assert sum(parameter.numel() for parameter in oracle.parameters()) == model.num_parameters
    assert model_from_config(config.to_dict(), name=name) == model
