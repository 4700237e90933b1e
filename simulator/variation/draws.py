"""Random slow-downs: the largest of several equal draws at the cost of one, and rare long pauses.

Devices of a tensor- and context-parallel group wait for each other, so an action of the group takes as long as on its
slowest device. The largest of n draws from a distribution F has the distribution F^n: it is F's quantile at u^(1/n) for
a uniform u. All draws have mean 1.
"""

from __future__ import annotations

import math

import numpy as np

_CENTRAL = (
    (
        3.3871328727963666080e0,
        1.3314166789178437745e2,
        1.9715909503065514427e3,
        1.3731693765509461125e4,
        4.5921953931549871457e4,
        6.7265770927008700853e4,
        3.3430575583588128105e4,
        2.5090809287301226727e3,
    ),
    (
        1.0,
        4.2313330701600911252e1,
        6.8718700749205790830e2,
        5.3941960214247511077e3,
        2.1213794301586595867e4,
        3.9307895800092710610e4,
        2.8729085735721942674e4,
        5.2264952788528545610e3,
    ),
)
_MIDDLE = (
    (
        1.42343711074968357734e0,
        4.63033784615654529590e0,
        5.76949722146069140550e0,
        3.64784832476320460504e0,
        1.27045825245236838258e0,
        2.41780725177450611770e-1,
        2.27238449892691845833e-2,
        7.74545014278341407640e-4,
    ),
    (
        1.0,
        2.05319162663775882187e0,
        1.67638483018380384940e0,
        6.89767334985100004550e-1,
        1.48103976427480074590e-1,
        1.51986665636164571966e-2,
        5.47593808499534494600e-4,
        1.05075007164441684324e-9,
    ),
)
_FAR = (
    (
        6.65790464350110377720e0,
        5.46378491116411436990e0,
        1.78482653991729133580e0,
        2.96560571828504891230e-1,
        2.65321895265761230930e-2,
        1.24266094738807843860e-3,
        2.71155556874348757815e-5,
        2.01033439929228813265e-7,
    ),
    (
        1.0,
        5.99832206555887937690e-1,
        1.36929880922735805310e-1,
        1.48753612908506148525e-2,
        7.86869131145613259100e-4,
        1.84631831751005468180e-5,
        1.42151175831644588870e-7,
        2.04426310338993978564e-15,
    ),
)
"""Coefficients of numerator and denominator, lowest power first (Wichura 1988, algorithm AS 241, PPND16), as in
Python's `statistics`."""


def upper_quantile(tail: np.ndarray) -> np.ndarray:
    """The standard normal number that is exceeded with probability `tail`, to about 16 digits
    (Wichura 1988, AS 241)."""
    q = 0.5 - tail
    found = np.empty_like(q)
    near = np.abs(q) <= 0.425
    found[near] = q[near] * _ratio(_CENTRAL, 0.180625 - q[near] ** 2)
    far = ~near
    r = np.sqrt(-np.log(np.minimum(tail[far], 1 - tail[far])))
    size = np.where(r <= 5, _ratio(_MIDDLE, r - 1.6), _ratio(_FAR, r - 5))
    found[far] = np.copysign(size, q[far])
    return found


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], r: np.ndarray) -> np.ndarray:
    top, bottom = (np.polynomial.polynomial.polyval(r, part) for part in coefficients)
    return top / bottom


def slowest(
    rng: np.random.Generator, shape: tuple[int, ...], *, spread: float, distribution: str, devices: int
) -> np.ndarray:
    """The largest of `devices` draws of mean 1 and relative standard deviation `spread`, in an array of `shape`.

    A normal draw is cut off at 0, which lifts its mean by less than 1% for spreads up to 0.5.
    """
    if not spread:
        return np.ones(shape)
    if distribution == "pareto":
        exponent = pareto_exponent(spread)
        return (exponent - 1) / exponent * _tail(rng, shape, devices) ** (-1 / exponent)
    normal = rng.standard_normal(shape) if devices == 1 else upper_quantile(_tail(rng, shape, devices))
    if distribution == "normal":
        return np.maximum(0.0, 1 + spread * normal)
    variance = math.log1p(spread**2)
    return np.exp(math.sqrt(variance) * normal - variance / 2)


def pareto_exponent(spread: float) -> float:
    """The exponent a of a Pareto distribution with that relative standard deviation: spread^2 = 1 / (a (a - 2)).

    >>> round(pareto_exponent(0.5) * (pareto_exponent(0.5) - 2), 12)
    4.0
    """
    return 1 + math.sqrt(1 + 1 / spread**2)


def _tail(rng: np.random.Generator, shape: tuple[int, ...], devices: int) -> np.ndarray:
    """1 - u^(1/n), the probability that a draw exceeds the largest of n."""
    return np.maximum(-np.expm1(-rng.standard_exponential(shape) / devices), np.finfo(float).tiny)


def add_pauses(
    rng: np.random.Generator, duration_s: np.ndarray, *, per_s: float, least_s: float, exponent: float, devices: int
) -> None:
    """Adds pauses to actions of shape [actions, columns], in place: on each of `devices` devices they come `per_s`
    times a second while an action runs (Poisson), each lasting `least_s` or longer (Pareto)."""
    ends = np.cumsum(duration_s.ravel())
    if not len(ends):
        return
    number = int(rng.poisson(per_s * devices * ends[-1]))
    at = np.searchsorted(ends, rng.random(number) * ends[-1], side="right").clip(max=len(ends) - 1)
    lengths = least_s * (1 + rng.pareto(exponent, number))
    np.add.at(duration_s.reshape(-1), at, lengths)
