"""FLOPs of one optimizer step, for utilisation figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from itertools import groupby

from ...core.layout.stages import StageLayers
from ...core.model.attention_kinds import shorter_window
from ...core.model.blocks import Block, model_blocks, stage_blocks
from ...core.model.model import ModelSpec
from ...core.model.operators import Kind, Operator, layer_operators
from ...core.model.roles import Role
from ...core.plan.plan import AnyPlan, Plan
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


def step_flops(plan: AnyPlan) -> StepFlops:
    """Products only, a backward counted as two forwards; of experts those that a token takes. The sum over the modules
    of a plan.

    A layer with a window counts the keys that it holds, whatever the mask leaves of them.

    `model` generalises 72BLsh^2(1 + s/(6h) + V/(12hL)) of Korthikanti et al. 2022 (appendix A) to grouped heads, latent
    attention, gated MLPs, experts and multi-token prediction, and equals it where heads*head_dim = h, no grouping, ffn
    = 4h. `hardware` adds one forward of what is recomputed, attention counted in full.
    """
    parts = [astuple(_part_flops(part)) for part in plan.parts]
    return StepFlops(*map(sum, zip(*parts, strict=True)))


def _part_flops(plan: Plan) -> StepFlops:
    model, tokens = plan.model, plan.batch.global_size * plan.batch.sequence
    blocks = [block for stage in plan.stages for block in _held(model, stage)]
    counted = list(_counted(blocks))
    core, causal = (
        sum(
            core_flops_per_token(model, operators, plan.batch.sequence, causal=each) * count
            for operators, count in counted
        )
        for each in (False, True)
    )
    linear = sum(flops_per_token(model, operators) * count for operators, count in counted)
    return StepFlops(
        model=3.0 * tokens * (linear + core),
        model_causal=3.0 * tokens * (linear + causal),
        hardware=3.0 * tokens * (linear + core) + tokens * _recomputed_per_token(plan),
    )


def _held(model: ModelSpec, stage: StageLayers) -> tuple[Block, ...]:
    return stage_blocks(model, stage.layers, embedding=stage.embedding, head=stage.head)


def flops_per_token(model: ModelSpec, operators: Iterable[Operator]) -> int:
    """Forward FLOPs of linear operators for one token: twice the matrix elements that the token meets, of experts those
    that it takes."""
    return sum(
        2 * operator.num_weights * (model.experts_per_token if operator.experts else 1) for operator in operators
    )


def layer_flops_per_token(model: ModelSpec, layer: int = 0) -> int:
    """Those of one layer."""
    return flops_per_token(model, layer_operators(model, layer))


def core_flops_per_token(
    model: ModelSpec, operators: Iterable[Operator], sequence: int, *, causal: bool = False
) -> float:
    """Forward FLOPs of the scores of one token against a whole sequence, or as many keys as a layer's window has, and
    of their product with the values; 0 without attention. `causal` ones are those of the keys that a token sees in the
    mean over a sequence of s: s/2, and of a window of w w(1 - w/2s)."""
    width = 2 * model.num_heads * (model.head_dim + model.value_head_dim)
    keys = [shorter_window(each.window, sequence) or sequence for each in operators if each.kind is Kind.ATTEND]
    return sum(width * (number * (1 - number / (2 * sequence)) if causal else number) for number in keys)


def _counted(blocks: Iterable[Block]) -> Iterator[tuple[tuple[Operator, ...], int]]:
    """(operators, how many blocks in a row have them)."""
    for operators, run in groupby(blocks, lambda block: block.operators):
        yield operators, sum(1 for _ in run)


def _recomputed_per_token(plan: Plan) -> float:
    """Forward FLOPs per token that the backward pass repeats."""
    model = plan.model
    sequence = plan.batch.sequence
    layers = [block for block in model_blocks(model) if block.kind == "layer"]
    if plan.recompute.mode == "full":
        runs = [run for stage in plan.stages for run in recomputed_runs(plan, stage.first_layer, stage.last_layer)]
        again = layers if recomputes_all(plan) else [layers[i] for lo, hi in runs for i in range(lo, hi)]
        return sum(
            (flops_per_token(model, operators) + core_flops_per_token(model, operators, sequence)) * count
            for operators, count in _counted(again)
        )
    repeated = repeated_roles(plan)
    total = 0.0
    if Role.CORE in repeated:
        total += sum(core_flops_per_token(model, each.operators, sequence) for each in layers)
    every_second = plan.recompute.mode == "selective" and PROFILES[plan.runtime.profile].selective_operators
    for operators, count in _counted(layers):
        if every_second:
            total += count * 2 * second_weights(model, operators)
        else:
            total += count * flops_per_token(model, (each for each in operators if each.role in repeated))
    return total
