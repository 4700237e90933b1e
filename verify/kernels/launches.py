"""Launches of every kernel as in training, by which it is compiled: on `WORLD` ranks, in multiples of 16 elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...backend.kernels.exact_products import ExactProducts, TileTable, tiles_for
from ...backend.kernels.kernel import Kernel
from ...core.base.reduction import merges_of

WORLD = 8
PACKED = 8
"""Elements of bf16 that 16 bytes hold: a thread has one such pack of a block."""

SIZE, LEAF = 512, 128
"""Rows, columns, terms and the terms of a leaf of products; each is more than a tile."""

TYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class LaunchOf:
    """A launch of a kernel; `form` says which, empty where a kernel has one."""

    kernel: Kernel
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    form: str = ""


def launches_of(kernel: Kernel, architecture: int) -> list[LaunchOf]:
    """The launches by which a kernel is compiled for GPUs of that compute capability (times ten)."""
    if kernel.name == "exact_product":
        tiles = tiles_for(architecture)
        return [_product(kernel, form, dtype, tiles) for dtype in TYPES for form in FORMS]
    names = kernel.function.arg_names
    arguments, constants = _arguments(), _constants(kernel)
    return [
        LaunchOf(
            kernel,
            {name: value for name, value in arguments.items() if name in names},
            {name: value for name, value in constants.items() if name in names},
        )
    ]


def _arguments() -> dict[str, Any]:
    """Of kernels that meet peers, by their names of them."""
    addresses = {"table": 1 << 40, "pads": 1 << 41, "multicast": 1 << 42}
    tensors = {name: torch.empty(16, dtype=torch.bfloat16) for name in ("out", "residual", "weight")}
    tables = {"tensors": torch.empty(16, dtype=torch.int64), "counts": torch.empty(16, dtype=torch.int32)}
    return {**addresses, **tensors, **tables, "n": 1 << 20, "rank": 3, "width": 4096, "hidden": 4096, "tokens": 100} | {
        "eps": 1e-5
    }


def _constants(kernel: Kernel) -> dict[str, Any]:
    """What is compiled in, for ranks of one leaf each."""
    import triton.language as tl

    return {
        "WORLD": WORLD,
        "BLOCK": kernel.num_warps * 32 * PACKED,
        "NODES": (1,) * WORLD,
        "MERGES": merges_of(WORLD, [(leaf, leaf + 1) for leaf in range(WORLD)]),
        "LEAF": tl.bfloat16,
        "UNITS_OF": (16, 4, 1),
    }


Empty = Callable[..., Tensor]
WHOLE = ((0, SIZE // LEAF),)
FORMS: Mapping[str, Callable[[ExactProducts, Empty], Tensor]] = {
    "project": lambda products, empty: products.project(empty(SIZE, SIZE), empty(SIZE, SIZE)),
    "contract": lambda products, empty: products.contract(empty(SIZE, SIZE), empty(SIZE, SIZE), LEAF, WHOLE),
    "weight_gradient": lambda products, empty: products.weight_gradient(
        empty(2, SIZE, SIZE), empty(2, SIZE, SIZE), LEAF, WHOLE
    ),
}


def _product(as_given: Kernel, form: str, dtype: torch.dtype, tiles: TileTable) -> LaunchOf:
    found: list[LaunchOf] = []

    def keep(
        kernel: Kernel,
        num_blocks: int,
        arguments: Mapping[str, Any],
        constants: Mapping[str, Any],
        reached: Sequence[Tensor] = (),
    ) -> None:
        changed = replace(as_given, num_warps=kernel.num_warps, num_stages=kernel.num_stages)
        found.append(LaunchOf(changed, arguments, constants, f"{form} {str(dtype).removeprefix('torch.')}"))

    FORMS[form](ExactProducts(keep, 1, tiles), lambda *shape: torch.empty(*shape, dtype=dtype))
    return found[0]
