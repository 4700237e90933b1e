"""The switches of CUDA's libraries that exact numerics set before the first product: one function, in one place.

Without them the same product may have other bits the next time, or next to others: cuBLAS takes its workspace from a
pool that streams share, rounds fp32 operands to tf32 where it may, and adds partial sums of bf16 in bf16; fused
attention adds gradients of keys in the order in which blocks come.
"""

from __future__ import annotations

import os

import torch

from ...core.base.errors import PlanError
from .mkl import WORKSPACE, WORKSPACE_VARIABLE

REPEATABLE = (WORKSPACE, ":16:8")
"""With these cuBLAS' bits repeat (cuBLAS, "Results Reproducibility")."""


def make_exact(device: torch.device) -> None:
    """Sets what exact numerics need of a CUDA device in this process; nothing for other devices. It is called before
    the first product, since cuBLAS reads its variable with the first handle.

    Raises `PlanError` where the user has asked for a workspace with which bits do not repeat.
    """
    if device.type != "cuda":
        return
    if (asked := os.environ.setdefault(WORKSPACE_VARIABLE, WORKSPACE)) not in REPEATABLE:
        raise PlanError(
            f"{WORKSPACE_VARIABLE}={asked}: with it cuBLAS does not repeat its bits, which exact numerics need. "
            f'Unset it, set it to {WORKSPACE}, or use numerics.mode="fast".'
        )
    products = torch.backends.cuda.matmul
    if hasattr(products, "fp32_precision"):
        products.fp32_precision = "ieee"
        torch.backends.cudnn.fp32_precision = "ieee"
    else:
        products.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_mem_efficient_sdp(False)  # its backward adds by atomics
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.use_deterministic_algorithms(True, warn_only=True)  # flash attention's backward, sums by index
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def switches() -> dict[str, str]:
    """The state of the switches in this process, in words for a record."""
    products = torch.backends.cuda.matmul
    has_precision = hasattr(products, "fp32_precision")
    return {
        "cublas_workspace": os.environ.get(WORKSPACE_VARIABLE, "not set"),
        "fp32_products": products.fp32_precision if has_precision else f"allow_tf32={products.allow_tf32}",
        "bf16_reductions": "reduced" if products.allow_bf16_reduced_precision_reduction else "fp32",
        "attention": ", ".join(
            name
            for name, is_on in (
                ("flash", torch.backends.cuda.flash_sdp_enabled()),
                ("memory-efficient", torch.backends.cuda.mem_efficient_sdp_enabled()),
                ("cudnn", torch.backends.cuda.cudnn_sdp_enabled()),
                ("math", torch.backends.cuda.math_sdp_enabled()),
            )
            if is_on
        ),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()).lower(),
    }
