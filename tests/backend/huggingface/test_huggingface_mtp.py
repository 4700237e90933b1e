"""Multi-token prediction: `transformers` reads the modules that we write, and predicts with them what ours predict.

Bound: that of `test_model_transformers.py` with one layer more, 2 * (2 * 13 + 3) = 58 operations of at most
259 roundings on each side.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from shardproof.backend.data.corpus import Corpus
from shardproof.backend.huggingface.save import save_weights
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.parameters import parameters
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch, Numerics, Precision
from shardproof.core.plan.train import Train

transformers = pytest.importorskip("transformers")
modeling_layers = pytest.importorskip("transformers.modeling_layers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BOUND = 2 * 58 * 259 * 2.0**-24
SAMPLES, SEQUENCE = 4, 24
MODEL = ModelSpec(
    "deepseek",
    2,
    48,
    60,
    6,
    6,
    12,
    259,
    64,
    norm_eps=1e-6,
    num_experts=6,
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
    router_scaling=1.5,
    num_router_groups=3,
    router_groups_per_token=2,
    router_group_scores="top_two",
    expert_bias=True,
)


class Losses:
    """An observer that keeps the losses of the first module, [samples, s]."""

    def __init__(self):
        self.found = {}

    def activation(self, name, microbatch, tokens, tensor):
        if name == "mtp.0.losses":
            self.found[microbatch.first_sample] = tensor.detach().clone()

    def __getattr__(self, name):
        return lambda *_: None


def step_rank(transport, payload):
    plan, folder = payload
    observer = Losses()
    rank = TrainingRank(transport, plan, observer=observer)
    generator = torch.Generator().manual_seed(11)
    weights = {
        p.name: torch.randn(p.shape, generator=generator) * 0.1 + (p.constant or 0.0) for p in parameters(plan.model)
    }
    for stage in rank.stages.values():
        stage.load(weights)
    world = transport.group("world", "world", range(transport.world_size))
    save_weights(plan, str(folder), rank.saved_shards, world, transport.device)
    rank.step(0)
    return observer.found


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(tp=2, pp=2), Layout(tp=3, sequence_parallel=True, etp=1, ep=3)],
    ids=["one device", "tp2 pp2", "tp3 sp etp1 ep3"],
)
def test_transformers_predicts_the_token_after_next_from_our_files(layout, tmp_path, monkeypatch):
    data = tmp_path / "text"
    data.write_bytes(
        torch.randint(0, 256, (4000,), generator=torch.Generator().manual_seed(3)).to(torch.uint8).numpy().tobytes()
    )
    plan = Plan(
        MODEL,
        cluster_preset("this-host", layout.world_size),
        layout,
        Batch(SAMPLES, 2, SEQUENCE),
        precision=Precision("fp32"),
        numerics=Numerics("exact"),
        train=Train(data=str(data)),
    )
    found = {}
    for losses in run_threads(MemoryWorld(layout.world_size, timeout_s=60), step_rank, (plan, tmp_path / "model")):
        found |= losses
    ours = torch.cat([found[first] for first in sorted(found)])

    # it knows the modules of a model by this pattern, which it has for the published model's 61 layers
    monkeypatch.setattr(
        transformers.DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2\."]
    )
    main = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    modules = modeling_layers.MtpModel.from_pretrained(main).eval()
    tokens, targets = Corpus.load(str(data)).batch(0, SAMPLES, SEQUENCE, plan.train.seed)
    positions = torch.arange(SEQUENCE)[None]
    with torch.no_grad():
        hidden = main.model(tokens).last_hidden_state
        logits = main.lm_head(modules.forward_layer(0, hidden, positions, None, input_ids=targets))
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), reduction="none").view(
        SAMPLES, -1
    )
    assert ((ours[:, :-1] - expected).norm() / expected.norm()).item() < BOUND
    assert (ours[:, -1] == 0).all()  # there is no token after the last target
