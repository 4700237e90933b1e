"""The formats that a plan is written in."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from ..base.errors import UnknownNameError
from ..plan.plan import Plan
from .exported import Exported

_WRITERS = {
    "megatron": ("megatron_write", "write"),
    "torchtitan": ("torchtitan_write", "write"),
    "csv": ("launchers", "write_csv"),
    "torchrun": ("launchers", "write_torchrun"),
    "slurm": ("launchers", "write_slurm"),
    "kubernetes": ("launchers", "write_kubernetes"),
}
"""Format -> the module and function that write it, loaded when they are asked for."""

FORMATS = tuple(_WRITERS)


def write_as(plan: Plan, to: str) -> Exported:
    """The plan in a format. Raises `UnknownNameError` for one that there is not, `PlanError` for a plan that it cannot
    hold at all."""
    if to not in _WRITERS:
        raise UnknownNameError("format", to, FORMATS)
    module, function = _WRITERS[to]
    writer: Callable[[Plan], Exported] = getattr(import_module(f".{module}", __package__), function)
    return writer(plan)
