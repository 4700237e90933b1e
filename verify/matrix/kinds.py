"""Kinds of features: what the values of an axis of the matrix have in common, for a sample in which
every pair of kinds meets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from .covering import Feature, Pair, Row
from .layouts import expected_cost, features
from .portions import smallest_cover

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "one stage a rank": ("1F1B", "GPipe"),
    "several stages a rank": ("Interleaved1F1B", "LoopedBFS"),
    "zero bubble": ("ZBH1", "ZBH2", "ZBAuto", "InterleavedZeroBubble"),
    "V": ("ZBVZeroBubble", "VHalf", "VMin"),
    "pairs": ("DualPipe", "DualPipeV", "Combined1F1B"),
}
"""The schedules of the catalog by what they do with stages and backward passes."""

DEGREES = ("pp", "tp", "dp", "cp", "ep")

KINDS: Mapping[str, Mapping[str, tuple[str | int, ...]]] = {
    "schedule": FAMILIES,
    "etp": {"as tp": ("tp",), "own": (1, 2, 3)},
    "micro": {"one": (1,), "several": (2, 3)},
    "recompute": {"none": ("none",), "selective": ("core", "parts", "inner"), "full": ("full", "first", "spread")},
    "offload": {"none": ("nothing",), "moments": ("a layer and half", "all"), "weights": ("half, with weights",)},
    "messages": {"overlapped": ("overlapped",), "in turn": ("together", "in order")},
    "zero": {"none": (0,), "optimizer": (1, 2), "weights": (3,)},
    "keys": {"keys": ("all_gather", "ring"), "heads": ("heads", "heads, ring")},
    "buckets": {"one": ("one",), "several": ("several", "overlapped")},
}
"""The kinds of the axes that have more values than kinds, but for degrees; of other axes every value is a kind."""

_KIND = {(axis, value): kind for axis, kinds in KINDS.items() for kind, values in kinds.items() for value in values}


def kind_of(feature: Feature) -> Feature:
    """The kind of a feature: a degree cuts or does not, other axes have those of `KINDS`.

    >>> kind_of(("tp", 3)), kind_of(("schedule", "VMin")), kind_of(("dtype", "bf16"))
    (('tp', 'cut'), ('schedule', 'V'), ('dtype', 'bf16'))
    """
    axis, value = feature
    if axis in DEGREES:
        return axis, "whole" if value == 1 else "cut"
    return axis, _KIND[feature] if axis in KINDS else value


def pairs_of_kinds(row: Row) -> frozenset[Pair]:
    """The pairs of kinds that a row shows."""
    return frozenset(combinations(map(kind_of, features(row)), 2))


def sample(rows: Sequence[Row]) -> list[Row]:
    """The few of some rows in which every pair of kinds meets that meets in any of them."""
    return smallest_cover(rows, pairs_of_kinds, expected_cost)
