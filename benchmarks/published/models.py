"""Sizes of models that tables only name, each from its public configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODELS: Mapping[str, Mapping[str, Any]] = {
    "GPT OSS 120B": {
        # openai/gpt-oss-120b, config.json; Megatron-Bridge v0.2.0,
        # src/megatron/bridge/models/gpt_oss/gpt_oss_provider.py
        "layers": 36,
        "hidden": 2880,
        "ffn": 2880,
        "heads": 64,
        "kv_heads": 8,
        "head_dim": 64,
        "vocab": 201088,
        "moe": {"experts": 128, "topk": 4, "moe_ffn": 2880},
    },
    # as the models of Zero Bubble PP, by the same authors
    "GPT 98.5B": {"vocab": 32000},
    "GPT3-5B": {
        # NeMo-Framework-Launcher 24.05, launcher_scripts/conf/training/gpt3/5b.yaml; 50,257
        # tokens made divisible by 128
        "layers": 24,
        "hidden": 4096,
        "ffn": 16384,
        "heads": 32,
        "vocab": 50304,
    },
    "Nemotron-8B": {
        # NeMo-Framework-Launcher 24.05, launcher_scripts/conf/training/nemotron/nemotron_8b.yaml; the
        # tokens of nvidia/nemotron-3-8b
        "layers": 32,
        "hidden": 4096,
        "ffn": 16384,
        "heads": 32,
        "vocab": 256000,
    },
    "Llama3-8x70B": {
        # Llama 3 70B (arXiv 2407.21783, table 3) whose MLPs are upcycled to eight experts of which a
        # token takes two (2504.14960)
        "layers": 80,
        "hidden": 8192,
        "ffn": 28672,
        "heads": 64,
        "kv_heads": 8,
        "vocab": 128256,
        "moe": {"experts": 8, "topk": 2},
    },
}
"""Name of a model in a table -> fields of `model` that the table leaves null."""


def size_of(model: Mapping[str, Any], field: str) -> Any:
    """A size of a model that its table leaves out: that of its name, or for a GPT an MLP four times as wide as the
    hidden state (Megatron-LM, megatron/training/arguments.py); None where neither says it."""
    name, hidden = str(model.get("name")), model.get("hidden")
    if (known := MODELS.get(name, {}).get(field)) is not None:
        return known
    return 4 * hidden if field == "ffn" and hidden and name.startswith("GPT ") else None
