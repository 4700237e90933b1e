"""Coefficients held at other values for the time of a prediction: of a device, of a software stack, of products.

Each function returns a pair: what reads the coefficient's value of today for a plan, and a context
in which it has another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ....core.plan.plan import Plan
from ....simulator.compute import compute
from ....simulator.cost import communication
from ....simulator.stack import profiles

Held = tuple[Callable[[Plan], float], Callable[[Plan, float], AbstractContextManager[Plan]]]


def device_field(name: str, dtype: str = "") -> Held:
    """A field of the plan's cluster, at most 1; with `dtype` the entry of `<name>_by_dtype`, where there is one."""

    def table(plan: Plan) -> dict[str, float]:
        return dict(getattr(plan.cluster, f"{name}_by_dtype")) if dtype else {}

    def today(plan: Plan) -> float:
        return float(table(plan).get(dtype, getattr(plan.cluster, name)))

    @contextmanager
    def held(plan: Plan, value: float) -> Iterator[Plan]:
        value = min(value, 1.0)
        changed = {f"{name}_by_dtype": {**table(plan), dtype: value}} if dtype else {name: value}
        yield dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, **changed))

    return today, held


def engine_share() -> Held:
    """What the plan's stack takes besides what is counted."""
    return (lambda plan: profiles.PROFILES[plan.runtime.profile].engine_share), _stack_field("engine_share")


def host_calls() -> Held:
    """Host time per kernel of the plan's stack."""
    return (lambda plan: profiles.PROFILES[plan.runtime.profile].host_calls), _stack_field("host_calls")


def _stack_field(name: str) -> Callable[[Plan, float], AbstractContextManager[Plan]]:
    """The stack's table entry is replaced for the time of the context, and what was resolved from it forgotten."""

    @contextmanager
    def held(plan: Plan, value: float) -> Iterator[Plan]:
        stacks, stack = profiles.PROFILES, plan.runtime.profile
        before = stacks[stack]
        assert isinstance(stacks, dict)
        try:
            changed: dict[str, Any] = {name: value}
            stacks[stack] = dataclasses.replace(before, **changed)
            profiles.forget()
            yield plan
        finally:
            stacks[stack] = before
            profiles.forget()

    return held


def aligned(index: int) -> Held:
    """The fitted share of products whose rows begin at multiples of 2 to the power `index` elements, 0 or 3."""

    @contextmanager
    def held(plan: Plan, value: float) -> Iterator[Plan]:
        before = compute.ALIGNED_SHARES
        ends = [before[0], before[3]]
        ends[index // 3] = min(value, 1.0)
        try:
            compute.ALIGNED_SHARES = compute.aligned_shares(*ends)
            communication.forget()
            yield plan
        finally:
            compute.ALIGNED_SHARES = before
            communication.forget()

    return (lambda plan: compute.ALIGNED_SHARES[index]), held
