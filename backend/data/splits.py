"""Where training data end and validation data begin."""

from __future__ import annotations

VALIDATION_FRACTION = 0.1
"""Of a text or token file, when nothing else is said."""

FEW_DOCUMENTS = 10
"""Fewer are not counted: tokens are."""


def bounds(shares: tuple[float, float, float], count: int) -> tuple[int, int]:
    """`(first, last)`: of `count` documents or tokens in their order those before `first` are for training, and those
    from there before `last` for validation. Megatron's rounding: running sums in floats, and of two nearest whole
    numbers the even one. 0.7 + 0.2 is below 0.9, so that 13 of 15 documents come before the tests, and not 14:

    >>> bounds((0.949, 0.05, 0.001), 100), bounds((0.7, 0.2, 0.1), 15)
    ((95, 100), (10, 13))
    """
    first, last = (round(end * float(count)) for end in (shares[0], shares[0] + shares[1]))
    return first, last
