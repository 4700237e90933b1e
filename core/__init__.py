"""The nouns, schedules, plans and the command line. Imports no other room; public names load on first use, so
that `--help` loads none."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "Action": "schedule.action",
    "ClusterSpec": "machine.cluster",
    "Finding": "base.findings",
    "Kind": "schedule.action",
    "Layout": "layout.layout",
    "ModelSpec": "model.model",
    "ModularPlan": "plan.plan",
    "Placement": "schedule.placement",
    "Plan": "plan.plan",
    "Schedule": "schedule.schedule",
    "ShardproofError": "base.errors",
    "Span": "schedule.timeline",
    "Timeline": "schedule.timeline",
    "build": "schedule",
    "lower": "schedule",
    "read_config": "model.huggingface",
    "search_schedule": "schedule",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
