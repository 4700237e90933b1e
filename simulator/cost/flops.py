"""FLOPs of one optimizer step, for utilisation figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from ...core.model.model import ModelSpec
from ...core.model.operators import Operator, head_operators, layer_operators, prediction_operators
from ...core.model.roles import Role
from ...core.plan.plan import Plan
from ...core.program import recomputed_runs, recomputes_all, repeated_roles
from ..stack.profiles import PROFILES
from ..stack.projections import second_weights


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
    heads = flops_per_token(model, head_operators(model)) * (1 + model.num_mtp_layers)
    projections = flops_per_token(model, prediction_operators(model)) * model.num_mtp_layers
    needed = 3.0 * tokens * (linear + core + heads + projections)
    return StepFlops(
        model=needed,
        model_causal=needed - 1.5 * tokens * core,
        hardware=needed + tokens * float(_recomputed_per_token(plan)),
    )


def flops_per_token(model: ModelSpec, operators: Iterable[Operator]) -> int:
    """Forward FLOPs of linear operators for one token: twice the matrix elements that the token meets, of experts those
    that it takes."""
    return sum(
        2 * operator.num_weights * (model.experts_per_token if operator.experts else 1) for operator in operators
    )


def layer_flops_per_token(model: ModelSpec, layer: int = 0) -> int:
    """Those of one layer."""
    return flops_per_token(model, layer_operators(model, layer))


def core_flops_per_token(model: ModelSpec, sequence: int) -> int:
    """Forward FLOPs of the scores of one token against a whole sequence, and of their product with the values."""
    return 2 * sequence * model.num_heads * (model.head_dim + model.value_head_dim)


def _layer_counts(model: ModelSpec) -> Iterator[tuple[int, int]]:
    """(a layer, how many that follow are like it), multi-token prediction included."""
    last = model.num_layers + model.num_mtp_layers
    for _, run in groupby(range(last), lambda layer: layer_operators(model, layer)):
        first, *others = run
        yield first, 1 + len(others)


def _recomputed_per_token(plan: Plan) -> int:
    """Forward FLOPs per token that the backward pass repeats."""
    model, sequence = plan.model, plan.batch.sequence
    core = core_flops_per_token(model, sequence)
    if plan.recompute.mode == "full":
        if recomputes_all(plan):
            return sum((layer_flops_per_token(model, layer) + core) * count for layer, count in _layer_counts(model))
        runs = [run for stage in plan.stages for run in recomputed_runs(plan, stage.first_layer, stage.last_layer)]
        return sum(layer_flops_per_token(model, layer) + core for lo, hi in runs for layer in range(lo, hi))
    repeated, layers = repeated_roles(plan), model.num_layers + model.num_mtp_layers
    total = layers * core if Role.CORE in repeated else 0
    every_second = plan.recompute.mode == "selective" and PROFILES[plan.runtime.profile].selective_operators
    for layer, count in _layer_counts(model):
        if every_second:
            total += count * 2 * second_weights(model, layer_operators(model, layer))
        else:
            again = (operator for operator in layer_operators(model, layer) if operator.role in repeated)
            total += count * flops_per_token(model, again)
    return total
