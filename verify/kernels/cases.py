"""Cases of every kernel, for each floor that runs kernels on processes: interpreted, PTX executed, on a device.

A case calls its kernel several times, one call right after the other without waiting for peers on the host. Every rank
knows what all have shared, because numbers come from seeds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .case import DTYPES, Case
from .processes import Peer
from .products_story import sizes_of
from .stories import STORIES

OF_ROWS = ("gather_rows", "reduce_scatter_rows", "add_norm_gather", "add_norm_gather_multicast")
SUMS = (
    *("reduce_scatter", "all_reduce_one_shot", "all_reduce_two_shot", "reduce_scatter_rows", "add_norm_gather"),
    *("exact_all_reduce_multicast", "add_norm_gather_multicast"),
)
WHOLE_UNITS = ("add_norm_gather_multicast",)
"""Kernels whose rows are multiples of 16 bytes, which eight elements are."""

PRODUCTS = ("exact_product",)
"""Kernels that meet no peer: one rank runs their cases."""

OF_PRODUCTS = ((1, 1, 1, 1), (16, 1, 16, 1), (7, 48, 48, 3), (70, 67, 33, 2), (64, 64, 256, 8))
"""Rows, columns, k and leaves."""


@dataclass(frozen=True)
class Outcome:
    """What one rank saw of a case: bits of its results that are wrong, values left in its pad."""

    wrong_bits: int
    signals_left: int

    @property
    def right(self) -> bool:
        """No bit is wrong and no signal is left."""
        return self == Outcome(0, 0)


def run_case(peer: Peer, case: Case) -> Outcome:
    """The job of a case, in a peer."""
    wrong = 0
    for call in range(case.calls):
        if peer.memory.rank == case.slow_rank:
            time.sleep(0.02)
        wrong += STORIES[case.kernel](peer, case, call)
    return Outcome(wrong, int(peer.memory.own_pad.count_nonzero()))


def few_cases(
    kernel: str, world_size: int, *, block: int = 64, num_blocks: int = 2, compiled: bool = False
) -> tuple[Case, ...]:
    """The cases that find most: a size with a remainder in more than one block, in both types, several nodes a rank,
    a slow rank. Where kernels run as `compiled`, the order inside a leaf of fp32 is known, and is a case."""
    if kernel in PRODUCTS:
        return tuple(_of_products(kernel, block, num_blocks, compiled))
    n, width = _odd_size(kernel, block, num_blocks)
    shape: dict[str, Any] = {"n": n, "width": width, "block": block, "num_blocks": num_blocks}
    found = [Case(kernel, world_size, dtype, **shape) for dtype in DTYPES]
    if kernel in SUMS:
        found.append(Case(kernel, world_size, "bf16", leaves=2 * world_size + 1, **shape))
    return (*found, Case(kernel, world_size, "bf16", slow_rank=world_size - 1, calls=4, **shape))


def _of_products(kernel: str, block: int, num_blocks: int, compiled: bool) -> Iterator[Case]:
    for dtype, of in DTYPES.items():
        for any_numbers in (False, True) if compiled and dtype == "fp32" else (False,):
            for sizes in sizes_of(of, block):
                yield Case(
                    kernel, 1, dtype, block=block, num_blocks=num_blocks, calls=1, any_numbers=any_numbers, **sizes
                )


def _odd_size(kernel: str, block: int, num_blocks: int) -> tuple[int, int]:
    if kernel not in OF_ROWS:
        return num_blocks * block + 3, 1
    return 2 * num_blocks + 1, block + (8 if kernel in WHOLE_UNITS else 5)


def all_cases(
    kernel: str, world_size: int, *, block: int = 64, num_blocks: int = 2, compiled: bool = False
) -> Iterator[Case]:
    """Every size about the edges of blocks and of 16 bytes, in both types, with one leaf a rank and with more."""
    yield from few_cases(kernel, world_size, block=block, num_blocks=num_blocks, compiled=compiled)
    if kernel in PRODUCTS:
        few = list(_of_products(kernel, block, num_blocks, compiled))
        for n, width, k, leaves in OF_PRODUCTS:
            yield from dict.fromkeys(replace(case, n=n, width=width, k=k, leaves=leaves) for case in few)
        return
    edge = block * num_blocks
    shapes = (
        [(n, 1) for n in (1, 7, 8, 16, block - 1, block, block + 1, edge, edge + 8, 2 * edge + 3)]
        if kernel not in OF_ROWS
        else [
            (n, width)
            for n in (1, 2, 3, 2 * num_blocks + 1)
            for width in (1, 3, 16, block - 1, block, 2 * block + 8)
            if width % 8 == 0 or kernel not in WHOLE_UNITS
        ]
    )
    for n, width in shapes:
        for dtype in DTYPES:
            for leaves in (0, 1, 2 * world_size + 1) if kernel in SUMS else (0,):
                yield Case(kernel, world_size, dtype, n, width, leaves, block, num_blocks)
