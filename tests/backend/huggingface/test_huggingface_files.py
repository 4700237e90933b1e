"""Files of Hugging Face models: ours are those of the package `safetensors` to the byte, for every cut of the ranks
that write them, and what is read is this rank's slice and no more."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.disks import full_disk
from helpers.plans import product_plan
from shardproof.backend.gradients.parameter import initial_shard
from shardproof.backend.huggingface.config import check_load, check_room, check_save, config_to_write
from shardproof.backend.huggingface.files import file_layouts
from shardproof.backend.huggingface.folder import Folder
from shardproof.backend.huggingface.load import load_weights
from shardproof.backend.huggingface.names import sources, unused_names
from shardproof.backend.huggingface.parts import file_shapes, regions
from shardproof.backend.huggingface.save import save_weights
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.base.errors import ModelError, PlanError, RankFailure
from shardproof.core.layout.leaves import leaf_sizes
from shardproof.core.model.huggingface_config import config_of
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.parameters import count_parameters, expert_biases, parameters
from shardproof.core.plan.plan import Plan

GPT2 = ModelSpec(
    "gpt2",
    2,
    48,
    96,
    6,
    6,
    8,
    101,
    64,
    activation="gelu_tanh",
    norm="layernorm",
    position="learned",
    tied_embeddings=True,
    bias=True,
)
LLAMA = ModelSpec("llama", 2, 48, 100, 12, 6, 8, 101, 64)
QWEN2 = ModelSpec("qwen2", 2, 48, 60, 6, 3, 8, 101, 64, qkv_bias=True, tied_embeddings=True)
QWEN3 = ModelSpec("qwen3", 2, 48, 60, 6, 3, 8, 101, 64, qk_norm=True)
MIXTRAL = ModelSpec("mixtral", 2, 48, 60, 6, 3, 8, 101, 64, num_experts=4, experts_per_token=2)
DEEPSEEK = ModelSpec(
    "deepseek",
    3,
    48,
    60,
    6,
    6,
    12,
    101,
    64,
    num_experts=8,
    experts_per_token=2,
    num_shared_experts=1,
    expert_ffn_hidden_size=12,
    first_dense_layers=1,
    q_lora_rank=12,
    kv_lora_rank=10,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=6,
    num_mtp_layers=1,
    router_scores="sigmoid",
    num_router_groups=4,
    router_groups_per_token=2,
    router_group_scores="top_two",
    expert_bias=True,
)
FALCON = ModelSpec(
    "falcon",
    2,
    48,
    60,
    6,
    3,
    8,
    101,
    64,
    activation="gelu",
    norm="layernorm",
    parallel_block=True,
    tied_embeddings=True,
)
FAMILIES = {
    "falcon": FALCON,
    "gpt2": GPT2,
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "mixtral": MIXTRAL,
    "deepseek_v3": DEEPSEEK,
}
each_family = pytest.mark.parametrize(("family", "model"), FAMILIES.items(), ids=list(FAMILIES))


def numbered(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Tensors whose elements are all different, so that a misplaced one is seen."""
    tensors, first = {}, 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        tensors[name] = torch.arange(first, first + size, dtype=torch.float32).view(shape)
        first += size
    return tensors


def cuts_of(parameter, model: ModelSpec, degree: int) -> list[tuple[slice, ...]]:
    """The slices of `degree` ranks: whole leaves, and where experts are stacked also experts apart."""
    sizes = leaf_sizes(model, 64)
    if parameter.cut is None:
        return [tuple(slice(0, size) for size in parameter.shape)]
    dim, feature = parameter.cut
    cuts = []
    for rank in range(degree):
        lo, hi = sizes.feature(feature).owned_items(degree, rank)
        slices = [slice(0, size) for size in parameter.shape]
        slices[dim] = slice(lo * parameter.unit, hi * parameter.unit)
        cuts += (
            [tuple(slices)]
            if not parameter.expert
            else [(slice(e, e + 2), *slices[1:]) for e in range(0, model.num_experts, 2)]
        )
    return cuts


@each_family
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_slices_of_all_ranks_cover_every_element_of_the_files_once(family, model, degree):
    places = sources(model, family)
    shapes = file_shapes(places)
    counts = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for parameter in (*parameters(model), *expert_biases(model)):
        for slices in cuts_of(parameter, model, degree):
            local = torch.ones([part.stop - part.start for part in slices])
            for region in regions(places[parameter.name], slices):
                theirs = region.theirs(counts[region.name][region.index])
                theirs += region.ours(local)
    assert all((count == 1).all() for count in counts.values())
    num_biases = sum(parameter.num_elements for parameter in expert_biases(model))
    assert sum(count.numel() for count in counts.values()) == count_parameters(model) + num_biases


