"""Triton here, and the floors on which this build's kernels stand."""

from __future__ import annotations

import importlib
import importlib.util

from .checks import Result
from .machine import Machine


def kernel_floors() -> dict[str, dict[str, str]]:
    """Kernel -> floor -> what holds on it here. Empty in a build without kernels."""
    return {}


def triton(machine: Machine) -> Result:
    """Triton can be loaded; the floors of kernels need it."""
    if importlib.util.find_spec("triton") is None:
        return Result("skipped", "Triton is not installed: pip install 'shardproof[gpu]'")
    return Result("ok", f"Triton {importlib.import_module('triton').__version__}")
