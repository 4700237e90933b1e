"""Plan in, predicted timeline, memory and cost out. Never imports torch."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Fit": "fit",
    "SearchResult": "search",
    "Simulation": "simulate",
    "fit": "fit",
    "run_schedule": "engine",
    "search": "search",
    "simulate": "simulate",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
