"""Proves schedules and plans: by rules, by symbols, by the bits of real runs. Only the folders
that say so run the backend.

`check` is bound here, after its module has been loaded: it is also the name of the module, and what is bound last
stays. What only some use loads on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from .schedule.check import check
from .schedule.facts import Facts

_MODULES = {
    "Recorder": "foreign",
    "assert_bitwise": "assertions",
    "assert_fits": "assertions",
    "assert_schedule": "assertions",
    "prove": "dynamic",
}

__all__ = ["Facts", "Recorder", "assert_bitwise", "assert_fits", "assert_schedule", "check", "prove"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