def shards_of(model: ModelSpec, degree: int, rank: int, values: dict[str, torch.Tensor] | None = None):
    """What a tensor-parallel rank holds, from full values or at its start."""
    sizes = leaf_sizes(model, 64)
    found = []
    for parameter in parameters(model):
        slices = sizes.local_slices(parameter, degree, rank)
        shard = initial_shard(parameter, slices, 0, torch.device("cpu"), torch.float32)
        if values is not None:
            shard.tensor.copy_(values[parameter.name][slices])
        found.append(shard)
    return found


def plan_of(model: ModelSpec, *, degree: int = 1, dtype: str = "fp32", load: str | None = None) -> Plan:
    return product_plan(model=model, samples=1, sequence=16, dtype=dtype, load=load, tp=degree)


def save_rank(transport, payload):
    model, values, folder, dtype, max_bytes = payload
    world = transport.group("world", "world", range(transport.world_size))
    shards = shards_of(model, transport.world_size, transport.global_rank, values)
    save_weights(plan_of(model, dtype=dtype), str(folder), shards, world, transport.device, max_bytes)


DENSE = [GPT2, LLAMA, QWEN2, QWEN3]


def written(tmp_path, model, *, degree=1, dtype="fp32", max_bytes=10**9):
    values = numbered({parameter.name: parameter.shape for parameter in parameters(model)})
    folder = tmp_path / f"{model.name}-{degree}"
    run_threads(MemoryWorld(degree), save_rank, (model, values, folder, dtype, max_bytes))
    return folder, values


