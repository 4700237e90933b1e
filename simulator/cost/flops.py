"""FLOPs of one optimizer step, for utilisation figures."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.model.model import ModelSpec
from ...core.plan.plan import Plan
from ...core.program import recomputed_modules, recomputed_runs, recomputes_all
from ..stack.profiles import PROFILES


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one step over all devices: what the model needs with full and with causal attention, and
    what is really computed."""

    model: float
    model_causal: float
    hardware: float


def step_flops(plan: Plan) -> StepFlops:
    """Products only, a backward counted as two forwards; of experts those that a token takes.

    `model` generalises 72BLsh^2(1 + s/(6h) + V/(12hL)) of Korthikanti et al. 2022 (appendix A) to grouped heads, latent
    attention, gated MLPs, experts and multi-token prediction, and equals it where heads*head_dim = h, no grouping, ffn
    = 4h. `hardware` adds one forward of what is recomputed, attention counted in full.
    """
    model, tokens = plan.model, plan.batch.global_size * plan.batch.sequence
    core = core_flops_per_token(model, plan.batch.sequence) * (model.num_layers + model.num_mtp_layers)
    linear = sum(layer_flops_per_token(model, layer) * count for layer, count in _layer_counts(model))
    head = 2 * model.hidden_size * model.vocab_size * (1 + model.num_mtp_layers)
    projections = 4 * model.hidden_size**2 * model.num_mtp_layers
    needed = 3.0 * tokens * (linear + core + head + projections)
    return StepFlops(
        model=needed,
        model_causal=needed - 1.5 * tokens * core,
        hardware=needed + tokens * float(_recomputed_per_token(plan)),
    )


def layer_flops_per_token(model: ModelSpec, layer: int = 0) -> int:
    """Forward FLOPs of one layer's linear products for one token: twice the matrix elements that the token meets."""
    return 2 * (attention_elements(model) + mlp_elements(model, layer))


def core_flops_per_token(model: ModelSpec, sequence: int) -> int:
    """Forward FLOPs of the scores of one token against a whole sequence, and of their product with the values."""
    return 2 * sequence * model.num_heads * (model.head_dim + model.value_head_dim)


def attention_elements(model: ModelSpec) -> int:
    """Matrix elements of the linear layers of one attention."""
    hidden, heads = model.hidden_size, model.num_heads
    output = heads * model.value_head_dim * hidden
    if not model.is_mla:
        return hidden * (heads + 2 * model.num_kv_heads) * model.head_dim + output
    down = hidden * (model.q_lora_rank + model.kv_lora_rank + model.qk_rope_head_dim)
    queries = 0 if model.q_lora_rank else hidden * heads * model.head_dim
    return down + queries + _latent_up_elements(model) + output


def mlp_elements(model: ModelSpec, layer: int) -> int:
    """Matrix elements that a token meets in the MLP of a layer: a dense one, or router, its
    experts and the shared ones."""
    products = 3 if model.gated else 2
    if not model.layer_is_moe(layer):
        return products * model.hidden_size * model.ffn_hidden_size
    width = model.experts_per_token * model.expert_width + model.shared_expert_width
    return model.hidden_size * (products * width + model.num_experts)


def _latent_up_elements(model: ModelSpec) -> int:
    """Up-projections from the vectors of low rank."""
    queries = model.q_lora_rank * model.head_dim
    return model.num_heads * (queries + model.kv_lora_rank * (model.qk_nope_head_dim + model.v_head_dim))


def _layer_counts(model: ModelSpec) -> tuple[tuple[int, int], ...]:
    """(a layer, how many are like it): dense layers, then those with experts, multi-token prediction included."""
    last = model.num_layers + model.num_mtp_layers
    dense = model.first_dense_layers if model.is_moe else last
    return tuple((layer, count) for layer, count in ((0, dense), (dense, last - dense)) if count)


def _recomputed_per_token(plan: Plan) -> int:
    """Forward FLOPs per token that the backward pass repeats."""
    model, sequence = plan.model, plan.batch.sequence
    core = core_flops_per_token(model, sequence)
    if plan.recompute.mode == "full":
        if recomputes_all(plan):
            return sum((layer_flops_per_token(model, layer) + core) * count for layer, count in _layer_counts(model))
        runs = [run for stage in plan.stages for run in recomputed_runs(plan, stage.first_layer, stage.last_layer)]
        return sum(layer_flops_per_token(model, layer) + core for lo, hi in runs for layer in range(lo, hi))
    modules, layers = recomputed_modules(plan), model.num_layers + model.num_mtp_layers
    total = layers * core if "core_attn" in modules else 0
    if plan.recompute.mode == "selective" and PROFILES[plan.runtime.profile].selective_operators:
        return total + sum(count * 2 * _second_elements(model, layer) for layer, count in _layer_counts(model))
    if "mla_up_proj" in modules:
        total += layers * 2 * _latent_up_elements(model)
    for layer, count in _layer_counts(model):
        moe = model.layer_is_moe(layer)
        if ("moe" if moe else "mlp") in modules:
            total += count * 2 * mlp_elements(model, layer)
        elif moe and "shared_experts" in modules:
            total += count * 2 * (3 if model.gated else 2) * model.hidden_size * model.shared_expert_width
    return total


def _second_elements(model: ModelSpec, layer: int) -> int:
    """Matrix elements of every second product of a layer in the order of the forward, without the last
    (`projections.second_products`)."""
    hidden, heads, rotary = model.hidden_size, model.num_heads, model.qk_rope_head_dim
    queries, keys = hidden * heads * model.head_dim, hidden * model.num_kv_heads * model.head_dim
    found = [queries, keys, keys]
    if model.is_mla:
        low = (
            [hidden * model.q_lora_rank, model.q_lora_rank * heads * model.head_dim] if model.q_lora_rank else [queries]
        )
        up = model.kv_lora_rank * heads * (model.qk_nope_head_dim + model.v_head_dim)
        found = [*low, hidden * (model.kv_lora_rank + rotary), up]
    found.append(heads * model.value_head_dim * hidden)
    unit = hidden * (
        model.experts_per_token * model.expert_width if model.layer_is_moe(layer) else model.ffn_hidden_size
    )
    gates = [2 * unit] if model.layer_is_moe(layer) and model.gated else [unit] * (2 if model.gated else 1)
    return sum([*found, *gates][1::2])
