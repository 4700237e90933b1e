"""ALiBi: instead of positions, a penalty on scores that grows with the distance between query and key.

Press et al. 2022 (arXiv 2108.12409), section 3: head h adds -slope_h (i - j) to the score of query i and key j, behind
the factor of the scores. Slopes are a geometric sequence; for numbers of heads that are no power of two those of the
power below come first, then every second one of the power above (`get_slopes` of their published code).
"""

from __future__ import annotations

from functools import lru_cache

from .model import ModelSpec


@lru_cache(maxsize=256)
def alibi_slopes(model: ModelSpec) -> tuple[float, ...]:
    """The slope of every query head; none where the model's positions are others.

    Models that scale scores after the penalty is added have that factor in `alibi_multiplier`.
    """
    if model.position != "alibi":
        return ()
    return tuple(each * model.alibi_multiplier for each in geometric_slopes(model.num_heads))


def geometric_slopes(num_heads: int) -> tuple[float, ...]:
    """2^(-8k/n), k from 1 to n, for n heads.

    >>> geometric_slopes(2), geometric_slopes(3)
    ((0.0625, 0.00390625), (0.0625, 0.00390625, 0.25))
    """
    below = 1 << (num_heads.bit_length() - 1)
    slopes = tuple(2.0 ** (-8 * (head + 1) / below) for head in range(below))
    return slopes if below == num_heads else slopes + geometric_slopes(2 * below)[::2][: num_heads - below]
