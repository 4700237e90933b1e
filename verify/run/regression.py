"""Whether a class of tensors in fast numerics is exact numerics times a common factor: a regression, and how
far rounding can move it.

A bound of rounding is as wide as all roundings on a path together, so a gradient that is multiplied by 1.02 stays
inside it in bf16. But rounding has no common factor: what it adds to a tensor points elsewhere than the tensor. So fast
values are regressed on exact ones through the origin, b = <exact, fast> / <exact, exact>, pooled over the tensors of a
class: a parameter of all layers and steps, an activation or its gradient of all layers, steps and samples. A class
whose interval excludes 1 has been scaled.

How wide the interval is. Let tensor t be off by d_t, of relative length r_t = |d_t| / |exact_t|. Its coefficient is off
by a_t = <exact_t, d_t> / |exact_t|^2, and |a_t| <= r_t (Cauchy and Schwarz), however much the errors of its elements
depend on each other. They do: they come from a few roundings before, and a_t is a third of r_t in the middle, not one
over the root of the number of elements. So a tensor counts as one observation. Of several, weighted by 1 / r_t^2, the
mean is off by more than c / sqrt(sum 1 / r_t^2) with a chance of at most 2 exp(-c^2 / 2), if the a_t are independent
and zero on average (Hoeffding 1963, J. Am. Stat. Assoc. 58, theorem 2).

How long d_t is must not be taken from d_t itself, which has the factor in it that is looked for. It is the larger of
- what is left of the tensor after its own coefficient, over that coefficient (the tangent of the angle between fast and
  exact: a gradient that is nothing but rounding, such as that of a key's bias without rotary positions, has any angle
  and says nothing), together with how far its coefficient is from the median of its class: one token whose norm
  magnifies scales a whole tensor, but not all of them. What a few elements leave may be small by chance, so the median
  of the class counts as `COMMON` elements more (Smyth 2004, Stat. Appl. Genet. Mol. Biol. 3(1), section 3);
- for the gradient of a parameter, how far the coefficients of single samples' gradients of activations are from 1 in
  the same layer and step (the root of their mean square): a sum over samples, of which one may dominate, has their
  factors. They are regressed themselves.

Added to that are what all elements of a run may share, `ELEMENTWISE` roundings in fp32 (the mean over tokens, loss
scales, divisions by degrees), and the mean of r_t^2, by which errors in the exact values, themselves rounded, move a
regression (Fuller 1987, Measurement Error Models, section 1.1).

Dropped: steps and layers are not quite independent, and the middle of a class may be wrong where most of its tensors
are. Measured over right runs, `CERTAINTY` is 2.6 times what was needed. Routers choose as in exact numerics
(`proof_run`): a token that rounding sends to another expert would turn the gradients of both. Moments, weights and
scalars are not regressed: both numerics share their arithmetic, and squares of noise do have a common factor.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ...core.model.model import ModelSpec
from ...core.model.parameters import POSITION_TABLE, TOKEN_TABLE
from ..ledger.ledger import ACTIVATION, ACTIVATION_GRADIENT, GRADIENT, NO_STEP, Key
from ..ledger.relations import section_of
from .bounds import ELEMENTWISE, UNIT_ROUNDOFF, gamma

CERTAINTY = 4.0
"""The c of the interval. Errors that lie wholly along their tensors would leave it with a chance of 7e-4; those of
right runs came to 1.5 at most in one step, to 1.1 in three (113 runs of the matrix' problems, fp32 and bf16, 2 to 8
ranks), and to 1.4 in 72 other runs."""

COMMON = 8
"""Elements of a tensor as many as which the others of its class count."""

Values = tuple[Key, np.ndarray, np.ndarray]
"""A tensor in exact and in fast numerics, both in whole."""


@dataclass(frozen=True)
class Coefficient:
    """How many times exact numerics a class of tensors is: 1 + `off`, give or take `half_width`. An observation is a
    tensor, or an expert or a row of one."""

    phase: str
    group: str
    off: float
    half_width: float
    num_observations: int

    @property
    def factor(self) -> float:
        """The coefficient of the regression."""
        return 1 + self.off

    @property
    def interval(self) -> tuple[float, float]:
        """Where it may be."""
        return self.factor - self.half_width, self.factor + self.half_width

    @property
    def share(self) -> float:
        """How much of the way to the end of the interval 1 is; more than 1 where it is outside."""
        return abs(self.off) / self.half_width

    @property
    def report(self) -> dict[str, object]:
        """The JSON form."""
        named = {"class": self.group, "phase": self.phase, "coefficient": self.factor}
        return {**named, "interval": list(self.interval), "observations": self.num_observations}


def coefficients(model: ModelSpec, values: Iterable[Values]) -> tuple[Coefficient, ...]:
    """One for every class of gradients, activations and their gradients, in the order in which they come; none for
    a class that is zero."""
    sums: dict[tuple[str, str], list[_Sums]] = defaultdict(list)
    for key, expected, found in values:
        if (
            key.step != NO_STEP
            and key.phase in (ACTIVATION, ACTIVATION_GRADIENT, GRADIENT)
            and np.isfinite(found).all()
        ):
            for group, exact, error in _observations(model, key, expected, found):
                sums[key.phase, group].append(_Sums.of(key, exact, error))
    upstream = _factors_of_samples(sums)
    found_of = (
        (phase, group, _pooled(held, upstream if phase == GRADIENT else {})) for (phase, group), held in sums.items()
    )
    return tuple(Coefficient(phase, group, *pooled) for phase, group, pooled in found_of if pooled is not None)


def group_of(tensor: str) -> str:
    """The class of a tensor: its name without the number of its layer.

    >>> group_of("layers.11.mlp.up.weight"), group_of("mtp.0.norm.weight"), group_of("head.norm.weight")
    ('layers.*.mlp.up.weight', 'mtp.*.norm.weight', 'head.norm.weight')
    """
    return re.sub(r"\.\d+(?=\.)", ".*", tensor)


@dataclass(frozen=True)
class _Sums:
    """Over the elements of each of n observations, [n] each: of <exact, exact>, <exact, error> and <error, error>;
    `num_elements` is how many elements one has. They are of one step and one part of the model."""

    place: tuple[int, str]
    tensor: str
    num_elements: int
    squares: np.ndarray
    along: np.ndarray
    errors: np.ndarray

    @classmethod
    def of(cls, key: Key, exact: np.ndarray, error: np.ndarray) -> _Sums:
        """Of observations [n, elements]."""
        sums = ((first * second).sum(1) for first, second in ((exact, exact), (exact, error), (error, error)))
        return cls((key.step, section_of(key.tensor)), key.tensor, exact.shape[1], *sums)


def _pooled(held: Iterable[_Sums], upstream: Mapping[tuple[int, str], float]) -> tuple[float, float, int] | None:
    """How far a coefficient is from 1, half the width of its interval, and the number of observations; None where there
    are none. What is zero in either numerics has no angle, and is left to the bound."""
    off: list[np.ndarray] = []
    left: list[tuple[np.ndarray, int, float]] = []
    for each in held:
        known = (
            (each.squares > 0) & (each.squares + 2 * each.along + each.errors > 0) & (each.squares + each.along != 0)
        )
        if each.num_elements == 1 or not known.any():
            continue
        own = each.along[known] / each.squares[known]
        rest = np.maximum(each.errors[known] / each.squares[known] - own**2, 0.0) / (1 + own) ** 2
        off.append(own)
        left.append((rest, each.num_elements - 1, upstream.get(each.place, 0.0)))
    if not off:
        return None
    every = np.concatenate(off)
    middle = float(np.median(every))
    free = np.concatenate([np.full(len(rest), number) for rest, number, _ in left])
    least = np.concatenate([np.full(len(rest), factor) for rest, _, factor in left])
    lengths = np.concatenate([rest for rest, _, _ in left]) * (free + 1) / free + ((every - middle) / (1 + every)) ** 2
    lengths = (free * lengths + COMMON * float(np.median(lengths))) / (free + COMMON)
    weights = 1 / np.maximum(np.maximum(lengths, least), UNIT_ROUNDOFF["fp32"] ** 2)
    half_width = CERTAINTY / np.sqrt(weights.sum()) + len(every) / weights.sum() + gamma(ELEMENTWISE)
    return float((every * weights).sum() / weights.sum()), float(half_width), len(every)


def _factors_of_samples(sums: Mapping[tuple[str, str], Iterable[_Sums]]) -> dict[tuple[int, str], float]:
    """How far coefficients of samples' gradients of activations are from 1, in the mean square by their squares: by
    step and part of the model, of the tensor there that is farthest."""
    totals: dict[tuple[tuple[int, str], str], np.ndarray] = defaultdict(lambda: np.zeros(2))
    for (phase, _), held in sums.items():
        for each in held if phase == ACTIVATION_GRADIENT else ():
            if (squares := float(each.squares.sum())) > 0:
                totals[each.place, each.tensor] += float(each.along.sum()) ** 2 / squares, squares
    largest: dict[tuple[int, str], float] = defaultdict(float)
    for (place, _), (moved, squares) in totals.items():
        largest[place] = max(largest[place], float(moved / squares))
    return largest


# What is one observation


def _observations(
    model: ModelSpec, key: Key, expected: np.ndarray, found: np.ndarray
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Classes of a tensor with exact values and errors, [observations, elements]. Experts and rows of a table that only
    looks up have tokens of their own. Rows of one product that do different things are classes of their own."""
    group, exact = group_of(key.tensor), expected.astype(np.float64)
    error = found - exact
    is_lookup = key.tensor == POSITION_TABLE or (key.tensor == TOKEN_TABLE and not model.shares_table)
    if key.phase != GRADIENT or not (is_lookup or ".experts." in key.tensor):
        exact, error = exact[None], error[None]
    kinds = _kinds_of_rows(model, key.tensor) if key.phase == GRADIENT else []
    if not kinds:
        yield group, exact.reshape(len(exact), -1), error.reshape(len(exact), -1)
    for kind in dict.fromkeys(kinds):
        chosen = np.resize(np.asarray(kinds) == kind, exact.shape[1])
        yield f"{group} ({kind})", exact[:, chosen].reshape(len(exact), -1), error[:, chosen].reshape(len(exact), -1)


def _kinds_of_rows(model: ModelSpec, tensor: str) -> list[str]:
    """What the rows of a parameter are for, of as many as repeat (`core.model.parameters`); none
    where all do the same."""
    match tensor.split(".")[-2:]:
        case ["qkv", _]:
            return (
                ["queries"] * (model.query_heads_per_group * model.head_dim)
                + ["keys"] * model.head_dim
                + ["values"] * model.head_dim
            )
        case ["kv_up", _]:
            return ["keys"] * model.qk_nope_head_dim + ["values"] * model.v_head_dim
        case ["up", _] if model.gated:
            return ["gates", "units"]
        case _:
            return []
