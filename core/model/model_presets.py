"""Models by name. Shapes are those of the published papers and Hugging Face configs; parameter counts are tests."""

from __future__ import annotations

from typing import Any

from ..base.errors import UnknownNameError
from .model import ModelSpec


def model_preset(name: str) -> ModelSpec:
    """The model called `name`. Raises `UnknownNameError` with the closest known name."""
    if name not in MODEL_PRESETS:
        raise UnknownNameError("model", name, MODEL_PRESETS, "`shardproof presets models`")
    return MODEL_PRESETS[name]


def _gpt(
    name: str, layers: int, hidden: int, heads: int, max_positions: int = 1024, vocab_size: int = 50257
) -> ModelSpec:
    """GPT-2 and GPT-3: learned positions, LayerNorm, 4x GELU MLP, biases, tied embeddings, GPT-2's 50,257 tokens."""
    return ModelSpec(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=vocab_size,
        max_positions=max_positions,
        activation="gelu_tanh",
        norm="layernorm",
        position="learned",
        tied_embeddings=True,
        bias=True,
    )


def _llama(name: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, **more: Any) -> ModelSpec:
    """Llama 2 unless `more` says otherwise: rotary positions, RMSNorm, SwiGLU, no biases, untied embeddings."""
    fields: dict[str, Any] = {"vocab_size": 32000, "max_positions": 4096, "head_dim": hidden // heads, **more}
    return ModelSpec(name, layers, hidden, ffn, heads, kv_heads, **fields)


def _deepseek(name: str, layers: int, hidden: int, ffn: int, heads: int, *, mscale: float, **more: Any) -> ModelSpec:
    """DeepSeek-V2 and V3: latent attention with heads of 128 + 64, positions stretched by yarn, shared experts,
    the first layers dense."""
    latent: dict[str, Any] = {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "head_dim": 192,
    }
    yarn: dict[str, Any] = {"rope_scaling": "yarn", "rope_factor": 40.0, "rope_original_positions": 4096}
    yarn |= {"rope_mscale": mscale, "rope_mscale_all_dim": mscale}
    return _llama(
        name, layers, hidden, ffn, heads, heads, max_positions=163840, norm_eps=1e-6, **latent, **yarn, **more
    )


def _experts(number: int, per_token: int, width: int, *, shared: int, dense: int, **router: Any) -> dict[str, Any]:
    """The fields of experts: how many, how many a token takes, their width, shared ones, dense layers before
    them, and their router's."""
    return {
        **router,
        "num_experts": number,
        "experts_per_token": per_token,
        "expert_ffn_hidden_size": width,
        "num_shared_experts": shared,
        "first_dense_layers": dense,
    }


def _nemotron(name: str, layers: int, hidden: int, heads: int) -> ModelSpec:
    """Nemotron-4: squared ReLU of 4x width, LayerNorm, no biases, 256,000 tokens. It rotates half of every
    head; here all of it is."""
    more: dict[str, Any] = {"vocab_size": 256000, "activation": "relu_squared", "norm": "layernorm"}
    return _llama(name, layers, hidden, 4 * hidden, heads, 8, **more)


_LLAMA3: dict[str, Any] = {"vocab_size": 128256, "max_positions": 8192, "rope_theta": 500000.0}
_STRETCHED: dict[str, Any] = {"max_positions": 131072, "rope_scaling": "llama3", "rope_original_positions": 8192}
_LLAMA31: dict[str, Any] = {**_LLAMA3, **_STRETCHED, "rope_factor": 8.0}
_LLAMA32: dict[str, Any] = {**_LLAMA3, **_STRETCHED, "rope_factor": 32.0}
_QWEN: dict[str, Any] = {"rope_theta": 1e6, "norm_eps": 1e-6}
_QWEN25: dict[str, Any] = {**_QWEN, "vocab_size": 152064, "max_positions": 131072, "qkv_bias": True}
_QWEN3: dict[str, Any] = {**_QWEN, "vocab_size": 151936, "max_positions": 40960, "head_dim": 128, "qk_norm": True}
_EIGHT_EXPERTS: dict[str, Any] = {"num_experts": 8, "experts_per_token": 2}
_QWEN3_EXPERTS: dict[str, Any] = {**_QWEN3, "num_experts": 128, "experts_per_token": 8}
_WHOLE_SOFTMAX: dict[str, Any] = {"normalized_router_weights": False}
"""Weights are shares of a softmax over all experts."""
_DEEPSEEK3_ROUTER: dict[str, Any] = {
    "router_scores": "sigmoid",
    "router_group_scores": "top_two",
    "expert_bias": True,
    "router_scaling": 2.5,
}
_TINY: dict[str, Any] = {"vocab_size": 256, "max_positions": 128}
_TINY_GPT: dict[str, Any] = {
    **_TINY,
    "activation": "gelu_tanh",
    "norm": "layernorm",
    "position": "learned",
    "bias": True,
}
_TINY_MOE: dict[str, Any] = {**_TINY, "num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": 48}
_TINY_DEEPSEEK: dict[str, Any] = {
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_shared_experts": 1,
    "first_dense_layers": 1,
    "num_mtp_layers": 1,
    "num_router_groups": 4,
    "router_groups_per_token": 2,
    **_DEEPSEEK3_ROUTER,
}

_ALL = (
    # Radford et al. 2019, table 2; huggingface.co/openai-community/gpt2*
    _gpt("gpt2", 12, 768, 12),
    _gpt("gpt2-medium", 24, 1024, 16),
    _gpt("gpt2-large", 36, 1280, 20),
    _gpt("gpt2-xl", 48, 1600, 25),
    # Brown et al. 2020, table 2.1. It prints 24 heads for 1.3B and a width of 5140 for 13B; used are 16 heads of
    # 128, and 5120 = 40 * 128
    _gpt("gpt3-125m", 12, 768, 12, max_positions=2048),
    _gpt("gpt3-350m", 24, 1024, 16, max_positions=2048),
    _gpt("gpt3-760m", 24, 1536, 16, max_positions=2048),
    _gpt("gpt3-1.3b", 24, 2048, 16, max_positions=2048),
    _gpt("gpt3-2.7b", 32, 2560, 32, max_positions=2048),
    _gpt("gpt3-6.7b", 32, 4096, 32, max_positions=2048),
    _gpt("gpt3-13b", 40, 5120, 40, max_positions=2048),
    _gpt("gpt3-175b", 96, 12288, 96, max_positions=2048),
    # Korthikanti et al. 2022, table 3 (530B is Megatron-Turing NLG, 1T that of Narayanan et al.
    # 2021); padded vocabulary
    _gpt("megatron-22b", 48, 6144, 64, max_positions=2048, vocab_size=51200),
    _gpt("mt-nlg-530b", 105, 20480, 128, max_positions=2048, vocab_size=51200),
    _gpt("megatron-1t", 128, 25600, 160, max_positions=2048, vocab_size=51200),
    # Touvron et al. 2023 (Llama 2); huggingface.co/meta-llama/Llama-2-*-hf
    _llama("llama2-7b", 32, 4096, 11008, 32, 32),
    _llama("llama2-13b", 40, 5120, 13824, 40, 40),
    _llama("llama2-70b", 80, 8192, 28672, 64, 8),
    # Llama Team 2024 (Llama 3), table 3; huggingface.co/meta-llama/Meta-Llama-3-*, Llama-3.1-* (8
    # key/value heads), Llama-3.2-*
    _llama("llama3-8b", 32, 4096, 14336, 32, 8, **_LLAMA3),
    _llama("llama3-70b", 80, 8192, 28672, 64, 8, **_LLAMA3),
    _llama("llama3.1-8b", 32, 4096, 14336, 32, 8, **_LLAMA31),
    _llama("llama3.1-70b", 80, 8192, 28672, 64, 8, **_LLAMA31),
    _llama("llama3.1-405b", 126, 16384, 53248, 128, 8, **_LLAMA31),
    _llama("llama3.2-1b", 16, 2048, 8192, 32, 8, tied_embeddings=True, **_LLAMA32),
    _llama("llama3.2-3b", 28, 3072, 8192, 24, 8, tied_embeddings=True, **_LLAMA32),
    # Jiang et al. 2023, 2024; huggingface.co/mistralai/Mistral-7B-v0.1, Mixtral-8x7B-v0.1, Mixtral-8x22B-v0.1
    _llama("mistral-7b", 32, 4096, 14336, 32, 8, max_positions=32768, sliding_window=4096),
    _llama("mixtral-8x7b", 32, 4096, 14336, 32, 8, max_positions=32768, rope_theta=1e6, **_EIGHT_EXPERTS),
    _llama("mixtral-8x22b", 56, 6144, 16384, 48, 8, max_positions=65536, rope_theta=1e6, **_EIGHT_EXPERTS),
    # Qwen Team 2024, 2025; huggingface.co/Qwen/Qwen2.5-*, Qwen3-*
    _llama("qwen2.5-7b", 28, 3584, 18944, 28, 4, **_QWEN25),
    _llama("qwen2.5-72b", 80, 8192, 29568, 64, 8, **{**_QWEN25, "norm_eps": 1e-5}),
    _llama("qwen3-8b", 36, 4096, 12288, 32, 8, **_QWEN3),
    _llama("qwen3-32b", 64, 5120, 25600, 64, 8, **_QWEN3),
    _llama("qwen3-30b-a3b", 48, 2048, 6144, 32, 4, expert_ffn_hidden_size=768, **_QWEN3_EXPERTS),
    _llama("qwen3-235b-a22b", 94, 4096, 12288, 64, 4, expert_ffn_hidden_size=1536, **_QWEN3_EXPERTS),
    # DeepSeek-AI 2024 (arXiv 2405.04434, 2412.19437); huggingface.co/deepseek-ai/DeepSeek-V2-Lite,
    # DeepSeek-V2, DeepSeek-V3
    _deepseek(
        "deepseek-v2-lite",
        27,
        2048,
        10944,
        16,
        mscale=0.707,
        vocab_size=102400,
        **_experts(64, 6, 1408, shared=2, dense=1, **_WHOLE_SOFTMAX),
    ),
    _deepseek(
        "deepseek-v2",
        60,
        5120,
        12288,
        128,
        mscale=0.707,
        vocab_size=102400,
        q_lora_rank=1536,
        **_experts(
            160,
            6,
            1536,
            shared=2,
            dense=1,
            router_scaling=16.0,
            num_router_groups=8,
            router_groups_per_token=3,
            **_WHOLE_SOFTMAX,
        ),
    ),
    _deepseek(
        "deepseek-v3",
        61,
        7168,
        18432,
        128,
        mscale=1.0,
        vocab_size=129280,
        q_lora_rank=1536,
        num_mtp_layers=1,
        **_experts(
            256, 8, 2048, shared=1, dense=3, num_router_groups=8, router_groups_per_token=4, **_DEEPSEEK3_ROUTER
        ),
    ),
    # Parmar et al. 2024 (arXiv 2402.16819), table 1; NVIDIA 2024 (arXiv 2406.11704), table 1
    _nemotron("nemotron4-15b", 32, 6144, 48),
    _nemotron("nemotron4-340b", 96, 18432, 96),
    # github.com/xai-org/grok-1, run.py and model.py; two more norms a layer, behind attention and experts, are left out
    _llama(
        "grok-1",
        64,
        6144,
        32768,
        48,
        8,
        vocab_size=131072,
        max_positions=8192,
        activation="geglu",
        tied_embeddings=True,
        **_EIGHT_EXPERTS,
        **_WHOLE_SOFTMAX,
    ),
    # Shapes for tests and laptops; vocabulary of bytes.
    ModelSpec("tiny-gpt", 4, 64, 256, 4, 4, 16, tied_embeddings=True, **_TINY_GPT),
    ModelSpec("tiny-gpt-6h", 4, 96, 384, 6, 6, 16, **_TINY_GPT),
    ModelSpec("tiny-llama", 4, 64, 192, 8, 4, 8, **_TINY),
    ModelSpec("tiny-moe", 4, 64, 192, 8, 4, 8, **_TINY_MOE),
    ModelSpec("tiny-deepseek", 4, 64, 192, 4, 4, 24, **_TINY_DEEPSEEK, **_TINY_MOE),
)

MODEL_PRESETS: dict[str, ModelSpec] = {model.name: model for model in _ALL}
"""Name -> model."""
