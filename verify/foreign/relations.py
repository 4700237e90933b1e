"""How wrong tensors relate to right ones where ranks hold terms of a sum, and how wrong numbers do, from summaries alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from ..compare import ranks_listed
from ..digest import Region, region_size
from ..ledger import Piece
from ..relations import Relation
from ..summary import Summary, add_summaries, summarize

LARGEST_FACTOR = 8
"""Numerators and denominators up to which a ratio of two numbers is taken for what it looks like: any two have some ratio."""
LARGEST_LOG = 64
"""Numbers up to which a shift is named as their logarithm: that of a softmax which adds up something so often."""


def missing_sum(expected: Summary, copies: Sequence[Piece], relation: Relation, tolerance: float) -> Relation | None:
    """What ranks hold of one region, each otherwise, where together or on average it is right: they are terms whose sum was not taken.

    Signed sums are linear, so those of a sum of tensors are the sums of theirs. None where it is not so.
    """
    terms = {each.digest: each for each in reversed(copies)}
    if len(terms) < 2:
        return None
    total = add_summaries(each.summary for each in terms.values())
    ranks = ranks_listed(sorted({each.global_rank for each in copies}))
    for parts, words in ((1, "add up to"), (len(terms), "are on average")):
        right = Summary(sums=tuple(each * parts for each in expected.sums))
        if total.distance(right) <= tolerance * right.norm:
            how = "sum" if parts == 1 else "average"
            return Relation(
                "missing",
                f"what {ranks} hold is {len(terms)} different tensors that {words} the right values: their {how} was not taken",
                relation.distance,
                relation.norm,
            )
    return None


def shifted(
    expected: Summary, found: Summary, shape: Sequence[int], region: Region, relation: Relation, tolerance: float
) -> Relation | None:
    """Values that are all off by the same number, which the sums of a tensor of ones tell; None of others, and of numbers alone."""
    if region_size(region) < 2:
        return None
    ones = np.asarray(summarize(np.ones(region_size(region), dtype=np.float32), shape, region).sums)
    off = np.asarray(found.sums) - np.asarray(expected.sums)
    by = float(ones @ off / (ones @ ones))
    if not by or np.linalg.norm(off - by * ones) > 10 * tolerance * np.linalg.norm(off):
        return None
    times = math.exp(abs(by))
    named = f", which is log({round(times)})" if 2 <= round(times) <= LARGEST_LOG and abs(times / round(times) - 1) < tolerance else ""
    return replace(relation, words=f"the right values {'plus' if by > 0 else 'less'} {abs(by):.6g} everywhere{named}")


def related_number(expected: Summary, found: Summary) -> Relation:
    """How one number relates to another."""
    right, wrong = expected.sums[0], found.sums[0]
    distance = abs(wrong - right)
    if not math.isfinite(wrong):
        return Relation("not finite", "not a finite number", distance, abs(right))
    if right and not wrong:
        return Relation("missing", f"0, and should be {right!r}", distance, abs(right))
    if right:
        simple = Fraction(wrong / right).limit_denominator(LARGEST_FACTOR)
        if simple not in (0, 1) and simple.numerator <= LARGEST_FACTOR and abs(wrong / right / simple - 1) < 1e-5:
            return Relation("doubled" if simple == 2 else "scaled", f"{wrong!r}, which is {simple} of {right!r}", distance, abs(right))
    return Relation("other values", f"{wrong!r}, and should be {right!r} (off by {wrong - right:.6g})", distance, abs(right))


def related_norm(expected: Summary, found: Summary, told: str | None) -> Relation:
    """How a wrong norm relates to the right one where all gradients are right; `told` says what is counted otherwise, if that is known."""
    right, wrong = expected.sums[0], found.sums[0]
    number = related_number(expected, found)
    if not (math.isfinite(wrong) and right):
        return number
    square = (wrong / right) ** 2
    share = f"{abs(1 - square):.2%} of its square {'is missing' if square < 1 else 'too much'}"
    words = f"{wrong!r} instead of {right!r}, though all gradients are right: {told or share}"
    if square < 1:
        return replace(number, kind="missing", words=words)
    return replace(number, kind="doubled" if told and told.endswith("counted 2 times") else "scaled", words=words)
