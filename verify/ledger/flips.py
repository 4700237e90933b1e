"""Flipped bits: elements of which each differs from the right one in a single bit, found by values, or of one
element by two digests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...core.base.digest import Digest, Region, bit_words, element_index, keys_of, region_size
from .summary import Summary

FEW = 16
"""Of so many elements at most one may differ: what changes more of a tensor is no memory that lost a bit."""
FEW_AMBIGUOUS = 256
"""The same where the last place has changed, as by rounding, or the bits of small multiples, which hardly ever
happen to one in so many."""
MULTIPLES = {"fp32": {23, 24, 31}, "bf16": {7, 8, 15}, "fp16": {10, 11, 15}}
"""Bits of a format that make twice or four times a number of it, a half or a quarter, or change its sign."""
LAST_PLACE = {"fp32": 0, "bf16": 16, "fp16": 13}
"""The bit of an fp32 number that is the last one of a number of the format."""


def flipped_bits(expected: np.ndarray, found: np.ndarray, region: Region, dtype: str) -> str | None:
    """What is said of fp32 values of a region of which few differ, each in one bit of its format; None of all others.

    `dtype` is the format that the values were computed in: of numbers that have one in fewer bits its bits are
    counted, from 0, the last.
    """
    narrow = dtype if dtype != "fp32" and all(_are_in(values, dtype) for values in (expected, found)) else "fp32"
    words = _words_in(expected, narrow) ^ _words_in(found, narrow)
    hit = np.argwhere(words)
    flips = words[words != 0]
    if not len(flips) or (flips & (flips - 1)).any():
        return None
    bits = sorted({int(each).bit_length() - 1 for each in flips})
    # sums that were rounded to few bits often differ in one element's last place
    if 0 in bits and (len(flips) > 1 or narrow != "fp32"):
        return None
    if len(flips) * _least_elements(bits, narrow) > words.size:
        return None
    return _in_words(len(flips), bits, narrow, [int(at) + lo for at, (lo, _) in zip(hit[0], region, strict=True)])


def flipped_bit(expected: Summary, found: Summary, shape: Sequence[int], region: Region, dtype: str) -> str | None:
    """The same of two summaries of a region of a tensor, where one element differs: its key, which no other
    has, is in both digests."""
    off = np.abs(np.subtract(found.sums, expected.sums))
    # one element enters all sums in the same way
    if region_size(region) < FEW or np.ptp(off) > 1e-3 * off.max() + 1e-12 * expected.norm:
        return None
    at = _one_bit_apart(expected.digest, found.digest, shape, region)
    if (
        at is None
        or at[1] <= LAST_PLACE[dtype] - (dtype == "fp32")
        or region_size(region) < _least_elements([at[1]], "fp32")
    ):
        return None
    return _in_words(1, [at[1]], "fp32", [int(each) for each in np.unravel_index(at[0], tuple(shape))])


def _least_elements(bits: Sequence[int], dtype: str) -> int:
    """Of how many elements one may have flips of these bits."""
    return FEW_AMBIGUOUS if MULTIPLES[dtype].union({0}).intersection(bits) else FEW


def _one_bit_apart(expected: Digest, found: Digest, shape: Sequence[int], region: Region) -> tuple[int, int] | None:
    """Index in the whole tensor and bit of the one word by which two digests differ: its key times a power
    of two, in both lanes."""
    lanes = [(a - b) % 2**64 for a, b in zip(found, expected, strict=True)]
    bits = {(lane & -lane).bit_length() - 1 for lane in lanes}  # keys are odd
    bit = bits.pop()
    if bits or not 0 <= bit < 32:
        return None
    index = element_index(shape, region).reshape(-1)
    both = [key << np.uint64(bit) for key in keys_of(index)]
    for sign in (1, -1):
        wanted = [np.uint64(sign * lane % 2**64) for lane in lanes]
        if len(hit := np.flatnonzero((both[0] == wanted[0]) & (both[1] == wanted[1]))):
            return int(index[hit[0]]), bit
    return None


def _are_in(values: np.ndarray, dtype: str) -> bool:
    if dtype == "bf16":
        return not (bit_words(values) & np.uint32(0xFFFF)).any()
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))


def _words_in(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "fp16":
        return bit_words(values.astype(np.float16)).astype(np.uint32)
    return bit_words(values) >> np.uint32(16 if dtype == "bf16" else 0)


def _in_words(number: int, bits: Sequence[int], dtype: str, first: Sequence[int]) -> str:
    which = f"bit{'s' if len(bits) > 1 else ''} {', '.join(map(str, bits))} of {dtype}"
    if number == 1:
        return f"one bit of 1 element flipped ({which}, at {list(first)})"
    return f"one bit each of {number:,} elements flipped ({which}, first at {list(first)})"
