"""Triton here, and the floors on which this build's kernels stand."""

from __future__ import annotations

import importlib
import importlib.util

from .checks import Result, Table
from .machine import Machine

HOLDS = "ok"
"""What `kernel_floors` says of a floor on which a kernel stands."""


def kernel_floors() -> dict[str, dict[str, str]]:
    """Kernel -> floor -> `HOLDS`, or what is wrong. Empty in a build without kernels."""
    return {}


def floors(machine: Machine) -> Result:
    """Every kernel on every floor that can be stood on here; the table has what holds."""
    found = kernel_floors()
    if not found:
        return Result("skipped", "no kernels in this build")
    rows = [(kernel, floor, what) for kernel, of in found.items() for floor, what in of.items()]
    wrong = [": ".join(row) for row in rows if row[2] != HOLDS]
    table = Table("kernels", ("kernel", "floor", "result"), tuple(rows))
    return Result("failed" if wrong else "ok", "; ".join(wrong[:4]), len(found), "kernels", (table,))


def triton(machine: Machine) -> Result:
    """Triton can be loaded; the floors of kernels need it."""
    if importlib.util.find_spec("triton") is None:
        return Result("skipped", "Triton is not installed: pip install 'shardproof[gpu]'")
    return Result("ok", f"Triton {importlib.import_module('triton').__version__}")
