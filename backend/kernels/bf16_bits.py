"""bf16 numbers as their bits, in uint16, which is what an interpreter has of them."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def widened(bits: Array) -> Array:
    """The float32 values of bf16 `bits` (uint16)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrowed(values: Array) -> Array:
    """The bf16 bits (uint16) of float32 `values`."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + half) >> np.uint32(16)).astype(np.uint16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, np.uint16(0x7FFF), rounded).reshape(np.shape(values))
