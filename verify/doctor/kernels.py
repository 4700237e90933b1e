"""Triton here, and the floors on which the kernels stand."""

from __future__ import annotations

import importlib
import importlib.util

from ..kernels.floors import HOLDS, kernel_floors
from .checks import Result, Table
from .machine import Machine


def floors(machine: Machine) -> Result:
    """Every kernel on every floor that can be stood on here; the table has what holds."""
    found = kernel_floors()
    rows = [(kernel, floor, what) for kernel, of in found.items() for floor, what in of.items()]
    wrong = [": ".join(row) for row in rows if row[2] != HOLDS]
    table = Table("kernels", ("kernel", "floor", "result"), tuple(rows))
    return Result("failed" if wrong else "ok", "; ".join(wrong[:4]), len(found), "kernels", (table,))


def triton(machine: Machine) -> Result:
    """Triton can be loaded; the floors of kernels need it."""
    if importlib.util.find_spec("triton") is None:
        return Result("skipped", "Triton is not installed: pip install 'shardproof[gpu]'")
    return Result("ok", f"Triton {importlib.import_module('triton').__version__}")
