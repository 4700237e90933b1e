"""Tiny plans for mutants: exact numerics, every sum of several leaves, and clipping that is active in every step."""

from __future__ import annotations

from typing import Any

from ...core.layout.layout import Layout
from ...core.machine.cluster_presets import cluster_preset
from ...core.model.model import ModelSpec
from ...core.plan.optimizer import Optimizer
from ...core.plan.plan import Plan
from ...core.plan.sections import Batch, Numerics, Precision, ScheduleChoice
from ...core.plan.train import Train

SEQUENCE = 16

DENSE: dict[str, Any] = {
    "name": "mutant",
    "num_layers": 2,
    "hidden_size": 24,
    "ffn_hidden_size": 48,
    "num_heads": 6,
    "num_kv_heads": 6,
    "head_dim": 4,
    "vocab_size": 259,
    "max_positions": SEQUENCE,
}
EXPERTS: dict[str, Any] = {**DENSE, "num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 24}


def tiny(
    *,
    samples: int = 4,
    micro: int = 1,
    sequence: int = SEQUENCE,
    model: dict[str, Any] | None = None,
    dtype: str = "fp32",
    clip: float = 0.05,
    train: dict[str, Any] | None = None,
    schedule: str = "1F1B",
    sections: dict[str, Any] | None = None,
    **degrees: Any,
) -> Plan:
    """A plan of `samples` sequences a step, of `sequence` tokens each, on a layout of `degrees`. `model` are fields
    over those of `DENSE` (for experts those of `EXPERTS`), `train` fields of `Train`; `sections` are further sections
    of a plan by their names."""
    layout = Layout(**degrees)
    spec = {**DENSE, "max_positions": sequence, **(model or {})}
    spec["num_layers"] = max(spec["num_layers"], layout.num_stages)
    return Plan(
        ModelSpec(**spec),
        cluster_preset("this-host", layout.world_size),
        layout,
        Batch(samples, micro, sequence),
        precision=Precision(dtype),  # type: ignore[arg-type]
        schedule=ScheduleChoice(schedule),
        numerics=Numerics("exact", gradient_token_block=4, reduction_token_block=2),
        optimizer=Optimizer(clip_grad_norm=clip),
        train=Train(**{"steps": 3, "learning_rate": 1e-2, **(train or {})}),
        **(sections or {}),
    )
