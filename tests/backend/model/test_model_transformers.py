"""A model of every family, read from the files that `transformers` wrote, has its logits, its loss and its gradients,
on one device and cut over ranks; what is written back are the same files.

Bound: that of `test_model_oracle.py` for each side, 38 operations of at most 259 roundings (the vocabulary, the longest
sum here), so twice 5.9e-4 of a tensor's norm.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from helpers.plans import plan as exact_plan
from shardproof.backend.data.corpus import Corpus
from shardproof.backend.huggingface.names import sources
from shardproof.backend.huggingface.parts import file_shapes, regions
from shardproof.backend.huggingface.save import save_weights
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.trainer import run_steps
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.layout.layout import Layout
from shardproof.core.model.huggingface import read_config
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Precision

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BOUND = 2 * 38 * 259 * 2.0**-24
SAMPLES, SEQUENCE = 6, 24

SIZES = {"vocab_size": 259, "initializer_range": 0.1}
ROTARY = {
    **SIZES,
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
LATENT = {
    **{key: value for key, value in ROTARY.items() if key != "head_dim"},
    "num_key_value_heads": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 36,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
GRANITE = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 8**-0.5,
    "logits_scaling": 3.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
TURNED_WHOLE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
MODELS = {
    "gpt2": (
        "GPT2LMHeadModel",
        transformers.GPT2Config,
        {
            **SIZES,
            "n_positions": 64,
            "n_embd": 48,
            "n_layer": 2,
            "n_head": 6,
            "n_inner": 96,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "falcon": (
        "FalconForCausalLM",
        transformers.FalconConfig,
        {
            **SIZES,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_kv_heads": 3,
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 1,
            "ffn_hidden_size": 96,
            "max_position_embeddings": 64,
        },
    ),
    "falcon-biased": (
        "FalconForCausalLM",
        transformers.FalconConfig,
        {
            **SIZES,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "multi_query": False,
            "ffn_hidden_size": 96,
            "bias": True,
            "max_position_embeddings": 64,
        },
    ),
    "falcon-alibi": (
        "FalconForCausalLM",
        transformers.FalconConfig,
        {
            **SIZES,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "multi_query": False,
            "parallel_attn": False,
            "alibi": True,
            "bias": True,
        },
    ),
    "bloom": (
        "BloomForCausalLM",
        transformers.BloomConfig,
        {**SIZES, "hidden_size": 48, "n_layer": 2, "n_head": 6},
    ),
    "mpt": (
        "MptForCausalLM",
        transformers.MptConfig,
        {**SIZES, "d_model": 48, "n_layers": 2, "n_heads": 6, "attn_config": {"softmax_scale": 0.5}},
    ),
    "llama": ("LlamaForCausalLM", transformers.LlamaConfig, {**ROTARY, "rms_norm_eps": 1e-5}),
    "llama-biased": (
        "LlamaForCausalLM",
        transformers.LlamaConfig,
        {**ROTARY, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("MistralForCausalLM", transformers.MistralConfig, {**ROTARY, "sliding_window": 10}),
    "qwen2": ("Qwen2ForCausalLM", transformers.Qwen2Config, {**ROTARY, "tie_word_embeddings": True}),
    "qwen2-windowed": (
        "Qwen2ForCausalLM",
        transformers.Qwen2Config,
        {
            **ROTARY,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 0,
        },
    ),
    "qwen2-windows-later": (
        "Qwen2ForCausalLM",
        transformers.Qwen2Config,
        {**ROTARY, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "ministral": (
        "MinistralForCausalLM",
        transformers.MinistralConfig,
        {**ROTARY, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "ministral3": (
        "Ministral3ForCausalLM",
        transformers.Ministral3Config,
        {
            **ROTARY,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.0,
            },
        },
    ),
    "phi3": (
        "Phi3ForCausalLM",
        transformers.Phi3Config,
        {
            **{key: value for key, value in ROTARY.items() if key != "head_dim"},
            "hidden_size": 96,
            "sliding_window": 9,
            "pad_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        transformers.SmolLM3Config,
        {
            **ROTARY,
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 6,
            "pad_token_id": None,
        },
    ),
    "qwen3": ("Qwen3ForCausalLM", transformers.Qwen3Config, ROTARY),
    "mixtral": (
        "MixtralForCausalLM",
        transformers.MixtralConfig,
        {**ROTARY, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        transformers.Qwen3MoeConfig,
        {
            **ROTARY,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 36,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "deepseek-v2": (
        "DeepseekV2ForCausalLM",
        transformers.DeepseekV2Config,
        {
            **LATENT,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        transformers.DeepseekV3Config,
        {
            **LATENT,
            "q_lora_rank": 20,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": True,
            "num_mtp_layers": 0,
        },
    ),
    "llama-biased-attention": (
        "LlamaForCausalLM",
        transformers.LlamaConfig,
        {**ROTARY, "attention_bias": True},
    ),
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        transformers.Qwen2MoeConfig,
        {
            **ROTARY,
            "num_hidden_layers": 4,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 36,
            "shared_expert_intermediate_size": 60,
            "decoder_sparse_step": 2,
        },
    ),
    "granite": (
        "GraniteForCausalLM",
        transformers.GraniteConfig,
        {**ROTARY, **GRANITE, "mlp_bias": True},
    ),
    "granitemoe": (
        "GraniteMoeForCausalLM",
        transformers.GraniteMoeConfig,
        {**ROTARY, **GRANITE, "intermediate_size": 36, "num_local_experts": 6, "num_experts_per_tok": 3},
    ),
    "glm4": (
        "Glm4ForCausalLM",
        transformers.Glm4Config,
        {**ROTARY, "pad_token_id": 0, "rope_parameters": TURNED_WHOLE},
    ),
    "glm4-moe": (
        "Glm4MoeForCausalLM",
        transformers.Glm4MoeConfig,
        {
            **ROTARY,
            "rope_parameters": TURNED_WHOLE,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 36,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "n_group": 3,
            "topk_group": 2,
            "num_mtp_layers": 0,
        },
    ),
    "cohere2": (
        "Cohere2ForCausalLM",
        transformers.Cohere2Config,
        {
            **{key: value for key, value in ROTARY.items() if key != "head_dim"},
            "hidden_size": 96,
            "pad_token_id": 0,
            "logit_scale": 0.25,
            "sliding_window": 10,
            "layer_types": ["sliding_attention"] * 2,
        },
    ),
    "gemma": (
        "GemmaForCausalLM",
        transformers.GemmaConfig,
        {**ROTARY, "pad_token_id": None},
    ),
    "olmo2": ("Olmo2ForCausalLM", transformers.Olmo2Config, {**ROTARY, "pad_token_id": None}),
    "olmo3": (
        "Olmo3ForCausalLM",
        transformers.Olmo3Config,
        {
            **ROTARY,
            "pad_token_id": None,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {**YARN, "rope_theta": 20000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
            },
        },
    ),
    "olmoe": (
        "OlmoeForCausalLM",
        transformers.OlmoeConfig,
        {
            **{key: value for key, value in ROTARY.items() if key != "head_dim"},
            "hidden_size": 96,
            "intermediate_size": 36,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "pad_token_id": None,
        },
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        transformers.GptOssConfig,
        {
            **ROTARY,
            "intermediate_size": 36,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 9,
            "swiglu_limit": 0.5,
            "rope_parameters": {**YARN, "rope_theta": 10000.0, "truncate": False},
        },
    ),
    "llama-stretched": (
        "LlamaForCausalLM",
        transformers.LlamaConfig,
        {
            **ROTARY,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
    ),
    "qwen3-stretched": (
        "Qwen3ForCausalLM",
        transformers.Qwen3Config,
        {
            **ROTARY,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "deepseek-v3-stretched": (
        "DeepseekV3ForCausalLM",
        transformers.DeepseekV3Config,
        {
            **LATENT,
            "q_lora_rank": 20,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": True,
            "num_mtp_layers": 0,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 0.7,
                "mscale_all_dim": 1.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        },
    ),
}
DENSE = {
    "one device": Layout(),
    "tp2 dp3": Layout(tp=2, dp=3),
    "tp3 sp": Layout(tp=3, sequence_parallel=True),
    "tp2 pp2": Layout(tp=2, pp=2),
    "cp2 tp2": Layout(cp=2, tp=2),
}
EXPERTS = {
    "one device": Layout(),
    "tp2 dp3 ep3": Layout(tp=2, dp=3, ep=3),
    "tp3 sp etp1 ep3": Layout(tp=3, sequence_parallel=True, etp=1, ep=3),
    "tp2 pp2 sp etp1 ep2": Layout(tp=2, pp=2, sequence_parallel=True, etp=1, ep=2),
    "cp2 ep2": Layout(cp=2, ep=2),
}
WITH_EXPERTS = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "granitemoe", "glm4_moe"),
    *("olmoe", "gpt_oss"),
)
ONE_LAYOUT = {
    "bloom": 4,
    "mpt": 3,
    "falcon-alibi": 2,
    "glm4": 2,
    "granitemoe": 2,
    "qwen2-moe": 3,
    "granite": 4,
    "gemma": 3,
    "olmo2": 2,
    "olmo3": 4,
    "gpt-oss": 4,
}
ALL_LAYOUTS = ("gpt2", "llama", "qwen2", "mixtral", "deepseek-v3")
CASES = [
    (name, layout)
    for name, (_, config, _) in MODELS.items()
    for number, layout in enumerate(EXPERTS if config.model_type in WITH_EXPERTS else DENSE)
    if name in ALL_LAYOUTS or number == ONE_LAYOUT.get(name, 1)
]
"""Models and layouts; of families that differ little from another one only one layout."""


@dataclass(frozen=True)
class Written:
    """A model of `transformers` and the folder with its files; `data` is a text to train on."""

    model: torch.nn.Module
    folder: Path
    data: Path

    def plan(self, layout: Layout, **options) -> Plan:
        blocks = {"gradient_token_block": 6, "reduction_token_block": 3}
        train = {"steps": 1, "data": str(self.data), "load": str(self.folder)}
        choices = {
            "model": read_config(self.folder),
            "samples": SAMPLES,
            "micro": 2,
            "sequence": SEQUENCE,
            **blocks,
            **train,
            **options,
        }
        return exact_plan(layout, **choices)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """`written(name)`: each model made and saved once, norms and biases away from their constants."""
    made: dict[str, Written] = {}

    def make(name: str) -> Written:
        if name not in made:
            kind, config, fields = MODELS[name]
            torch.manual_seed(0)
            # Falcon's eager attention adds the penalties of ALiBi twice: in its mask, and once more to the scores
            attention = "sdpa" if fields.get("alibi") else "eager"
            model = getattr(transformers, kind)(config(**fields, attn_implementation=attention)).eval()
            with torch.no_grad():
                for tensor in [
                    *model.parameters(),
                    *(buffer for path, buffer in model.named_buffers() if path.endswith("correction_bias")),
                ]:
                    if tensor.dim() == 1:
                        tensor.add_(torch.randn_like(tensor) * 0.1)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            data = folder / "text"
            data.write_bytes(
                torch.randint(0, 256, (4000,), generator=torch.Generator().manual_seed(3))
                .to(torch.uint8)
                .numpy()
                .tobytes()
            )
            made[name] = Written(model, folder, data)
        return made[name]

    return make


def text_of(plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of the first step."""
    return Corpus.load(plan.train.data).batch(0, SAMPLES, SEQUENCE, plan.train.seed)


