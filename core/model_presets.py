"""Models by name. Shapes are those of the published papers and Hugging Face configs; parameter counts are tests."""

from __future__ import annotations

from typing import Any

from .errors import UnknownNameError
from .model import ModelSpec


def model_preset(name: str) -> ModelSpec:
    """The model called `name`. Raises `UnknownNameError` with the closest known name."""
    if name not in MODEL_PRESETS:
        raise UnknownNameError("model", name, MODEL_PRESETS)
    return MODEL_PRESETS[name]


def _gpt(name: str, layers: int, hidden: int, heads: int, max_positions: int = 1024) -> ModelSpec:
    """GPT-2 and GPT-3: learned positions, LayerNorm, 4x GELU MLP, biases, tied embeddings, GPT-2's 50,257 tokens."""
    return ModelSpec(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=50257,
        max_positions=max_positions,
        activation="gelu_tanh",
        norm="layernorm",
        position="learned",
        tied_embeddings=True,
        bias=True,
    )


def _llama(name: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, **more: Any) -> ModelSpec:
    """Llama 2 unless `more` says otherwise: rotary positions, RMSNorm, SwiGLU, no biases, untied embeddings."""
    fields: dict[str, Any] = {"vocab_size": 32000, "max_positions": 4096, **more}
    return ModelSpec(name, layers, hidden, ffn, heads, kv_heads, hidden // heads, **fields)


_LLAMA3: dict[str, Any] = {"vocab_size": 128256, "max_positions": 8192, "rope_theta": 500000.0}
_LLAMA31: dict[str, Any] = {**_LLAMA3, "max_positions": 131072}
_TINY: dict[str, Any] = {"vocab_size": 256, "max_positions": 128}
_TINY_GPT: dict[str, Any] = {**_TINY, "activation": "gelu_tanh", "norm": "layernorm", "position": "learned", "bias": True}

_ALL = (
    # Radford et al. 2019, table 2; huggingface.co/openai-community/gpt2*
    _gpt("gpt2", 12, 768, 12),
    _gpt("gpt2-medium", 24, 1024, 16),
    _gpt("gpt2-large", 36, 1280, 20),
    _gpt("gpt2-xl", 48, 1600, 25),
    # Brown et al. 2020, table 2.1
    _gpt("gpt3-175b", 96, 12288, 96, max_positions=2048),
    # Touvron et al. 2023 (Llama 2); huggingface.co/meta-llama/Llama-2-*-hf
    _llama("llama2-7b", 32, 4096, 11008, 32, 32),
    _llama("llama2-13b", 40, 5120, 13824, 40, 40),
    _llama("llama2-70b", 80, 8192, 28672, 64, 8),
    # Llama Team 2024 (Llama 3), table 3; huggingface.co/meta-llama/Meta-Llama-3-*
    _llama("llama3-8b", 32, 4096, 14336, 32, 8, **_LLAMA3),
    _llama("llama3-70b", 80, 8192, 28672, 64, 8, **_LLAMA3),
    # huggingface.co/meta-llama/Llama-3.1-405B (8 key/value heads)
    _llama("llama3.1-405b", 126, 16384, 53248, 128, 8, **_LLAMA31),
    # Shapes for tests and laptops; vocabulary of bytes.
    ModelSpec("tiny-gpt", 4, 64, 256, 4, 4, 16, tied_embeddings=True, **_TINY_GPT),
    ModelSpec("tiny-gpt-6h", 4, 96, 384, 6, 6, 16, **_TINY_GPT),
    ModelSpec("tiny-llama", 4, 64, 192, 8, 4, 8, **_TINY),
)

MODEL_PRESETS: dict[str, ModelSpec] = {model.name: model for model in _ALL}
"""Name -> model."""
