"""`Summary`: what a ledger keeps of a tensor instead of its values. Summaries of pieces add up to that of the
whole, wherever it was cut.

Equal digests are equal bits. Where they differ, the rest says how, long after the values are gone. `value_digest` is a
digest without places: equal in two tensors that hold the same values in other places. `sums` are eight sums of all
elements with signs that their places draw: they are linear, so those of a multiple are that multiple, and the mean
square of the differences of two tensors' sums is, on average over signs, the squared distance of the tensors (Alon,
Matias & Szegedy 1996, The space complexity of approximating the frequency moments, section 2.2; with eight sums its
standard deviation is half of it). Signs are those of a place in one of eight groups times the group's in a row of
Hadamard's matrix, so that each element is added once, to its group (Charikar, Chen & Farach-Colton 2002, Finding
frequent items in data streams, section 3), and the groups at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ...core.base.digest import (
    EMPTY,
    GOLDEN,
    Digest,
    Region,
    add,
    bit_words,
    compiled,
    digest_plainly,
    element_index,
    full_region,
    mix,
    region_size,
    rows_of,
    runs_of,
)

NUM_SUMS = 8

_VALUE_SEED = np.uint64(0xA4093822299F31D0)
_VALUE_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SIGN_SEED = np.uint64(0xA458FEA3F4933D7E)
"""Sixteen digits of pi, chosen so that signs of equal numbers do not cancel in small tensors
(its test says in which)."""
_HADAMARD = np.array(
    [[1 - 2 * ((row & column).bit_count() % 2) for column in range(NUM_SUMS)] for row in range(NUM_SUMS)]
)


@dataclass(frozen=True, slots=True)
class Summary:
    """`digest` sees every bit and its place, `value_digest` every bit; `largest` is the largest magnitude
    (NaN if there is one)."""

    digest: Digest = EMPTY
    value_digest: int = 0
    largest: float = 0.0
    sums: tuple[float, ...] = (0.0,) * NUM_SUMS

    def distance(self, other: Summary) -> float:
        """About the Euclidean distance of two tensors of one shape: the root of the mean square that their sums differ
        by, and no less than their largest magnitudes differ by, which the distance is at least: signs may cancel, as
        those of a few equal numbers can."""
        root = math.sqrt(math.fsum((a - b) ** 2 for a, b in zip(self.sums, other.sums, strict=True)) / NUM_SUMS)
        return max(root, abs(self.largest - other.largest))

    @property
    def norm(self) -> float:
        """About the Euclidean norm."""
        return self.distance(Summary())


def summarize(values: np.ndarray, shape: Sequence[int] | None = None, region: Region | None = None) -> Summary:
    """The summary of fp32 `values`, which fill `region` of a tensor of `shape` (without them: the whole tensor).

    A matrix may lie in memory by columns, as transposed weights do; other strides cost a copy.
    """
    values = np.asarray(values, dtype=np.float32)
    shape = values.shape if shape is None else shape
    region = full_region(shape) if region is None else region
    size = region_size(region)
    assert values.size == size, f"{values.size} values do not fill a region of {size} elements"
    if compiled is None:
        return summarize_plainly(bit_words(values).reshape(-1), element_index(shape, region).reshape(-1))
    if values.ndim == 2 == len(shape) and values.flags.f_contiguous and not values.flags.c_contiguous:
        return Summary(*compiled.summarize(values.T, values.shape[1], rows_of(shape, region), True))
    starts, length = runs_of(shape, region)
    return Summary(*compiled.summarize(np.ascontiguousarray(values), length, starts, False))


def summarize_plainly(words: np.ndarray, index: np.ndarray) -> Summary:
    """The summary of fp32 words `[n]` that are the elements `index` (uint64) of their tensor, by numpy."""
    values = words.view(np.float32).astype(np.float64)
    eight, place = np.divmod(index, np.uint64(NUM_SUMS))
    # of eight elements in its lowest bits, and in its highest how far their places are turned
    signs = mix(eight * GOLDEN + _SIGN_SEED)
    signed = np.where(signs >> place & np.uint64(1), -values, values)
    group = (place + (signs >> np.uint64(61))) % np.uint64(NUM_SUMS)
    sums = _HADAMARD @ np.array([signed[group == each].sum() for each in range(NUM_SUMS)])
    mixed = (words.astype(np.uint64) + _VALUE_SEED) * _VALUE_FACTOR
    value_digest = int((mixed ^ (mixed >> np.uint64(32))).sum(dtype=np.uint64))
    return Summary(
        digest_plainly(words, index), value_digest, float(np.abs(values).max(initial=0.0)), tuple(sums.tolist())
    )


def add_summaries(summaries: Iterable[Summary]) -> Summary:
    """The summary of disjoint pieces together."""
    parts = list(summaries)
    return Summary(
        add(each.digest for each in parts),
        sum(each.value_digest for each in parts) % 2**64,
        float(np.max([each.largest for each in parts], initial=0.0)),
        tuple(math.fsum(column) for column in zip(*(each.sums for each in parts), strict=True)) or (0.0,) * NUM_SUMS,
    )
