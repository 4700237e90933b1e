"""Weights of Megatron-LM's and torchtitan's own checkpoints, as `torch.distributed.checkpoint` writes them.

The arrangements are written out here once more, from megatron-core 0.16.1 and torchtitan 0.3.0.
"""

from __future__ import annotations

import io
import pickle
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
from shardproof.core.model.parameters import parameters

LLAMA = ModelSpec("llama", 3, 48, 100, 12, 6, 8, 101, 64)
QWEN3 = ModelSpec("qwen3", 2, 48, 60, 6, 3, 8, 101, 64, qk_norm=True)
GPT = ModelSpec("gpt", 2, 48, 96, 6, 6, 8, 101, 64, activation="gelu", norm="layernorm", position="learned", bias=True)
EXPERTS = ModelSpec("experts", 2, 48, 60, 6, 3, 8, 101, 64, num_experts=4, experts_per_token=2)


def values_of(model: ModelSpec) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(5)
    return {each.name: torch.rand(each.shape, generator=draw) for each in parameters(model)}


def pairs(rows: Tensor, heads: int) -> Tensor:
    """Heads whose two halves turn, as heads whose neighbours do."""
    return rows.view(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def as_torchtitan(model: ModelSpec, values: dict[str, Tensor]) -> dict[str, Tensor]:
    turned = pairs if not model.qk_norm else lambda rows, heads: rows
    found = {"tok_embeddings.weight": values["embedding.tokens.weight"], "norm.weight": values["head.norm.weight"]}
    found["lm_head.weight"] = values["head.output.weight"]
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}.", f"layers.{layer}."
        groups = values[ours + "attention.qkv.weight"].view(model.num_kv_heads, -1, model.head_dim, model.hidden_size)
        queries, keys, rows = (part.flatten(0, 2) for part in groups.split([groups.shape[1] - 2, 1, 1], 1))
        found[theirs + "attention.qkv_linear.wq.weight"] = turned(queries, model.num_heads)
        found[theirs + "attention.qkv_linear.wk.weight"] = turned(keys, model.num_kv_heads)
        found[theirs + "attention.qkv_linear.wv.weight"] = rows
        for norm, kind in (("q_norm", "query_norm"), ("k_norm", "key_norm")) if model.qk_norm else ():
            found[f"{theirs}attention.{norm}.weight"] = values[f"{ours}attention.{kind}.weight"]
        found[theirs + "attention.wo.weight"] = values[ours + "attention.output.weight"]
        found[theirs + "attention_norm.weight"] = values[ours + "attention.norm.weight"]
        found[theirs + "ffn_norm.weight"] = values[ours + "mlp.norm.weight"]
        found[theirs + "feed_forward.w1.weight"] = values[ours + "mlp.up.weight"][0::2]
        found[theirs + "feed_forward.w3.weight"] = values[ours + "mlp.up.weight"][1::2]
        found[theirs + "feed_forward.w2.weight"] = values[ours + "mlp.down.weight"]
    return {name: tensor.contiguous() for name, tensor in found.items()}


MEGATRON = {
    "attention.qkv.": "self_attention.linear_qkv.",
    "attention.norm.": "self_attention.linear_qkv.layer_norm_",
    "attention.output.": "self_attention.linear_proj.",
    "mlp.norm.": "mlp.linear_fc1.layer_norm_",
    "mlp.up.": "mlp.linear_fc1.",
    "mlp.down.": "mlp.linear_fc2.",
}
TOPS = {
    "embedding.tokens.weight": "embedding.word_embeddings.weight",
    "embedding.positions.weight": "embedding.position_embeddings.weight",
    "head.norm.weight": "decoder.final_layernorm.weight",
    "head.norm.bias": "decoder.final_layernorm.bias",
    "head.output.weight": "output_layer.weight",
}


def as_megatron(model: ModelSpec, values: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {theirs: values[ours] for ours, theirs in TOPS.items() if ours in values}
    for ours, theirs in MEGATRON.items():
        for kind in ("weight", "bias"):
            layers = [values.get(f"layers.{layer}.{ours}{kind}") for layer in range(model.num_layers)]
            if layers[0] is not None:
                if ours == "mlp.up." and model.gated:
                    layers = [torch.cat([each[0::2], each[1::2]]) for each in layers]
                found[f"decoder.layers.{theirs}{kind}"] = torch.stack(layers)
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
        for each in parameters(model)
    ]


@pytest.mark.parametrize(
    ("model", "arrange"),
    [(LLAMA, as_torchtitan), (QWEN3, as_torchtitan), (LLAMA, as_megatron), (GPT, as_megatron)],
    ids=["torchtitan-llama", "torchtitan-qwen3", "megatron-llama", "megatron-gpt"],
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
    with pytest.raises(PlanError, match=r"is of megatron, whose names for layer\.mlp\.experts\.down of model experts"):
        StoredFolder(folder, EXPERTS)
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
