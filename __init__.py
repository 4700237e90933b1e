"""shardproof: plan it, prove it, run it. Public names load on first use; importing this package never imports torch."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_ROOMS = {
    "core": (
        "Action",
        "ClusterSpec",
        "Finding",
        "Kind",
        "Layout",
        "ModelSpec",
        "ModularPlan",
        "Placement",
        "Plan",
        "Schedule",
        "ShardproofError",
        "Span",
        "Timeline",
        "build",
        "lower",
        "read_config",
        "search_schedule",
    ),
    "simulator": (
        "Simulation",
        "fit",
        "run_schedule",
        "search",
        "simulate",
    ),
    "verify": (
        "Facts",
        "Recorder",
        "assert_bitwise",
        "assert_fits",
        "assert_schedule",
        "check",
        "prove",
    ),
    "viz": ("draw",),
    "backend": ("Trainer",),
}
"""Room -> the names that users reach from here and from there; each room knows its modules."""

_HOMES = {name: room for room, names in _ROOMS.items() for name in names}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