@pytest.mark.parametrize("model", DENSE, ids=lambda model: model.name)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_files_of_three_ranks_are_those_of_one_and_of_the_peer_library_to_the_byte(tmp_path, model, dtype):
    one, values = written(tmp_path, model, dtype=dtype)
    three, _ = written(tmp_path, model, degree=3, dtype=dtype)
    assert sorted(file.name for file in one.iterdir()) == ["config.json", "model.safetensors"]
    for file in one.iterdir():
        assert file.read_bytes() == (three / file.name).read_bytes()
    tensors = load_file(one / "model.safetensors")
    save_file(tensors, tmp_path / "peer.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "peer.safetensors").read_bytes() == (one / "model.safetensors").read_bytes()
    table = tensors["transformer.wte.weight" if model is GPT2 else "model.embed_tokens.weight"]
    assert torch.equal(table, values["embedding.tokens.weight"].to(table.dtype))


@pytest.mark.parametrize("model", DENSE, ids=lambda model: model.name)
@pytest.mark.parametrize("degree", [1, 2, 3])
def test_a_rank_reads_its_own_slices_and_nothing_else(tmp_path, model, degree):
    folder, values = written(tmp_path, model, max_bytes=30_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    for rank in range(degree):
        shards = shards_of(model, degree, rank)
        num_bytes = load_weights(model, str(folder), shards)
        assert num_bytes == sum(shard.storage.nbytes for shard in shards)
        for shard in shards:
            assert torch.equal(shard.tensor, values[shard.parameter.name][shard.slices]), shard.parameter.name


def test_files_are_cut_between_tensors_at_the_size_asked_for_and_the_index_names_them(tmp_path):
    folder, _ = written(tmp_path, LLAMA, max_bytes=30_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    for file in files:
        tensors = load_file(file)
        assert all(index["weight_map"][name] == file.name for name in tensors)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 30_000 or len(tensors) == 1
    assert index["metadata"]["total_size"] == 4 * count_parameters(LLAMA)


def test_one_tensor_larger_than_a_file_gets_a_file_of_its_own():
    shapes = {"a": (4,), "b": (100,), "c": (2,), "d": (2,)}
    layouts = file_layouts(shapes, dict.fromkeys(shapes, torch.float32), 40)
    assert [list(layout.places) for layout in layouts] == [["a"], ["b"], ["c", "d"]]


def test_rows_of_padding_are_zero_when_read_and_are_not_written(tmp_path):
    folder, values = written(tmp_path, LLAMA)
    padded = ModelSpec("padded", 2, 48, 100, 12, 6, 8, 108, 64, padding_rows=7)
    for rank in range(3):
        table = shards_of(padded, 3, rank)[0]
        load_weights(padded, str(folder), [table])
        lo, hi = table.slices[0].start, table.slices[0].stop
        expected = torch.cat([values["embedding.tokens.weight"], torch.zeros(7, 48)])
        assert torch.equal(table.tensor, expected[lo:hi])
    full = {
        **values,
        **{
            name: torch.cat([values[name], torch.ones(7, 48)])
            for name in ("embedding.tokens.weight", "head.output.weight")
        },
    }
    again = tmp_path / "again"
    run_threads(MemoryWorld(3), save_rank, (padded, full, again, "fp32", 10**9))
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert json.loads((again / "config.json").read_text())["vocab_size"] == 101


def test_a_file_of_the_decoder_alone_is_read_without_the_first_word_of_its_names(tmp_path):
    folder, values = written(tmp_path, GPT2)
    tensors = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(folder / "model.safetensors").items()
    }
    masks = {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}  # a buffer of files before 2023
    save_file({**tensors, **masks}, folder / "model.safetensors")
    shards = shards_of(GPT2, 1, 0)
    load_weights(GPT2, str(folder), shards)
    assert all(torch.equal(shard.tensor, values[shard.parameter.name]) for shard in shards)


def test_loading_and_saving_keeps_the_config_but_for_the_number_format(tmp_path):
    folder, values = written(tmp_path, QWEN2)
    config = {**json.loads((folder / "config.json").read_text()), "eos_token_id": 7}
    (folder / "config.json").write_text(json.dumps(config))
    world = MemoryWorld(1).transport(0)
    plan = plan_of(QWEN2, dtype="bf16", load=str(folder))
    save_weights(
        plan, str(tmp_path / "again"), shards_of(QWEN2, 1, 0, values), world.group("world", "world", [0]), world.device
    )
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == {**config, "dtype": "bfloat16"}


def test_weights_of_eight_bits_are_read_with_the_scales_of_their_tiles(tmp_path):
    folder, _ = written(tmp_path, LLAMA)
    name, tile = "model.layers.1.mlp.down_proj.weight", (20, 16)
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(48, 100, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 7, generator=generator)
    changed(folder, lambda tensors: tensors.update({name: weight, f"{name}_scale_inv": scales}))
    config = json.loads((folder / "config.json").read_text())
    quantised = {**config, "quantization_config": {"quant_method": "fp8", "weight_block_size": list(tile)}}
    (folder / "config.json").write_text(json.dumps(quantised))
    expected = torch.tensor(
        [[float(weight[i, j]) * float(scales[i // tile[0], j // tile[1]]) for j in range(100)] for i in range(48)]
    )
    for rank in range(3):
        shard = next(shard for shard in shards_of(LLAMA, 3, rank) if shard.parameter.name == "layers.1.mlp.down.weight")
        load_weights(LLAMA, str(folder), [shard])
        assert torch.equal(shard.tensor, expected[shard.slices])
    assert "quantization_config" not in config_to_write(plan_of(LLAMA, load=str(folder)))


def changed(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_modules_of_multi_token_prediction_may_be_left_unread_and_their_copies_of_the_tables_always_are():
    copies = {"model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"}
    module = {"model.layers.3.enorm.weight", "model.layers.3.self_attn.o_proj.weight"}
    without = replace(DEEPSEEK, num_mtp_layers=0)
    assert unused_names(without, copies | module) == []
    assert unused_names(DEEPSEEK, copies | module) == sorted(module)
    assert unused_names(DEEPSEEK, {"model.layers.4.enorm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"}) == []
    assert unused_names(DEEPSEEK, {"model.layers.2.enorm.weight", "lm_head.weight"}) == [
        "lm_head.weight",
        "model.layers.2.enorm.weight",
    ]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop("model.norm.weight"), "has no model.norm.weight [48]."),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(101, 40)}),
            ("has lm_head.weight [101, 40] instead of [101, 48]."),
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(101, 48, dtype=torch.float8_e4m3fn)}),
            "has tensors in F8_E4M3; read are F32, BF16, F16, and F8_E4M3 with scales.",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}),
            "has tensors in I8; read are F32, BF16, F16, and F8_E4M3 with scales.",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(96)}),
            "has tensors that the plan's model does not use: model.layers.0.self_attn.q_proj.bias.",
        ),
    ],
    ids=["missing", "shape", "eight bits without scales", "format", "left over"],
)
def test_a_folder_with_other_tensors_is_refused_with_their_names(tmp_path, change, expected):
    folder, _ = written(tmp_path, LLAMA)
    changed(folder, change)
    with pytest.raises(PlanError) as caught:
        load_weights(LLAMA, str(folder), [])
    assert expected in str(caught.value)


def test_all_problems_of_a_folder_are_reported_at_once(tmp_path):
    folder, _ = written(tmp_path, LLAMA)
    changed(folder, lambda t: (t.pop("model.norm.weight"), t.update({"new": torch.zeros(1)})))
    with pytest.raises(PlanError) as caught:
        load_weights(LLAMA, str(folder), [])
    assert len(caught.value.problems) == 2


def test_an_index_that_names_a_tensor_that_its_file_does_not_have_is_refused(tmp_path):
    """Of a tied model the head is the table: a converter that leaves it out, and not its line in the index,
    writes such a folder."""
    folder, _ = written(tmp_path, LLAMA)
    names = [*load_file(folder / "model.safetensors"), "model.rotary_emb.inv_freq"]
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        PlanError, match=r"names tensors that are not there: model\.rotary_emb\.inv_freq \(model\.safetensors\)"
    ):
        load_weights(LLAMA, str(folder), [])


