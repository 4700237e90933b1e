"""FLOPs of one optimizer step, for utilisation figures."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.model import ModelSpec
from ..core.plan import Plan


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one step over all devices: what the model needs with full and with causal attention, and what is really computed."""

    model: float
    model_causal: float
    hardware: float


def step_flops(plan: Plan) -> StepFlops:
    """Products only, a backward counted as two forwards.

    `model` generalises 72BLsh^2(1 + s/(6h) + V/(12hL)) of Korthikanti et al. 2022 (appendix A) to grouped heads and gated MLPs, and
    equals it where heads*head_dim = h, no grouping, ffn = 4h. `hardware` adds one forward of what is recomputed: the layers (`full`)
    or the attention core (`selective`), attention counted in full.
    """
    tokens = plan.batch.global_size * plan.batch.sequence
    linear = tokens * plan.model.num_layers * layer_flops_per_token(plan.model)
    attention = tokens * plan.model.num_layers * 4 * plan.batch.sequence * plan.model.num_heads * plan.model.head_dim
    head = tokens * 2 * plan.model.hidden_size * plan.model.vocab_size
    model = 3.0 * (linear + attention + head)
    recomputed = {"none": 0.0, "selective": attention, "full": linear + attention}[plan.recompute.mode]
    return StepFlops(model=model, model_causal=model - 1.5 * attention, hardware=model + recomputed)


def layer_flops_per_token(model: ModelSpec) -> int:
    """Forward FLOPs of one layer's linear products for one token: twice its matrix elements."""
    heads = model.num_heads * model.head_dim
    attention = model.hidden_size * (heads + 2 * model.num_kv_heads * model.head_dim) + heads * model.hidden_size
    mlp = (3 if model.gated else 2) * model.hidden_size * model.ffn_hidden_size
    return 2 * (attention + mlp)
