"""`Sizes` of the checks of GPUs: those whose figures say something, and small ones that show that a check ends."""

from __future__ import annotations

from dataclasses import dataclass

from .machine import Machine

Shape = tuple[int, int, int]
"""Rows, columns and k."""


@dataclass(frozen=True)
class Sizes:
    """What the checks multiply, add up and repeat.

    `products` are made by the library, `exact_products` by our kernels in bf16 with each of `leaves`, and the first of
    `exact_fp32` in fp32; `exact_bits` is the product whose cuts are compared, its leaf `bits_leaf`, and `scale` divides
    what experts have. `buffers` are bytes of an all-reduce; A case of a kernel has
    `case_blocks` blocks of `case_block` elements, and `most_cases` of them are run.
    """

    products: tuple[Shape, ...] = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 1024, 8192))
    product_calls: int = 20
    exact_products: tuple[Shape, ...] = ((8192, 8192, 4096), (8192, 4096, 14336), (512, 8192, 4096))
    exact_fp32: Shape = (4096, 4096, 4096)
    leaves: tuple[int, ...] = (512, 1024, 4096)
    exact_calls: int = 10
    exact_bits: Shape = (333, 392, 4096)
    bits_leaf: int = 512
    token_leaf: int = 32
    scale: int = 1
    repeats: int = 20
    buffers: tuple[int, ...] = (4096, 1 << 16, 1 << 20, 1 << 24, 1 << 27)
    most_calls: int = 200
    case_block: int = 1024
    case_blocks: int = 4
    most_cases: int = 100
    checked: int = 50_000
    timed: int = 200
    replays: int = 300

    def calls(self, num_bytes: int) -> int:
        """Of an all-reduce that is timed."""
        return min(self.most_calls, max(5, (1 << 28) // num_bytes))


LARGE = Sizes()
"""A batch of tokens in layers of models of 8 and 70 billion parameters, and few tokens."""

SMALL = Sizes(
    products=((64, 64, 64),),
    product_calls=2,
    exact_products=((32, 64, 64),),
    exact_fp32=(32, 32, 32),
    leaves=(32,),
    exact_calls=1,
    exact_bits=(24, 24, 128),
    bits_leaf=16,
    token_leaf=4,
    scale=10,
    repeats=1,
    buffers=(4096,),
    most_calls=2,
    case_block=64,
    case_blocks=2,
    most_cases=1,
    checked=5,
    timed=2,
    replays=3,
)


def sizes_for(machine: Machine) -> Sizes:
    """Those that were asked for."""
    return SMALL if machine.is_small else LARGE
