"""Plans of several small modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardproof import ModelSpec, ModularPlan
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.module import Module
from shardproof.core.plan.optimizer import Optimizer
from shardproof.core.plan.sections import Batch, Numerics, Precision, ScheduleChoice
from shardproof.core.plan.train import Train


def module(
    name: str, inputs: Sequence[str] = (), model: str | ModelSpec = "tiny-llama", **degrees: Any
) -> dict[str, Any]:
    """A module of as many layers as it has stages, for `modular`."""
    spec = model_preset(model) if isinstance(model, str) else model
    return {"name": name, "inputs": tuple(inputs), "model": spec, "layout": Layout(**degrees)}


def modular(
    *given: dict[str, Any],
    samples: int,
    schedule: str = "1F1B",
    dtype: str = "fp32",
    micro: int = 1,
    mode: str = "exact",
) -> ModularPlan:
    """Modules on ranks that follow each other. Clipping is active; sums have several leaves."""
    modules: list[Module] = []
    for each in given:
        first = modules[-1].last_rank + 1 if modules else 0
        model = replace(each["model"], num_layers=max(1, each["layout"].pp))
        modules.append(
            Module(**{**each, "model": model}, first_rank=first, last_rank=first + each["layout"].world_size - 1)
        )
    return ModularPlan(
        tuple(modules),
        cluster_preset("this-host", modules[-1].last_rank + 1),
        Batch(samples, micro, 24),
        precision=Precision(dtype),
        schedule=ScheduleChoice(schedule),
        numerics=Numerics(mode, gradient_token_block=6, reduction_token_block=3),
        optimizer=Optimizer(clip_grad_norm=0.1),
        train=Train(steps=2, learning_rate=1e-2),
    )
