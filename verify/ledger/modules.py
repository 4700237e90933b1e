"""What the proofs need of a `ModularPlan`: its reference, the names of its tensors, and where they are made.

The reference has every module on one device, uncut, a sample at a time, all in one process.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from ...core.layout.layout import Layout
from ...core.machine.variation import NO_VARIATION
from ...core.model.model import ModelSpec
from ...core.model.parameters import expert_biases, parameters
from ...core.plan.plan import ModularPlan, ModulePlan, Plan
from ...core.plan.sections import DataParallel, Recompute, ScheduleChoice
from ...core.schedule.action import Action
from .ledger import SCALAR, Key

AnyPlan = Plan | ModularPlan


def parts_of(plan: AnyPlan) -> tuple[Plan, ...]:
    """The plans that ranks train by."""
    return (plan,) if isinstance(plan, Plan) else plan.parts


def plan_of_rank(plan: AnyPlan, global_rank: int) -> Plan:
    """The plan that a rank trains by."""
    return plan if isinstance(plan, Plan) else plan.part_of(global_rank)


def own_key(plan: AnyPlan, key: Key) -> Key:
    """A tensor by its name in its own module."""
    if isinstance(plan, Plan) or key.phase == SCALAR:
        return key
    return key._replace(tensor=key.tensor.partition(".")[2])


def in_whole(part: Plan, action: Action) -> Action:
    """An action of a module's plan with the stages of the whole."""
    return replace(action, stage=action.stage + part.first_stage) if isinstance(part, ModulePlan) else action


def tensor_shapes(plan: AnyPlan) -> dict[str, tuple[int, ...]]:
    """Everything that training changes, in canonical order."""
    if isinstance(plan, Plan):
        return model_shapes(plan.model)
    return {name: shape for part in plan.parts for name, shape in part.named_shapes.items()}


def model_shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The same of one model."""
    return {each.name: each.shape for each in (*parameters(model), *expert_biases(model))}


def leaf_sizes(plan: AnyPlan) -> dict[str, object]:
    """The leaf sizes of a plan's sums, or of each module's."""
    return (
        asdict(plan.leaf_sizes)
        if isinstance(plan, Plan)
        else {part.name: asdict(part.leaf_sizes) for part in plan.parts}
    )


def uncut(plan: ModularPlan) -> ModularPlan:
    """The same problem with no module cut: a rank for each, one sample per microbatch, one after the other,
    every activation kept."""
    numbers = {module.name: number for number, module in enumerate(plan.modules)}
    return plan.replaced(
        lambda module: replace(
            module, first_rank=numbers[module.name], last_rank=numbers[module.name], layout=Layout()
        ),
        cluster=replace(plan.cluster, num_devices=len(numbers)),
        batch=replace(plan.batch, micro_size=1),
        runtime=replace(plan.runtime, tp_comm_overlap=None),
        schedule=ScheduleChoice("1F1B"),
        recompute=Recompute("none"),
        data_parallel=DataParallel(),
        variation=NO_VARIATION,
    )
