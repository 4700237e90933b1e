"""`replayed`: whether what is captured as CUDA graphs, a step or its layers, computes what it does operation by
operation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from ...backend.ranks.training_rank import TrainingRank
from ...backend.transport.process_group import ProcessGroupTransport
from ...core.plan.plan import Plan
from ..run.proof_run import one_device
from .checks import Result
from .machine import Machine
from .training import PLAN

STEPS = 4
SCOPES: tuple[Literal["step", "layer"], ...] = ("step", "layer")


@dataclass(frozen=True)
class Replayed:
    """How often each walk, or each kind of a layer's work, was captured, and what differs by even a bit from steps
    without graphs, in words."""

    captures: Mapping[str, int]
    different: tuple[str, ...]


@dataclass(frozen=True)
class _Steps:
    """Losses of training and held-out data, and the weights after the last step by name."""

    losses: list[float]
    weights: Mapping[str, torch.Tensor]
    captures: Mapping[str, int]


def graphs(machine: Machine) -> Result:
    """A rank alone with its steps as graphs, with its layers as graphs, and without: losses and weights to the bit."""
    plan, captures = one_device(Plan.from_toml(PLAN)), list[str]()
    for scope in SCOPES:
        graphed = replace(plan, runtime=replace(plan.runtime, cuda_graph_scope=scope))
        found = replayed(graphed, torch.device("cuda:0"))
        if found.different:
            few = ", ".join(found.different[:3])
            return Result("failed", f"graphs of a {scope} give other bits: {few}", len(found.different), "values")
        captures += [f"{name} captured {count} times" for name, count in found.captures.items()]
    return Result("ok", ", ".join(captures), 0, "values")


def replayed(plan: Plan, device: torch.device, steps: int = STEPS) -> Replayed:
    """Trains a plan of one rank with graphs and without on a GPU, from the same start, with held-out data between."""
    assert plan.layout.world_size == 1, "one rank on one GPU"
    eager, graphed = (_steps(_with(plan, graphs), device, steps) for graphs in (False, True))
    different = [
        f"loss {number}"
        for number, pair in enumerate(zip(*(each.losses for each in (eager, graphed)), strict=True))
        if len(set(pair)) > 1
    ]
    different += [name for name, weight in eager.weights.items() if not torch.equal(weight, graphed.weights[name])]
    return Replayed(graphed.captures, tuple(different))


def _with(plan: Plan, graphs: bool) -> Plan:
    """Every step of a plan must be given to the device as it says."""
    scope = plan.runtime.cuda_graph_scope if graphs else "step"
    runtime = replace(plan.runtime, cuda_graphs=graphs, cuda_graph_scope=scope, cuda_graph_warmup_steps=1)
    return replace(plan, runtime=runtime)


def _steps(plan: Plan, device: torch.device, steps: int) -> _Steps:
    store: Any = dist.HashStore()
    with ProcessGroupTransport(store, 0, 1, backend="nccl", device=device) as transport:
        rank = TrainingRank(transport, plan)
        losses = [loss for step in range(steps) for loss in (rank.step(step)[0].loss, rank.evaluate())]
        weights = {shard.parameter.name: shard.tensor.detach().cpu() for shard in rank.shards}
        captures = next((dict(each.captures) for each in (rank.graphs, rank.layer_graphs) if each is not None), {})
        return _Steps(losses, weights, captures)
