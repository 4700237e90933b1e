"""Where training data end and validation data begin."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

VALIDATION_FRACTION = 0.1
"""Of a text or token file, when nothing else is said."""

FEW_DOCUMENTS = 10
"""Fewer are not counted: tokens are."""


def bounds(shares: Sequence[Fraction], count: int) -> tuple[int, int]:
    """`(first, last)`: of `count` documents or tokens in their order those before `first` are for training, and those
    from there before `last` for validation. Megatron's rounding: to the nearest whole number, of two to the even one.

    >>> bounds([Fraction(949, 1000), Fraction(50, 1000), Fraction(1, 1000)], 100)
    (95, 100)
    """
    ends = [float(sum(shares[:end])) for end in (1, 2)]
    first, last = (round(end * float(count)) for end in ends)
    return first, last
