"""What a run uses that is not yet proved in use: said in its header, and refused where it is new and not allowed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...core.base.errors import PlanError
from ...core.plan.experimental import FEATURES
from ...core.plan.plan import AnyPlan
from ..watch.rank_messages import ON_GPUS, TransportName


@dataclass(frozen=True)
class Feature:
    """One of `core.plan.experimental.FEATURES`: whether a run uses it, and how far it has been seen to be right. One
    that `must_be_allowed` is newer than the section, so that no older plan has it."""

    is_used: Callable[[AnyPlan, TransportName], bool]
    seen: str
    must_be_allowed: bool = False


PRETENDED = "proved on pretended CUDA, not yet run on a device"

USED: Mapping[str, Feature] = {
    "fp16": Feature(lambda plan, _: plan.precision.dtype == "fp16", "proved on processors, not yet in a long run"),
    "nccl": Feature(lambda _, transport: transport == "nccl", PRETENDED),
    "kernels": Feature(lambda _, transport: transport == "kernels", PRETENDED),
    "cuda_graphs": Feature(
        lambda plan, transport: bool(plan.runtime.cuda_graphs) and transport in ON_GPUS,
        PRETENDED,
    ),
    "compile": Feature(
        lambda plan, transport: bool(plan.runtime.compile) and transport in ON_GPUS,
        "proved on processors, not yet run on a device",
    ),
    "registered": Feature(
        lambda plan, transport: bool(plan.communicators.registered) and transport in ON_GPUS,
        PRETENDED,
    ),
    "energy": Feature(
        lambda plan, transport: plan.log.energy and transport in ON_GPUS,
        "not yet run on a device; it only reads",
    ),
}
"""How the features are recognised. None of today's must be allowed: plans from before the section have them."""


def experimental_lines(
    plan: AnyPlan, transport: TransportName, features: Mapping[str, Feature] = USED
) -> tuple[str, ...]:
    """A sentence for everything of a run that is not yet proved in use. Raises `PlanError` for what is new and not
    allowed."""
    used = {name: feature for name, feature in features.items() if feature.is_used(plan, transport)}
    allowed = plan.experimental.allow
    if refused := [name for name, feature in used.items() if feature.must_be_allowed and name not in allowed]:
        raise PlanError(
            [
                f"{FEATURES[name]} is experimental ({used[name].seen}), and experimental.allow does not name it. Use "
                f"experimental.allow={_written(plan, name)}, or do without."
                for name in refused
            ]
        )
    return tuple(
        f"experimental: {FEATURES[name]}: {feature.seen}"
        if name in allowed
        else f"warning: experimental: {FEATURES[name]}: {feature.seen}. "
        f"With experimental.allow={_written(plan, name)} this is no warning."
        for name, feature in used.items()
    )


def _written(plan: AnyPlan, name: str) -> str:
    """What is allowed, and one name more, as a plan file has it."""
    return "[" + ", ".join(f'"{each}"' for each in (*plan.experimental.allow, name)) + "]"