class Gradients:
    """An observer that keeps a step's loss and this rank's slices of the finished gradients."""

    def __init__(self):
        self.scalars, self.slices = {}, []

    def scalar(self, name, value):
        self.scalars[name] = value

    def gradient(self, name, slices, tensor):
        self.slices.append((name, slices, tensor.clone()))

    def __getattr__(self, name):
        return lambda *_: None


@dataclass(frozen=True)
class RankRun:
    """What one rank did with a model: the logits of its tokens, which lie at `places`, before training (without a
    pipeline), and a step's loss and gradients."""

    coordinates: dict[str, int]
    places: torch.Tensor | None
    logits: torch.Tensor | None
    loss: float
    gradients: list[tuple[str, tuple[slice, ...], torch.Tensor]]


def rank_run(transport, payload) -> RankRun:
    plan, folder = payload
    observer = Gradients()
    rank = TrainingRank(transport, plan, observer=observer)
    world = transport.group("world", "world", range(transport.world_size))
    save_weights(plan, str(folder), rank.saved_shards, world, transport.device)
    logits, places = None, None
    if plan.layout.pp == 1:
        (stage,) = rank.stages.values()
        places = stage.context.places()
        with torch.no_grad():
            logits = torch.cat(
                [stage.logits(replace(microbatch, step=None), None) for microbatch in rank.batches.training(0, 1.0)]
            )
    rank.step(0)
    return RankRun(rank.mesh.coordinates, places, logits, observer.scalars["loss"], observer.slices)


