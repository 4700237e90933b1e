"""`KERNELS`: all kernels, each with the floors that it stands on. Imports Triton."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import collectives, exact_multicast, fused_norm, multicast, products, variable
from .kernel import Floor, Kernel

FLOORS: tuple[Floor, ...] = ("interpreted", "PTX executed", "assembled", "model-checked")

BY_MULTICAST: tuple[Floor, ...] = ("PTX executed", "assembled", "model-checked")
NO_MULTICAST: Mapping[Floor, str] = {"interpreted": "Triton's interpreter runs no PTX, and Triton has no multicast"}


def _by_multicast(name: str, function: Any, *, exact: bool) -> Kernel:
    return Kernel(name, function, BY_MULTICAST, not_on=NO_MULTICAST, exact=exact, least_architecture=90)


KERNELS = (
    Kernel("all_gather", collectives.all_gather, FLOORS, exact=True),
    Kernel("reduce_scatter", collectives.reduce_scatter, FLOORS, exact=True),
    Kernel("all_reduce_one_shot", collectives.all_reduce_one_shot, FLOORS, exact=True),
    Kernel("all_reduce_two_shot", collectives.all_reduce_two_shot, FLOORS, exact=True),
    Kernel("gather_rows", variable.gather_rows, FLOORS, exact=True),
    Kernel("reduce_scatter_rows", variable.reduce_scatter_rows, FLOORS, exact=True),
    Kernel("add_norm_gather", fused_norm.add_norm_gather, FLOORS, exact=True),
    _by_multicast("all_gather_multicast", multicast.all_gather_multicast, exact=True),
    _by_multicast("all_reduce_multicast", multicast.all_reduce_multicast, exact=False),
    _by_multicast("reduce_scatter_multicast", multicast.reduce_scatter_multicast, exact=False),
    _by_multicast("exact_all_reduce_multicast", exact_multicast.exact_all_reduce_multicast, exact=True),
    _by_multicast("add_norm_gather_multicast", exact_multicast.add_norm_gather_multicast, exact=True),
    Kernel(
        "exact_product",
        products.exact_product,
        ("interpreted", "PTX executed", "assembled"),
        not_on={"model-checked": "It meets no peer"},
        num_warps=8,
        num_stages=4,
        exact=True,
        executed_architecture=80,
        executed_because="For sm_90 it multiplies by wgmma, which reads memory by descriptors: that is not modelled",
    ),
)


def kernel(name: str) -> Kernel:
    """The kernel of that name. Raises `KeyError`."""
    return {each.name: each for each in KERNELS}[name]
