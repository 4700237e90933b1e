"""Weights of Megatron-LM's and torchtitan's own checkpoints, as `torch.distributed.checkpoint` writes them.

The arrangements are written out here once more, from megatron-core 0.16.1 and torchtitan 0.3.0.
"""

from __future__ import annotations

import io
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from shardproof.backend.gradients.parameter import initial_shard
from shardproof.backend.huggingface.load import load_weights
from shardproof.backend.huggingface.stored import StoredFolder
from shardproof.core.base.errors import PlanError
from shardproof.core.layout.leaves import leaf_sizes
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.parameters import Parameter, expert_biases, parameters

LLAMA = ModelSpec("llama", 3, 48, 100, 12, 6, 8, 101, 64)
QWEN3 = ModelSpec("qwen3", 2, 48, 60, 6, 3, 8, 101, 64, qk_norm=True)
GPT = ModelSpec("gpt", 2, 48, 96, 6, 6, 8, 101, 64, activation="gelu", norm="layernorm", position="learned", bias=True)
MIXTRAL = ModelSpec("mixtral", 3, 48, 60, 6, 3, 8, 101, 64, num_experts=4, experts_per_token=2)
QWEN3_MOE = replace(MIXTRAL, name="qwen3-moe", qk_norm=True, expert_ffn_hidden_size=36, first_dense_layers=1)
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
ROUTED = {"expert_bias": True, "router_scores": "sigmoid", "num_shared_experts": 2}
DEEPSEEK = replace(QWEN3_MOE, name="deepseek", qk_norm=False, num_kv_heads=6, head_dim=12, **LATENT, **ROUTED)
SINK = replace(LLAMA, name="sink", attention_sinks=True)


def all_parameters(model: ModelSpec) -> list[Parameter]:
    return [*parameters(model), *expert_biases(model)]


def values_of(model: ModelSpec) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(5)
    return {each.name: torch.rand(each.shape, generator=draw) for each in all_parameters(model)}


def pairs(rows: Tensor, heads: int) -> Tensor:
    """Heads whose two halves turn, as heads whose neighbours do."""
    return rows.view(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def side_by_side(rows: Tensor, heads: int, model: ModelSpec) -> Tensor:
    """Heads whose last features turn: the halves of these as pairs of neighbours."""
    each = rows.unflatten(0, (heads, -1))
    straight, turned = each.split([each.shape[1] - model.qk_rope_head_dim, model.qk_rope_head_dim], 1)
    return torch.cat([straight, turned.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)], 1).flatten(0, 1)


def as_files(model: ModelSpec, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same values with latent queries and keys as both trainers have them."""
    heads = {"attention.q_up.weight": model.num_heads, "attention.kv_down.weight": 1}
    return {
        name: side_by_side(tensor, heads[key], model) if (key := name.split(".", 2)[-1]) in heads else tensor
        for name, tensor in values.items()
    }


TORCHTITAN = {
    "attention.norm.weight": "attention_norm.weight",
    "attention.output.weight": "attention.wo.weight",
    "attention.q_down.weight": "attention.wq_a.weight",
    "attention.q_norm.weight": "attention.q_norm.weight",
    "attention.q_up.weight": "attention.wq_b.weight",
    "attention.kv_down.weight": "attention.wkv_a.weight",
    "attention.kv_norm.weight": "attention.kv_norm.weight",
    "attention.kv_up.weight": "attention.wkv_b.weight",
    "mlp.norm.weight": "ffn_norm.weight",
    "mlp.down.weight": "feed_forward.w2.weight",
    "mlp.router.weight": "moe.router.gate.weight",
    "mlp.router.expert_bias": "moe.expert_bias_E",
    "mlp.experts.down.weight": "moe.routed_experts.inner_experts.w2_EDF",
    "mlp.shared.down.weight": "moe.shared_experts.w2.weight",
}
TORCHTITAN_UPS = {
    "mlp.up.weight": "feed_forward.w{}.weight",
    "mlp.shared.up.weight": "moe.shared_experts.w{}.weight",
    "mlp.experts.up.weight": "moe.routed_experts.inner_experts.w{}_EFD",
}


def as_older_torchtitan(model: ModelSpec, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names of 2025."""
    found = as_torchtitan(model, values)
    pattern = re.compile(r"routed_experts\.inner_experts\.(w\d)_E..|qkv_linear\.|(expert_bias)_E")
    return {
        pattern.sub(lambda m: f"experts.{m[1]}" if m[1] else m[2] or "", name): each for name, each in found.items()
    }


def as_torchtitan(model: ModelSpec, values: dict[str, Tensor]) -> dict[str, Tensor]:
    values = as_files(model, values)
    turned = pairs if not model.qk_norm else lambda rows, heads: rows
    found = {"tok_embeddings.weight": values["embedding.tokens.weight"], "norm.weight": values["head.norm.weight"]}
    found["lm_head.weight"] = values["head.output.weight"]
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}.", f"layers.{layer}."
        if ours + "attention.qkv.weight" in values:
            groups = values[ours + "attention.qkv.weight"].unflatten(0, (model.num_kv_heads, -1, model.head_dim))
            queries, keys, rows = (part.flatten(0, 2) for part in groups.split([groups.shape[1] - 2, 1, 1], 1))
            found[theirs + "attention.qkv_linear.wq.weight"] = turned(queries, model.num_heads)
            found[theirs + "attention.qkv_linear.wk.weight"] = turned(keys, model.num_kv_heads)
            found[theirs + "attention.qkv_linear.wv.weight"] = rows
        for norm, kind in (("q_norm", "query_norm"), ("k_norm", "key_norm")) if model.qk_norm else ():
            found[f"{theirs}attention.{norm}.weight"] = values[f"{ours}attention.{kind}.weight"]
        found |= {theirs + name: values[ours + own] for own, name in TORCHTITAN.items() if ours + own in values}
        for own, name in TORCHTITAN_UPS.items():
            if (both := values.get(ours + own)) is not None:
                found[theirs + name.format(1)], found[theirs + name.format(3)] = both[..., 0::2, :], both[..., 1::2, :]
    return {name: tensor.contiguous() for name, tensor in found.items()}


