"""What is counted in the text of a kernel's PTX: widths of accesses, operations that may become one, and products."""

from __future__ import annotations

import math
import re

_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared[\w.:]*\s+\[[^]]*\],\s*\[[^]]*\],\s*(0x[0-9a-f]+|\d+)")
_WARP_PRODUCT = re.compile(r"\bmma\.sync\.aligned\.m(\d+)n(\d+)k(\d+)\.")
_GROUP_PRODUCT = re.compile(r"\bwgmma\.mma_async\.sync\.aligned\.m(\d+)n(\d+)k(\d+)\.")
_BLOCK_PRODUCT = re.compile(r"\btcgen05\.mma\.")
WARPS_OF_A_GROUP = 4
TERMS_OF_A_BLOCK_PRODUCT = 16
"""What tcgen05.mma adds over at a time, of operands of 16 bits (PTX ISA, "tcgen05.mma"); its rows and columns are in a
descriptor, and are those of the tile."""


def fused(ptx: str) -> int:
    """How many products and sums of fp32 are one operation, or are left to ptxas to make one."""
    found = re.findall(r"\b(?:fma\.rn|add|sub|mul)(?:\.ftz)?\.f32(x2)?\b", ptx)
    return sum(2 if pair else 1 for pair in found)


def vector_bytes(ptx: str) -> int:
    """The widest load of global memory; one of a 64-bit address is none."""
    return max(_widths("ld", ptx), default=0)


def copied_bytes(ptx: str) -> int:
    """The narrowest load of an operand: an asynchronous copy, or 16 bits by a thread; 0 where there is neither."""
    copies = [int(width, 0) for width in _COPY.findall(ptx)]
    return min([*copies, *(width for width in _widths("ld", ptx) if width == 2)], default=0)


def stored_bytes(ptx: str) -> int:
    """The narrowest store to global memory; 0 where there is none."""
    return min(_widths("st", ptx), default=0)


def _widths(name: str, ptx: str) -> list[int]:
    widths = []
    for opcode in re.findall(rf"\b{name}\.global[\w.:]*", ptx):
        *parts, element = opcode.split(".")
        count = next((int(part[1]) for part in parts if re.fullmatch(r"v\d", part)), 1)
        if (count, element) != (1, "b64"):
            widths.append(count * int(element[1:]) // 8)
    return widths


def multiplied(ptx: str, num_warps: int, tile: tuple[int, int, int]) -> int:
    """How many products of two numbers a block's tensor cores make, each instruction taken once."""
    by_warps = sum(math.prod(map(int, shape)) for shape in _WARP_PRODUCT.findall(ptx)) * num_warps
    by_groups = sum(math.prod(map(int, shape)) for shape in _GROUP_PRODUCT.findall(ptx)) * num_warps // WARPS_OF_A_GROUP
    m, n, _ = tile
    return by_warps + by_groups + len(_BLOCK_PRODUCT.findall(ptx)) * m * n * TERMS_OF_A_BLOCK_PRODUCT


def chained(ptx: str, num_threads: int) -> int:
    """How many products of two numbers a block's threads add to a sum in one operation of fp32, each taken once."""
    found = re.findall(r"\bfma\.rn\.f32(x2)?\b", ptx)
    return num_threads * sum(2 if pair else 1 for pair in found)
