"""A model described and drawn here, written with a `config.json` of its own, is for `transformers`
the model that it is here.

Bound: that of `test_model_transformers.py`, 38 operations of at most 259 roundings on each side.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from shardproof.backend.huggingface.save import save_weights
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.transport.memory import MemoryWorld
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.parameters import parameters
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.sections import Batch, Numerics, Precision
from shardproof.core.plan.train import Train

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BOUND = 2 * 38 * 259 * 2.0**-24
LLAMA = ModelSpec("llama", 2, 48, 60, 6, 3, 8, 259, 64, norm_eps=3e-6)
MIXTURE = {"num_experts": 6, "experts_per_token": 2}
LATENT = {
    "head_dim": 12,
    "num_kv_heads": 6,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
GROUPS = {"num_router_groups": 3, "router_groups_per_token": 2}
SHARED = {
    **MIXTURE,
    **LATENT,
    **GROUPS,
    "num_shared_experts": 2,
    "expert_ffn_hidden_size": 12,
    "first_dense_layers": 1,
    "norm_eps": 1e-6,
}
YARN = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_positions": 16}
OLMO = {"pre_norms": False, "post_norms": True, "whole_qk_norm": True}
FACTORS = {"embedding_multiplier": 6.0, "residual_multiplier": 0.3, "logit_multiplier": 1 / 3}
PARALLEL = {"activation": "gelu", "norm": "layernorm", "parallel_block": True, "tied_embeddings": True}
GEMMA = replace(
    LLAMA,
    activation="geglu_tanh",
    norm_offset=1.0,
    norm_eps=1e-6,
    post_norms=True,
    attention_scale=0.25,
    embedding_multiplier=LLAMA.hidden_size**0.5,
    sliding_window=9,
    tied_embeddings=True,
)
BLOOM = replace(LLAMA, num_kv_heads=6, ffn_hidden_size=4 * 48, norm="layernorm", position="alibi", tied_embeddings=True)

MODELS = {
    "gpt2": ModelSpec(
        "gpt2",
        2,
        48,
        60,
        6,
        6,
        8,
        259,
        64,
        activation="gelu",
        norm="layernorm",
        position="learned",
        tied_embeddings=True,
        bias=True,
    ),
    "llama": replace(LLAMA, bias=True, rope_scaling="linear", rope_factor=3.0, rope_theta=5000.0, head_dim=10),
    "mistral": replace(LLAMA, max_positions=16, sliding_window=9, rope_scaling="dynamic", rope_factor=2.0),
    "ministral": replace(LLAMA, sliding_window=9, window_layers=(0, 1)),
    "phi3": replace(LLAMA, rope_dim=4, sliding_window=13),
    "smollm3": replace(LLAMA, rope_layers=(0, 1), sliding_window=7, window_layers=(1, 0), bias=True),
    "qwen3 with windows later": replace(LLAMA, qk_norm=True, sliding_window=5, window_layers=(0, 1)),
    "qwen2": replace(LLAMA, qkv_bias=True, tied_embeddings=True, sliding_window=13),
    "qwen3": replace(LLAMA, qk_norm=True, **YARN, rope_beta_fast=20.0),
    "mixtral": replace(LLAMA, **MIXTURE),
    "qwen3_moe": replace(
        LLAMA, **MIXTURE, qk_norm=True, expert_ffn_hidden_size=24, first_dense_layers=1, normalized_router_weights=False
    ),
    "deepseek_v2": replace(LLAMA, **SHARED, normalized_router_weights=False, router_scaling=2.0),
    "deepseek_v3": replace(
        LLAMA,
        **SHARED,
        q_lora_rank=20,
        router_scores="sigmoid",
        router_group_scores="top_two",
        expert_bias=True,
        router_scaling=1.7,
        **YARN,
        rope_mscale=0.8,
        rope_mscale_all_dim=1.0,
    ),
    "llama of biased attention": replace(LLAMA, qkv_bias=True, attention_output_bias=True),
    "granite": replace(LLAMA, mlp_bias=True, attention_scale=0.3, **FACTORS),
    "granitemoe": replace(LLAMA, **MIXTURE, expert_ffn_hidden_size=None, **FACTORS),
    "qwen2_moe": replace(
        LLAMA,
        **MIXTURE,
        num_layers=4,
        qkv_bias=True,
        expert_ffn_hidden_size=24,
        first_dense_layers=1,
        expert_layer_step=2,
        num_shared_experts=1,
        shared_expert_ffn_hidden_size=30,
        shared_expert_gate=True,
        normalized_router_weights=False,
    ),
    "gemma2": replace(GEMMA, window_layers=(1, 0), attention_softcap=2.0, logit_softcap=3.0),
    "gemma3_text": replace(GEMMA, window_layers=(0, 1), qk_norm=True, rope_theta=1e6, rope_local_theta=5000.0),
    "glm4": replace(LLAMA, qkv_bias=True, post_norms=True),
    "glm4 of which a half turns": replace(LLAMA, rope_dim=4, qkv_bias=True, post_norms=True),
    "glm4_moe": replace(
        LLAMA,
        rope_dim=4,
        **MIXTURE,
        **GROUPS,
        qk_norm=True,
        expert_ffn_hidden_size=12,
        first_dense_layers=1,
        num_shared_experts=1,
        router_scores="sigmoid",
        router_group_scores="top_two",
        expert_bias=True,
    ),
    "cohere2": replace(
        LLAMA,
        norm="layernorm",
        norm_bias=False,
        parallel_block=True,
        logit_multiplier=0.25,
        sliding_window=9,
        window_layers=(1, 0),
        rope_layers=(1, 0),
        tied_embeddings=True,
    ),
    "olmo2": replace(LLAMA, **OLMO),
    "olmo3": replace(LLAMA, **OLMO, **YARN, sliding_window=9, window_layers=(1, 0), rope_local_theta=10000.0),
    "olmoe": replace(LLAMA, **MIXTURE, whole_qk_norm=True, normalized_router_weights=False),
    "gemma": replace(GEMMA, post_norms=False, attention_scale=None, sliding_window=0),
    "gpt_oss": replace(
        LLAMA,
        **MIXTURE,
        **YARN,
        rope_truncate=False,
        bias=True,
        router_bias=True,
        activation="quick_geglu",
        gate_offset=1.0,
        gate_limit=0.7,
        attention_sinks=True,
        sliding_window=9,
        window_layers=(1, 0),
    ),
    "bloom": replace(BLOOM, activation="gelu_tanh", bias=True, embedding_norm=True),
    "mpt": replace(BLOOM, activation="gelu", norm_bias=False, attention_scale=0.3),
    "falcon with penalties": replace(
        BLOOM, num_kv_heads=1, activation="gelu", alibi_multiplier=8**-0.5, tied_embeddings=True
    ),
    "falcon": replace(LLAMA, **PARALLEL, rope_theta=5000.0),
    "falcon of one key head": replace(LLAMA, **PARALLEL, num_kv_heads=1, bias=True),
}


@pytest.mark.parametrize("family", MODELS)
def test_a_model_made_here_has_the_same_logits_in_transformers(family, tmp_path):
    model = MODELS[family]
    (tmp_path / "text").write_bytes(bytes(range(256)) * 8)
    plan = Plan(
        model,
        cluster_preset("this-host", 1),
        Layout(),
        Batch(2, 2, 24),
        precision=Precision("fp32"),
        numerics=Numerics("exact"),
        train=Train(data=str(tmp_path / "text")),
    )
    transport = MemoryWorld(1).transport(0)
    rank = TrainingRank(transport, plan)
    generator = torch.Generator().manual_seed(11)
    rank.stages[0].load(
        {p.name: torch.randn(p.shape, generator=generator) * 0.1 + (p.constant or 0.0) for p in parameters(model)}
    )
    for router in rank.stages[0].routers:
        if router.expert_bias is not None:
            router.expert_bias.copy_(torch.randn(model.num_experts, generator=generator) * 0.1)
    save_weights(
        plan, str(tmp_path / "model"), rank.saved_shards, transport.group("world", "world", [0]), transport.device
    )
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == family.split()[0]

    # Falcon's eager attention adds the penalties of ALiBi twice
    attention = "sdpa" if family == "falcon with penalties" else "eager"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation=attention).eval()
    (microbatch,) = rank.batches.training(0, 1.0)
    with torch.no_grad():
        ours, expected = rank.stages[0].logits(replace(microbatch, step=None), None), theirs(microbatch.tokens).logits
    assert ((ours - expected).norm() / expected.norm()).item() < BOUND
