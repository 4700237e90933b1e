"""`KERNELS`: all kernels, each with the floors that it stands on. Imports Triton."""

from __future__ import annotations

from .collectives import all_gather, all_reduce_one_shot, reduce_scatter
from .kernel import Floor, Kernel

FLOORS: tuple[Floor, ...] = ("interpreted", "PTX executed", "assembled", "model-checked")

KERNELS = (
    Kernel("all_gather", all_gather, FLOORS, exact=True),
    Kernel("reduce_scatter", reduce_scatter, FLOORS, exact=True),
    Kernel("all_reduce_one_shot", all_reduce_one_shot, FLOORS, exact=True),
)


def kernel(name: str) -> Kernel:
    """The kernel of that name. Raises `KeyError`."""
    return {each.name: each for each in KERNELS}[name]
