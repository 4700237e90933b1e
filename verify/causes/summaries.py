"""What summaries show beyond a distance: that ranks hold terms of a sum which was not taken, that all values are off by
one number, and that one bit of one element is another.

Signed sums are linear, so those of a sum of tensors are the sums of theirs, and those of a shift are a
multiple of those of ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...core.base.digest import Region, region_size
from ..ledger.compare import ranks_listed
from ..ledger.flips import flipped_bit
from ..ledger.ledger import Piece
from ..ledger.relations import Relation
from ..ledger.summary import Summary, summarize

LARGEST_LOG = 64
"""Numbers up to which a shift is named as their logarithm: that of a softmax which adds up something so often."""


def explained_by_summaries(
    relation: Relation, expected: Summary, found: Summary, of: Piece, copies: Sequence[Piece], tolerance: float
) -> Relation:
    """A relation of which only a distance was known, explained further; any other as it is. `of` says the
    place of both tensors, `copies` are what the ranks of the run hold of it, and values agree to
    `tolerance`, a share of their norm."""
    if relation.kind not in ("other values", "order only"):
        return relation
    relation = _missing_sum(expected, copies, relation, tolerance) or relation
    return _shifted(expected, found, of.shape, of.region, relation, tolerance) or relation


def with_flip(
    relation: Relation, expected: Summary, found: Summary, shape: Sequence[int], region: Region, dtype: str
) -> Relation:
    """A relation of which only a distance was known, or that the one bit of one element of a region is flipped;
    any other as it is. Only of runs that promise bits: rounding in `dtype`, the format of the tensor, may
    differ by one bit, too."""
    if relation.kind not in ("other values", "order only", "not finite"):
        return relation
    words = flipped_bit(expected, found, shape, region, dtype)
    return relation if words is None else replace(relation, kind="bit flip", words=words)


def _missing_sum(expected: Summary, copies: Sequence[Piece], relation: Relation, tolerance: float) -> Relation | None:
    """What ranks hold of one region, each otherwise, where together or on average it is right.
    None where it is not so."""
    terms = {each.digest: each for each in reversed(copies)}
    if len(terms) < 2:
        return None
    total = np.sum([each.summary.sums for each in terms.values()], axis=0)
    ranks = ranks_listed(sorted({each.global_rank for each in copies}))
    for parts, words in ((1, "add up to"), (len(terms), "are on average")):
        right = parts * np.asarray(expected.sums)
        if np.linalg.norm(total - right) <= tolerance * np.linalg.norm(right):
            how = "sum" if parts == 1 else "average"
            return Relation(
                "missing",
                f"what {ranks} hold is {len(terms)} different tensors that {words} the right values: their {how} was "
                "not taken",
                relation.distance,
                relation.norm,
            )
    return None


def _shifted(
    expected: Summary, found: Summary, shape: Sequence[int], region: Region, relation: Relation, tolerance: float
) -> Relation | None:
    """Values that are all off by the same number, which the sums of a tensor of ones show; None of others,
    and of numbers alone."""
    if region_size(region) < 2:
        return None
    ones = np.asarray(summarize(np.ones(region_size(region), dtype=np.float32), shape, region).sums)
    off = np.asarray(found.sums) - np.asarray(expected.sums)
    by = float(ones @ off / (ones @ ones)) if ones.any() else 0.0
    if not by or np.linalg.norm(off - by * ones) > 10 * tolerance * np.linalg.norm(off):
        return None
    times = math.exp(abs(by))
    named = (
        f", which is log({round(times)})"
        if 2 <= round(times) <= LARGEST_LOG and abs(times / round(times) - 1) < tolerance
        else ""
    )
    return replace(relation, words=f"the right values {'plus' if by > 0 else 'less'} {abs(by):.6g} everywhere{named}")
