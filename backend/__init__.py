"""Real training on real processes: the same schedule object that is simulated, drawn and proved. Imports core alone.

Importing this package sets `MKL_CBWR` when torch is not loaded yet (`base.mkl`).
"""

from __future__ import annotations

import importlib
from typing import Any

from .base import mkl as mkl


def __getattr__(name: str) -> Any:
    if name != "Trainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(".trainer", __name__).Trainer  # loads torch, after `mkl` has set its switch
