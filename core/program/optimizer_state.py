"""What an optimizer keeps of a stage, and what Muon computes for it: counts that the backend has and the simulator
prices."""

from __future__ import annotations

from collections.abc import Iterator

from ..layout.stage_parameters import stage_parameters
from ..model.matrices import matrix_shapes
from ..model.parameters import Parameter
from ..plan.optimizer import STATES
from ..plan.plan import Plan
from .holdings import Held, held_elements, local_elements

MOMENTS = len(STATES["adamw"])
"""Of an element, unless the plan has another optimizer."""


def moment_numbers(plan: Plan, stage: int) -> Held:
    """fp32 numbers that the optimizer keeps of a stage on tensor-parallel rank 0, before any ZeRO cut."""
    held, optimizer = held_elements(plan, stage), plan.optimizer
    if not optimizer.groups and optimizer.name != "muon":
        number = len(STATES[optimizer.name]) if optimizer.keeps_moments else 0
        return Held(number * held.dense, number * held.expert)
    found = [0, 0]
    for parameter in stage_parameters(plan.model, plan.stages[stage]):
        number = len(optimizer.update_of(parameter).states)
        found[parameter.expert] += number * local_elements(plan, parameter)
    return Held(*found)


def table_moments(plan: Plan) -> int:
    """fp32 numbers of each element of a table, which pads have too."""
    if plan.optimizer.name == "muon":
        return MOMENTS
    return len(STATES[plan.optimizer.name]) if plan.optimizer.keeps_moments else 0


def matrices_of(plan: Plan, stage: int) -> Iterator[tuple[Parameter, int, tuple[tuple[int, int], ...]]]:
    """The parameters of a stage that Muon makes orthogonal, which are trained: how many times each, once or for every
    expert, and the rows and columns of the matrices in one."""
    if plan.optimizer.name != "muon":
        return
    for parameter in stage_parameters(plan.model, plan.stages[stage]):
        update = plan.optimizer.update_of(parameter)
        if update.name == "muon" and not (update.group is not None and update.group.frozen):
            yield parameter, parameter.shape[0] if parameter.expert else 1, matrix_shapes(plan.model, parameter)