MEGATRON = {
    "attention.qkv.": "self_attention.linear_qkv.",
    "attention.norm.": "self_attention.linear_qkv.layer_norm_",
    "attention.output.": "self_attention.linear_proj.",
    "attention.q_down.": "self_attention.linear_q_down_proj.",
    "attention.q_norm.": "self_attention.linear_q_up_proj.layer_norm_",
    "attention.q_up.": "self_attention.linear_q_up_proj.",
    "attention.kv_down.": "self_attention.linear_kv_down_proj.",
    "attention.kv_norm.": "self_attention.kv_layernorm.",
    "attention.kv_up.": "self_attention.linear_kv_up_proj.",
    "attention.query_norm.": "self_attention.q_layernorm.",
    "attention.key_norm.": "self_attention.k_layernorm.",
    "mlp.norm.": "mlp.linear_fc1.layer_norm_",
    "mlp.up.": "mlp.linear_fc1.",
    "mlp.down.": "mlp.linear_fc2.",
    "mlp.router.": "mlp.router.",
    "mlp.experts.up.": "mlp.experts.experts.linear_fc1.",
    "mlp.experts.down.": "mlp.experts.experts.linear_fc2.",
    "mlp.shared.up.": "mlp.shared_experts.linear_fc1.",
    "mlp.shared.down.": "mlp.shared_experts.linear_fc2.",
}
TOPS = {
    "embedding.tokens.weight": "embedding.word_embeddings.weight",
    "embedding.positions.weight": "embedding.position_embeddings.weight",
    "head.norm.weight": "decoder.final_layernorm.weight",
    "head.norm.bias": "decoder.final_layernorm.bias",
    "head.output.weight": "output_layer.weight",
}


