"""`compiled`: what is computed element by element and row by row in one pass, by torch's compiler. For fast numerics
(`runtime.compile`): the compiler adds in an order of its own.

A kernel is compiled when it is first called with a shape, in seconds, and kept in torch's cache on disk, which other
ranks and later runs read.
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ...core.base.errors import PlanError

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def check_compiler(device: torch.device) -> None:
    """Raises `PlanError` where kernels of the processor cannot be compiled."""
    names = (os.environ.get("CXX"), "g++", "clang++", "c++")
    if device.type == "cpu" and not any(name and shutil.which(name) for name in names):
        raise PlanError(
            "runtime.compile=true needs a C++ compiler, and none is found. Install g++, set CXX, or use "
            "runtime.compile=false."
        )


def compiled(kernel: Kernel) -> Kernel:
    """A function of tensors that the compiler makes one kernel of, outside of autograd."""

    @functools.cache
    def made() -> Any:
        # a rank is one of many processes, or threads: it starts none besides
        config: Any = importlib.import_module("torch._inductor.config")
        config.compile_threads = 1
        return torch.compile(kernel)

    @functools.wraps(kernel)
    def call(*given: Any) -> Any:
        with torch.no_grad():
            return made()(*given)

    return call  # type: ignore[return-value]
