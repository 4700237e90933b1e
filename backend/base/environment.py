"""What the bits of a run depend on besides its plan: the kind of machine, the versions of the libraries,
the kernels they choose."""

from __future__ import annotations

import os
import platform

import numpy as np
import torch

from ...core.base.errors import PlanError
from .determinism import switches


def environment(device: torch.device) -> dict[str, str]:
    """By name, in words that are equal where the same kernels run."""
    found = {
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "mkl": os.environ.get("MKL_CBWR", "not set") if torch.backends.mkl.is_available() else "none",
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return {**found, **switches()} if device.type == "cuda" else found


def check_devices(needed: int) -> None:
    """Raises `PlanError` where this machine has fewer GPUs than ranks would take."""
    if (found := torch.cuda.device_count()) < needed:
        raise PlanError(
            f"{needed} CUDA devices are needed (nccl: one for each rank), and torch finds {found}. Compute on the "
            "processor (transport shm), or use fewer ranks."
        )
