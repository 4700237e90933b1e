"""`KERNELS`: all kernels, each with the floors that it stands on. Imports Triton."""

from __future__ import annotations

from . import collectives, fused_norm, variable
from .kernel import Floor, Kernel

FLOORS: tuple[Floor, ...] = ("interpreted", "PTX executed", "assembled", "model-checked")

KERNELS = (
    Kernel("all_gather", collectives.all_gather, FLOORS, exact=True),
    Kernel("reduce_scatter", collectives.reduce_scatter, FLOORS, exact=True),
    Kernel("all_reduce_one_shot", collectives.all_reduce_one_shot, FLOORS, exact=True),
    Kernel("all_reduce_two_shot", collectives.all_reduce_two_shot, FLOORS, exact=True),
    Kernel("gather_rows", variable.gather_rows, FLOORS, exact=True),
    Kernel("reduce_scatter_rows", variable.reduce_scatter_rows, FLOORS, exact=True),
    Kernel("add_norm_gather", fused_norm.add_norm_gather, FLOORS, exact=True),
)


def kernel(name: str) -> Kernel:
    """The kernel of that name. Raises `KeyError`."""
    return {each.name: each for each in KERNELS}[name]
