"""The nouns, schedules, plans and the command line. Public names load on first use, so that `--help` loads none of them."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "Action": "action",
    "ClusterSpec": "cluster",
    "Finding": "findings",
    "Kind": "action",
    "Layout": "layout",
    "ModelSpec": "model",
    "ModularPlan": "plan",
    "Placement": "placement",
    "Plan": "plan",
    "Schedule": "schedule",
    "ShardproofError": "errors",
    "Span": "timeline",
    "Timeline": "timeline",
    "build": "schedules",
    "lower": "schedules",
    "read_config": "huggingface",
    "search_schedule": "schedules",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
