"""How wrong numbers relate to right ones, of which any two have some ratio."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from ..ledger.relations import Class, Relation
from ..ledger.summary import Summary

LARGEST_FACTOR = 8
"""Numerators and denominators up to which a ratio of two numbers is taken for what it looks like:
any two have some ratio."""


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
            return Relation(
                "doubled" if simple == 2 else "scaled",
                (f"{wrong!r}, which is {simple} of {right!r}"),
                distance,
                abs(right),
            )
    return Relation(
        "other values", (f"{wrong!r}, and should be {right!r} (off by {wrong - right:.6g})"), distance, abs(right)
    )


def related_norm(expected: Summary, found: Summary, explained: tuple[Class, str] | None) -> Relation:
    """How a wrong norm relates to the right one where all gradients are right; `explained` says what is counted
    otherwise, if that is known."""
    right, wrong = expected.sums[0], found.sums[0]
    number = related_number(expected, found)
    if not (math.isfinite(wrong) and right):
        return number
    square = (wrong / right) ** 2
    share = f"{abs(1 - square):.2%} of its square {'is missing' if square < 1 else 'too much'}"
    kind, words = explained or ("missing" if square < 1 else "scaled", share)
    return replace(number, kind=kind, words=f"{wrong!r} instead of {right!r}, though all gradients are right: {words}")
