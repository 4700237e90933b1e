"""MKL's reproducible mode, which exact numerics build on.

MKL, which does torch's matrix products on CPUs, reads `MKL_CBWR` once, when it is loaded. Without it the bits of a
product depend on the alignment of its operands in memory and on the number of threads; with it (measured in torch 2.13,
`5x48x96` with one and two threads: 61 different elements become none, at the same speed) they depend on shapes and
values alone. A value that the user has set stays.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACE = ":4096:8"
"""What cuBLAS, MKL's counterpart on GPUs, needs in the environment to repeat its bits (`determinism`): eight buffers of
4 MiB."""


def mkl_switch() -> str:
    """The value of `MKL_CBWR` for this CPU: strict reproducibility on AVX512 code where it has AVX512,
    otherwise on AVX2 code."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        flags = ""
    return "AVX512,STRICT" if " avx512f " in flags else "AVX2,STRICT"


if "torch" not in sys.modules:
    os.environ.setdefault("MKL_CBWR", mkl_switch())

_MKL_CBWR_AT_IMPORT = os.environ.get("MKL_CBWR", "")


def mkl_switch_is_set() -> bool:
    """True when MKL runs in strict mode in this process, so that exact numerics can promise their bits.

    False when torch was loaded before this package by a process without `MKL_CBWR`, or when the user chose a
    mode that is not strict. Ranks that `launch` starts always have it; a process that has not runs exact
    numerics in ranks, not in itself.
    """
    return _MKL_CBWR_AT_IMPORT.upper().endswith(",STRICT")
