"""The divisors of a number, for searches and for errors that name degrees which work."""

from __future__ import annotations

import math


def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]
