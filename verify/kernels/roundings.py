"""Floating-point arithmetic on arrays, each operation rounded once, to nearest even: fp32, bf16 and fp16.

bf16 and fp16 are held as their bits (uint16). What is not a number becomes the one that a GPU makes, so that two
results are equal where their bits are: 0x7fffffff in fp32, 0x7fff in the others (PTX ISA). Overflows and invalid
operations raise warnings of numpy, which callers silence.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...backend.kernels.bf16_bits import narrowed, widened

Array = np.ndarray
QUIET_NAN = np.uint32(0x7FFFFFFF)


def canonical_nan(values: Array) -> Array:
    """float32 `values` with the NaN of a GPU for each NaN."""
    is_nan = np.isnan(values)
    return np.where(is_nan, QUIET_NAN.view(np.float32), values) if is_nan.any() else values


def half_widened(bits: Array) -> Array:
    """The float32 values of fp16 `bits` (uint16)."""
    return bits.view(np.float16).astype(np.float32)


def half_narrowed(values: Array) -> Array:
    """The fp16 bits (uint16) of float32 or float64 `values`."""
    bits = values.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), bits)


def sum_to_odd(a: Array, b: Array) -> Array:
    """a + b in float64 rounded to odd: where the sum is not exact, of its two neighbours the one whose last bit is 1.

    Rounded again to nearest in a type of at most 51 bits it is the exact sum rounded once (S. Boldo, G. Melquiond,
    "Emulation of a FMA and correctly rounded sums", IEEE Trans. Computers 57, 2008, theorem 3).
    """
    total = a + b
    of_b = total - a
    error = (a - (total - of_b)) + (b - of_b)
    is_even = (total.view(np.uint64) & np.uint64(1)) == 0
    moved = np.isfinite(error) & (error != 0) & is_even
    return np.where(moved, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)


def single_to_odd(values: Array) -> Array:
    """float64 `values` as float32, rounded to odd."""
    nearest = values.astype(np.float32)
    bits = nearest.view(np.uint32)
    back = nearest.astype(np.float64)
    step = np.where(np.abs(back) > np.abs(values), np.uint32(0xFFFFFFFF), np.uint32(1))
    moved = (back != values) & ~np.isnan(values) & ((bits & np.uint32(1)) == 0)
    return np.where(moved, bits + step, bits).view(np.float32)


def fused(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float32 arrays, rounded once."""
    # a product of two numbers of 24 bits is exact in float64
    total = sum_to_odd(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))
    return canonical_nan(total.astype(np.float32))


def _rounded(total: Array, kind: str) -> Array:
    """The bits in bf16 or fp16 of float64 values that were rounded to odd."""
    return narrowed(single_to_odd(total)) if kind == "bf16" else half_narrowed(total)


def half_arithmetic(name: str, kind: str) -> Callable[..., Array]:
    """`add`, `sub`, `mul` or `fma` of bits in bf16 or fp16."""
    wide = widened if kind == "bf16" else half_widened

    def calculate(*operands: Array) -> Array:
        a, b, *rest = (wide(operand).astype(np.float64) for operand in operands)
        if name in ("add", "sub"):
            return _rounded(sum_to_odd(a, b if name == "add" else -b), kind)
        product = a * b  # exact in float64
        return _rounded(sum_to_odd(product, rest[0]) if rest else product, kind)

    return calculate


def on_pairs(calculate: Callable[..., Array]) -> Callable[..., Array]:
    """The same on two values of 16 bits in each uint32, the first in the lower half."""

    def both(*operands: Array) -> Array:
        low = calculate(*((operand & np.uint32(0xFFFF)).astype(np.uint16) for operand in operands))
        high = calculate(*((operand >> np.uint32(16)).astype(np.uint16) for operand in operands))
        return pair(high, low)

    return both


def pair(high: Array, low: Array) -> Array:
    """Two values of 16 bits in one uint32."""
    return (high.astype(np.uint32) << np.uint32(16)) | low.astype(np.uint32)