@pytest.fixture(scope="module")
def ran(written, tmp_path_factory):
    """`ran(name, layout)`: plan, what every rank did, and the folder it was saved to untrained; each case run once."""
    made = {}

    def run(name: str, layout: str):
        if (name, layout) not in made:
            plan, folder = written(name).plan((DENSE | EXPERTS)[layout]), tmp_path_factory.mktemp("again")
            ranks = run_threads(MemoryWorld(plan.layout.world_size, timeout_s=60), rank_run, (plan, folder))
            made[name, layout] = plan, ranks, folder
        return made[name, layout]

    return run


def relative(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def file_gradients(model, family) -> dict[str, torch.Tensor]:
    """The gradients of a model of `transformers` by the names its files have: there every
    expert is a tensor of its own, but for gpt-oss."""
    if family == "gpt_oss":
        return {name: parameter.grad for name, parameter in model.named_parameters()}
    found = {}
    stacked = {"experts.gate_up_proj": "input_linear.weight", "experts.down_proj": "output_linear.weight"}
    for name, parameter in model.named_parameters():
        prefix, _, last = name.rpartition("experts.")
        if family == "granitemoe":
            for theirs, written in {**stacked, "router.weight": "router.layer.weight"}.items():
                name, last = name.replace(f"block_sparse_moe.{theirs}", f"block_sparse_moe.{written}"), ""
        if last not in ("gate_up_proj", "down_proj"):
            found[name.replace("mlp.gate.", "block_sparse_moe.gate.") if family == "mixtral" else name] = parameter.grad
            continue
        for expert, gradient in enumerate(parameter.grad):
            parts = (
                dict(zip(("gate_proj", "up_proj"), gradient.chunk(2), strict=True))
                if last == "gate_up_proj"
                else {last: gradient}
            )
            for part, tensor in parts.items():
                theirs = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[part] if family == "mixtral" else part
                place = prefix.replace("mlp.", "block_sparse_moe.") if family == "mixtral" else prefix
                found[f"{place}experts.{expert}.{theirs}.weight"] = tensor
    return found


@pytest.mark.parametrize(("name", "layout"), [case for case in CASES if "pp" not in case[1]])
def test_logits_are_those_of_transformers(written, ran, name, layout):
    plan, ranks, _ = ran(name, layout)
    with torch.no_grad():
        expected = written(name).model(text_of(plan)[0]).logits
    found = torch.full_like(expected, torch.nan)
    for rank in ranks:
        vocabulary = slice(*plan.leaf_sizes.vocab.owned_items(plan.layout.tp, rank.coordinates["tp"]))
        own = found[slice(*plan.samples_of(rank.coordinates["dp"])), :, vocabulary]
        own[:, rank.places] = rank.logits
    assert relative(found, expected) < BOUND


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_loss_and_gradients_are_those_of_transformers(written, ran, name, layout):
    plan, ranks, _ = ran(name, layout)
    theirs, (tokens, targets) = written(name), text_of(plan)
    theirs.model.zero_grad()
    expected_loss = F.cross_entropy(theirs.model(tokens).logits.flatten(0, 1), targets.flatten())
    expected_loss.backward()
    family = json.loads((theirs.folder / "config.json").read_text())["model_type"]
    expected = file_gradients(theirs.model, family)

    places = sources(plan.model, family)
    found = {
        name: torch.full(shape, torch.nan)
        for name, shape in file_shapes(places).items()
        if "correction_bias" not in name
    }
    for rank in ranks:
        assert abs(rank.loss / expected_loss.item() - 1) < BOUND
        for parameter, slices, gradient in rank.gradients:
            for region in regions(places[parameter], slices):
                region.theirs(found[region.name][region.index]).copy_(region.ours(gradient))
    assert expected.keys() == found.keys()
    for tensor, gradient in expected.items():
        assert relative(found[tensor], gradient) < BOUND, tensor


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_files_read_and_written_back_are_those_of_transformers_to_the_bit(written, ran, name, layout):
    folder, (_, _, again) = written(name).folder, ran(name, layout)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert json.loads((again / "config.json").read_text()) == json.loads((folder / "config.json").read_text())


def train_rank(transport, payload):
    plan, folder = payload
    run_steps(transport, plan, save_huggingface=str(folder))


@pytest.mark.parametrize(
    ("name", "layout", "schedule"),
    [
        ("gpt2", Layout(tp=2, pp=2, dp=3), "1F1B"),
        ("qwen2", Layout(pp=2, dp=3, cp=2), "ZBH1"),
        ("llama", Layout(pp=2), "DualPipe"),  # two replicas of every stage
        ("deepseek-v3", Layout(tp=3, sequence_parallel=True, etp=1, ep=3), "1F1B"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_weights_trained_on_many_ranks_are_the_files_of_one_and_transformers_reads_them(
    written, name, layout, schedule, tmp_path
):
    ours = written(name)
    for label, degrees, order in (("one", Layout(), "1F1B"), ("many", layout, schedule)):
        plan = ours.plan(degrees, schedule=order, clip_grad_norm=0.5, micro=1, steps=2, learning_rate=1e-2)
        run_threads(MemoryWorld(degrees.world_size, timeout_s=60), train_rank, (plan, tmp_path / label))
    one, many = (load_file(tmp_path / label / "model.safetensors") for label in ("one", "many"))
    assert all(torch.equal(one[tensor], many[tensor]) for tensor in one)
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "many" / "model.safetensors"
    ).read_bytes()
    again = (
        getattr(transformers, MODELS[name][0]).from_pretrained(tmp_path / "many", attn_implementation="eager").eval()
    )
    tokens, _ = text_of(plan)
    with torch.no_grad():
        assert relative(again(tokens).logits, ours.model(tokens).logits) > 0.01  # trained
    for tensor, values in again.state_dict().items():
        if tensor in many:
            assert torch.equal(values, many[tensor])


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3"])
def test_weights_in_bf16_are_computed_with_in_bf16(written, name, tmp_path):
    """Against fp32 arithmetic on the same weights: 38 hidden states, one after the other, are each
    rounded by 2^-9 at most."""
    ours = written(name)
    rounded = copy.deepcopy(ours.model).bfloat16()
    rounded.save_pretrained(tmp_path)
    plan = replace(ours, folder=tmp_path).plan(Layout(), precision=Precision("bf16"))
    rank = TrainingRank(MemoryWorld(1).transport(0), plan)
    with torch.no_grad():
        logits = torch.cat(
            [
                rank.stages[0].logits(replace(microbatch, step=None), None)
                for microbatch in rank.batches.training(0, 1.0)
            ]
        )
        expected = rounded.float()(text_of(plan)[0]).logits
    assert logits.dtype == torch.bfloat16
    assert relative(logits.float(), expected) < 38 * 2.0**-9


def test_several_files_of_transformers_are_read_and_ours_are_read_by_it(written, tmp_path):
    ours = written("deepseek-v2")
    ours.model.save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 3
    plan = replace(ours, folder=tmp_path / "theirs").plan(Layout())
    transport = MemoryWorld(1).transport(0)
    rank = TrainingRank(transport, plan)
    world = transport.group("world", "world", [0])
    save_weights(plan, str(tmp_path / "again"), rank.saved_shards, world, transport.device, max_bytes=30_000)
    assert len(list((tmp_path / "again").glob("model-*.safetensors"))) > 3
    again = transformers.DeepseekV2ForCausalLM.from_pretrained(tmp_path / "again").state_dict()
    for name, values in ours.model.state_dict().items():
        assert torch.equal(again[name], values), name
