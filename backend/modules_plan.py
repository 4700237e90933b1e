"""What the backend does not run of a plan of several modules. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable

from ..core.base.errors import PlanError
from ..core.plan.plan import ModularPlan, Plan


def unsupported_modules(plan: ModularPlan, of_one: Callable[[Plan], list[str]]) -> list[str]:
    """One sentence each. `of_one` says it of the plan of a module."""
    problems = [f'module "{part.name}": {problem}' for part in plan.parts for problem in of_one(part)]
    if plan.train.load is not None:
        problems.append(
            f"train.load={plan.train.load!r} is the folder of one model, and this plan has [[modules]]. Leave it out."
        )
    if any(module.layout.zero == 3 for module in plan.modules):
        problems.append("the backend does not run layout.zero=3 with [[modules]] yet. Use layout.zero=2.")
    if plan.data_parallel.library != "shardproof":
        problems.append(
            f'data_parallel.library={plan.data_parallel.library!r} is not tried with [[modules]]. Use "shardproof".'
        )
    if plan.runtime.trim_padding:
        problems.append(
            "the backend does not run runtime.trim_padding=true with [[modules]] yet, whose bridges carry whole "
            "sequences. Use false."
        )
    return list(dict.fromkeys(problems))


def only_model(plan: Plan | ModularPlan, option: str) -> Plan:
    """The plan, for an option that is about one model. Raises `PlanError` for a plan of several."""
    if isinstance(plan, ModularPlan):
        raise PlanError(
            f"{option} is about one model, and this plan has {len(plan.modules)} [[modules]]. Leave it out."
        )
    return plan
