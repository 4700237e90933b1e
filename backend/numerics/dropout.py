"""Dropout masks and uniform noise by counter: what happens to element i is a function of (seed, operation, step, i), so
every layout drops the same elements.

Only 64-bit integer operations are used, which have the same bits on every device; a rank makes the mask of just the
elements it holds, and makes it again for the backward instead of keeping it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..base.draw_keys import DrawKeys, key_of

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_SHIFTS = (30, 27)
_BITS = 24
"""A probability is compared with so many random bits."""


def dropout_mask(seed: int, operation: str, step: int | DrawKeys, index: Tensor, probability: float) -> Tensor:
    """fp32 of the shape of `index`: 0 where an element is dropped, 1/(1-p) where it is kept.

    `index` is int64, the place of each element in the whole tensor of a step.
    """
    survives = _random_bits(seed, operation, step, index) >= round(probability * (1 << _BITS))
    return survives.to(torch.float32).mul_(1.0 / (1.0 - probability))


def uniform(seed: int, operation: str, step: int | DrawKeys, index: Tensor) -> Tensor:
    """fp32 of the shape of `index`, from 0 up to but without 1, in steps of 2^-24."""
    return _random_bits(seed, operation, step, index).to(torch.float32).mul_(2.0**-_BITS)


def _random_bits(seed: int, operation: str, step: int | DrawKeys, index: Tensor) -> Tensor:
    """`_BITS` random bits per element, as int64. A key is added to the index, and the finalizer of splitmix64 mixes the
    sum (Steele, Lea & Flood 2014, figure 17, variant 13 of Stafford)."""
    words = index.mul(_GOLDEN).add_(key_of(seed, operation, step))
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=True):
        words.bitwise_xor_(_shifted(words, shift)).mul_(multiplier)
    return _shifted(words.bitwise_xor_(_shifted(words, 31)), 64 - _BITS)


def _shifted(words: Tensor, shift: int) -> Tensor:
    """A logical shift to the right: the arithmetic one without the copies of the sign."""
    return (words >> shift).bitwise_and_((1 << (64 - shift)) - 1)
