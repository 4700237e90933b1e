"""Products and sums of training, exact with bits that no layout changes, or fast. Knows no layer and no mesh."""

from __future__ import annotations

import torch

from ...core.plan.plan import Plan
from ..base.determinism import make_exact
from .base import Numerics, Scalar
from .contributions import Contribution
from .exact import ExactNumerics
from .fast import FastNumerics
from .owned_leaves import OwnedLeaves
from .product_choice import products_of
from .summands import Summands

__all__ = [
    "Contribution",
    "ExactNumerics",
    "FastNumerics",
    "Numerics",
    "OwnedLeaves",
    "Scalar",
    "Summands",
    "make_numerics",
]


def make_numerics(plan: Plan, device: torch.device | str = "cpu", *, global_rank: int = 0) -> Numerics:
    """`[numerics] mode` as operations of a rank on a device; products are made as the plan says, those of which it says
    nothing by the library (`product_choice` measures). Raises `PlanError` where exact ones are not to be had
    (`make_exact`, `kernel_products`)."""
    device, layout = torch.device(device), plan.layout
    if plan.numerics.mode == "fast":
        gradient_dtype = torch.bfloat16 if plan.precision.gradient_dtype == "bf16" else torch.float32
        return FastNumerics(device, gradient_dtype, compiles=bool(plan.runtime.compile))
    make_exact(device)
    return ExactNumerics(
        plan.leaf_sizes,
        device,
        cp=layout.cp,
        cp_rank=layout.coordinates(global_rank)["cp"],
        products=products_of(plan, device),
    )