def test_a_folder_of_another_model_is_refused_before_anything_is_read(tmp_path):
    folder, _ = written(tmp_path, LLAMA)
    other = ModelSpec("other", 2, 48, 100, 12, 6, 8, 101, 128, rope_theta=500000.0, hidden_dropout=0.1)
    with pytest.raises(PlanError, match=r"rope_theta=500000\.0, in the file 10000\.0 .* Use model\.config"):
        check_load(plan_of(other, load=str(folder)))
    # neither changes what the weights compute
    longer = ModelSpec("longer", 2, 48, 100, 12, 6, 8, 101, 128, hidden_dropout=0.1)
    check_load(plan_of(longer, load=str(folder)))
    more = replace(LLAMA, num_mtp_layers=1)
    with pytest.raises(PlanError, match="num_mtp_layers=1, in the file 0"):
        check_load(plan_of(more, load=str(folder)))


def test_a_longer_model_is_another_one_where_rotary_positions_are_stretched_from_its_length(tmp_path):
    dynamic = replace(LLAMA, rope_scaling="dynamic", rope_factor=2.0)
    folder, _ = written(tmp_path, dynamic)
    with pytest.raises(PlanError, match="max_positions=128, in the file 64"):
        check_load(plan_of(replace(dynamic, max_positions=128), load=str(folder)))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "config.json: there is no such file"),
        ({"config.json": "{"}, "this is not JSON"),
        ({"config.json": "[]"}, "holds one object"),
        ({"config.json": None}, "holds neither model.safetensors nor"),
        ({"config.json": None, "model.safetensors.index.json": "{}"}, "has a weight_map"),
        (
            {
                "config.json": None,
                "model.safetensors.index.json": ('{"weight_map": {"lm_head.weight": "gone.safetensors"}}'),
            },
            "gone.safetensors",
        ),
        ({"config.json": None, "model.safetensors": "short"}, "no whole safetensors file"),
    ],
)
def test_a_folder_that_is_no_model_says_what_is_wrong(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).write_text(json.dumps(config_of(LLAMA, "fp32")) if text is None else text)
    with pytest.raises(PlanError, match=expected):
        load_weights(LLAMA, str(tmp_path), [])


def test_where_a_model_cannot_be_saved_is_known_before_training(tmp_path):
    check_save(plan_of(LLAMA), str(tmp_path / "new"))
    (tmp_path / "file").touch()
    with pytest.raises(PlanError, match="is a file"):
        check_save(plan_of(LLAMA), str(tmp_path / "file"))
    with pytest.raises(PlanError, match="Make it first"):
        check_save(plan_of(LLAMA), str(tmp_path / "no" / "such"))
    folder, _ = written(tmp_path, LLAMA)
    with pytest.raises(PlanError, match=r"holds a model already \(model.safetensors\)"):
        check_save(plan_of(LLAMA), str(folder))
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "config.json").write_text("{}")
    with pytest.raises(PlanError, match=r"holds a model already \(config.json\)"):
        check_save(plan_of(LLAMA), str(mine))
    squared = ModelSpec("squared", 2, 48, 52, 4, 4, 12, 101, 64, activation="relu_squared")
    with pytest.raises(ModelError, match=r"is of no family .* closest is llama, but for activation='relu_squared'"):
        check_save(plan_of(squared), str(tmp_path / "new"))


def test_weights_that_no_disk_holds_are_refused_before_training(tmp_path):
    check_room(plan_of(LLAMA), str(tmp_path / "new"))
    huge = replace(LLAMA, num_layers=10_000, hidden_size=2**18, ffn_hidden_size=2**24)
    with pytest.raises(PlanError, match=r"weights have .* are free there\. Make room"):
        check_room(plan_of(huge), str(tmp_path / "new"))


def test_a_disk_without_room_is_seen_before_a_weight_is_written(tmp_path):
    """Not by SIGBUS, which ends whoever writes to a mapped file that is not on the disk."""
    with (
        full_disk(20_000),
        pytest.raises(RankFailure, match=r"weights were not written to .*: File too large, and they have .* --resume"),
    ):
        written(tmp_path, LLAMA)
    assert not list(tmp_path.rglob("*.*"))


def test_blocks_are_read_without_the_rest_of_the_tensor(tmp_path):
    folder, values = written(tmp_path, LLAMA)
    with Folder(folder) as files:
        block = files.read("model.embed_tokens.weight", (slice(7, 9), slice(0, 48)))
        assert files.num_bytes_read == 2 * 48 * 4
    assert torch.equal(block, values["embedding.tokens.weight"][7:9])
