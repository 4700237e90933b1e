"""Changes of a plan as `--set` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.plan.plan import Plan, build_plan
from ...core.plan.toml import Given, read_values
from ...core.plan.write import toml_value

Changes = Mapping[str, Any]
"""Dotted key of a plan -> the value it is given."""


def changed(plan: Plan, changes: Changes) -> Plan:
    """The plan with other values. Raises `PlanError` when its rules forbid them."""
    values = read_values(plan.to_toml(), "plan")
    for dotted, value in changes.items():
        section, _, name = dotted.partition(".")
        values.setdefault(section, {})[name] = Given(value, f"--set {dotted}")
    return build_plan(values, "plan")


def settings(changes: Changes) -> list[str]:
    """The changes as texts for --set."""
    return [f"{key}={value if isinstance(value, str) else toml_value(value)}" for key, value in changes.items()]
