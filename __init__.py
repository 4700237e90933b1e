"""shardproof: plan it, prove it, run it. Public names load on first use; importing this package never imports torch."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Action": "core.action",
    "Kind": "core.action",
    "ClusterSpec": "core.cluster",
    "Finding": "core.findings",
    "Layout": "core.layout",
    "ModelSpec": "core.model",
    "Placement": "core.schedule",
    "Plan": "core.plan",
    "Schedule": "core.schedule",
    "ShardproofError": "core.errors",
    "Span": "core.timeline",
    "Timeline": "core.timeline",
    "build": "core.schedules",
    "lower": "core.schedules",
    "simulate": "simulator.simulate",
    "Simulation": "simulator.simulate",
    "search": "simulator.search",
    "fit": "simulator.fit",
    "run_schedule": "simulator.engine",
    "search_schedule": "core.schedules",
    "check": "verify.check",
    "Facts": "verify.facts",
    "draw": "viz.draw",
    "Trainer": "backend.trainer",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