def as_megatron(model: ModelSpec, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """All layers of a kind in one tensor, where all layers have it; else each in its own, as Megatron does where layers
    differ."""
    values = as_files(model, values)
    found = {theirs: values[ours] for ours, theirs in TOPS.items() if ours in values}
    for ours, theirs in MEGATRON.items():
        for kind in ("weight", "bias", "expert_bias"):
            names = {layer: f"layers.{layer}.{ours}{kind}" for layer in range(model.num_layers)}
            layers = {layer: values[name] for layer, name in names.items() if name in values}
            if ours.endswith("up.") and ours.startswith("mlp.") and model.gated:
                layers = {layer: torch.cat([up[..., 0::2, :], up[..., 1::2, :]], -2) for layer, up in layers.items()}
            if layers and model.first_dense_layers:
                found |= {f"decoder.layers.{layer}.{theirs}{kind}": each for layer, each in layers.items()}
            elif layers:
                found[f"decoder.layers.{theirs}{kind}"] = torch.stack(list(layers.values()))
    return found


def as_megatron_apart(model: ModelSpec, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """With `singleton_local_shards`: every expert, and gates and up-projections, in tensors of their own."""
    found: dict[str, Tensor] = {}
    for name, tensor in as_megatron(model, values).items():
        experts = name.partition(".experts.experts.")
        numbered = {f"{experts[0]}.experts.experts.{e}.{experts[2]}": one for e, one in enumerate(tensor)}
        for each, one in (numbered if experts[1] else {name: tensor}).items():
            both = each.endswith("linear_fc1.weight")
            found |= (
                {f"{each}_{part}": half for part, half in zip("wv", one.chunk(2), strict=True)} if both else {each: one}
            )
    return found


def saved(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """What a trainer writes: weights, an optimizer's state, and objects that torch pickles."""
    others = {
        "optimizer.state.exp_avg.decoder.layers.x": torch.ones(3),
        "train_state": io.BytesIO(pickle.dumps({"step": torch.tensor(3)})),
        "decoder.layers.self_attention.core_attention._extra_state/shard_0_2": io.BytesIO(b"no pickle at all"),
    }
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({**tensors, **others}, checkpoint_id=folder, no_dist=True)
    return folder


def shards_of(model: ModelSpec, degree: int, tp_rank: int) -> list:
    """What a tensor-parallel rank holds, at its start."""
    sizes, device = leaf_sizes(model, 64), torch.device("cpu")
    return [
        initial_shard(each, sizes.local_slices(each, degree, tp_rank), 0, device, torch.float32)
        for each in all_parameters(model)
    ]


@pytest.mark.parametrize(
    ("model", "arrange"),
    [
        (LLAMA, as_torchtitan),
        (QWEN3, as_torchtitan),
        (QWEN3_MOE, as_torchtitan),
        (QWEN3_MOE, as_older_torchtitan),
        (DEEPSEEK, as_torchtitan),
        (LLAMA, as_megatron),
        (GPT, as_megatron),
        (MIXTRAL, as_megatron),
        (QWEN3_MOE, as_megatron),
        (QWEN3_MOE, as_megatron_apart),
        (DEEPSEEK, as_megatron),
        (DEEPSEEK, as_megatron_apart),
    ],
    ids=lambda given: getattr(given, "name", None) or given.__name__,
)
def test_every_rank_has_the_weights_that_another_trainer_has_saved(model, arrange, tmp_path):
    values = values_of(model)
    folder = saved(tmp_path / "run", arrange(model, values))
    for degree in (1, 3):
        for tp_rank in range(degree):
            shards = shards_of(model, degree, tp_rank)
            load_weights(model, str(folder), shards)
            for shard in shards:
                assert torch.equal(shard.tensor, values[shard.parameter.name][shard.slices]), shard.parameter.name


def test_a_folder_that_is_not_the_models_is_refused_before_a_weight_is_read(tmp_path):
    folder = saved(tmp_path / "run", as_megatron(LLAMA, values_of(LLAMA)))
    with pytest.raises(PlanError, match=r"has no decoder\.layers\.0\.self_attention\.q_layernorm\.weight"):
        load_weights(QWEN3, str(folder), [])
    with pytest.raises(PlanError, match=r"is of megatron, whose names for layer\.attention\.core of model sink"):
        StoredFolder(folder, SINK)
    with pytest.raises(PlanError, match=r"has no .*\.0\.mlp\.experts\.experts\.linear_fc1\.weight"):
        load_weights(MIXTRAL, str(folder), [])
    with pytest.raises(PlanError, match="neither the tensors of Megatron-LM nor those of torchtitan"):
        StoredFolder(saved(tmp_path / "other", {"weight": torch.ones(2)}), LLAMA)


class Executes:
    """What `pickle` would call when it reads it."""

    def __reduce__(self):
        return (Path.write_text, (Path("executed"), "yes"))


def test_nothing_that_a_folder_holds_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = values_of(LLAMA)
    folder = saved(tmp_path / "run", as_torchtitan(LLAMA, values))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Executes()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    shards = shards_of(LLAMA, 1, 0)
    load_weights(LLAMA, str(folder), shards)
    assert torch.equal(shards[0].tensor, values[shards[0].parameter.name]) and not (tmp_path / "executed").exists()


def test_a_file_that_ends_early_is_named(tmp_path):
    folder = saved(tmp_path / "run", as_torchtitan(LLAMA, values_of(LLAMA)))
    (file,) = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(PlanError, match=r"__0_0\.distcp: tensor \S+ cannot be read: the file ends before byte"):
        load_weights(LLAMA, str(folder), shards_of(LLAMA, 1, 0))
