"""`run_stage`: one step's gradients of a plan without pipeline, all ranks as threads, shards put together. `way`: a
bucket of a real S3 server, for one test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from helpers.plans import product_plan
from helpers.stage import spread_weights, tokens_of, whole_gradients
from helpers.stores import bucket
from shardproof.backend.base.microbatch import Microbatch
from shardproof.backend.gradients.gradients import finish_tied
from shardproof.backend.model.transformer import Stage
from shardproof.backend.numerics import make_numerics
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.parameters import TOKEN_TABLE
from shardproof.core.plan.plan import Plan


@dataclass(frozen=True)
class StepGradients:
    """`loss` is the sum over all tokens, `losses` [samples, s]; gradients are full tensors by parameter name."""

    loss: float
    losses: Tensor
    gradients: dict[str, Tensor]


def fp32_plan(model: ModelSpec, *, tp=1, dp=1, micro=1, samples=6, sequence=18, mode="exact", **numerics) -> Plan:
    """A plan that only this part of the product reads; blocks of 8 and 4 tokens, so that 18 tokens
    have short last blocks."""
    return product_plan(
        model=model,
        samples=samples,
        micro=micro,
        sequence=sequence,
        dtype="fp32",
        mode=mode,
        **{"gradient_token_block": 8, "reduction_token_block": 4, **numerics},
        tp=tp,
        dp=dp,
    )


def stage_rank(transport, plan: Plan):
    """Forward and backward of this rank's microbatches and the data-parallel reduction."""
    here = plan.layout.coordinates(transport.global_rank)
    groups = {
        axis: transport.group(f"{axis}-{here[other]}", axis, plan.layout.group_of(transport.global_rank, axis))
        for axis, other in (("tp", "dp"), ("dp", "tp"))
    }
    numerics = make_numerics(plan)
    stage = Stage(plan, plan.stages[0], tp=groups["tp"], numerics=numerics, recorder=transport.recorder)
    stage.load(spread_weights(plan.model))
    tokens, targets = tokens_of(plan)
    lo, hi = plan.samples_of(here["dp"])
    losses = []
    for index, first in enumerate(range(lo, hi, plan.batch.micro_size)):
        rows = slice(first, first + plan.batch.micro_size)
        output = stage(Microbatch(index, first, tokens[rows], targets[rows]), None)
        torch.autograd.backward(output, torch.ones_like(output))
        losses.append(output.detach())
    gradients = stage.gradients.reduce(groups["dp"], plan.samples_of)
    if plan.model.tied_embeddings:
        gradients[TOKEN_TABLE] = finish_tied(
            gradients.pop(f"{TOKEN_TABLE}@embedding"), gradients.pop(f"{TOKEN_TABLE}@output")
        )
    slices = {name: stage.shards[name].slices for name in gradients}
    return float(numerics.sum(losses).over(groups["dp"])), torch.cat(losses), gradients, slices


def assemble(plan: Plan, results) -> StepGradients:
    """Full gradients from all ranks; replicas of one slice must be equal to the bit."""
    full = whole_gradients(plan.model, [(gradients, slices) for _, _, gradients, slices in results])
    first_of_tp = [plan.layout.global_rank(dp=dp) for dp in range(plan.layout.dp)]
    return StepGradients(results[0][0], torch.cat([results[rank][1] for rank in first_of_tp]), full)


@pytest.fixture(scope="session")
def run_stage() -> Callable[..., StepGradients]:
    """`run_stage(model, tp=..., dp=..., micro=..., samples=..., sequence=..., mode=...)`, each
    distinct call computed once."""
    cache: dict[tuple, StepGradients] = {}

    def run(model: ModelSpec, **choices) -> StepGradients:
        key = (model, *sorted(choices.items()))
        if key not in cache:
            plan = fp32_plan(model, **choices)
            world = MemoryWorld(plan.layout.world_size, timeout_s=60)
            cache[key] = assemble(plan, run_threads(world, stage_rank, plan))
        return cache[key]

    return run


@pytest.fixture(scope="session")
def step_inputs():
    """`step_inputs(model, ...)`: the full weights, tokens and targets that `run_stage` with these arguments uses."""

    def inputs(model: ModelSpec, **choices) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        return spread_weights(model), *tokens_of(fp32_plan(model, **choices))

    return inputs


@pytest.fixture
def way(monkeypatch):
    """A way to a server with a bucket `bucket`, which breaks when it is asked to."""
    pytest.importorskip("moto.server", reason="pip install 'shardproof[test]' brings the server")
    from shardproof.backend.base import urls

    monkeypatch.setattr(urls, "FIRST_PAUSE_S", 0.01)
    with bucket(monkeypatch.setenv) as way:
        yield way
