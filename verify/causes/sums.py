"""A wrong sum explained by its parts: which of them are missing, come twice or are scaled, found by least squares in
fp64.

Parts are put into groups, those that one rank of an axis brings first, then microbatches, sequences and single parts;
the first grouping of which simple multiples make up the wrong values to rounding is the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

from ...core.plan.plan import Plan
from ..ledger.relations import AXES, Class, in_bf16
from ..run.contributions import Contributions, Part
from .part_groups import groupings, in_words

ROUNDING = {"fp32": 2e-6, "fp16": 4e-3, "bf16": 3e-2}
"""What rounding may leave over of a sum of parts, of the norm of their magnitudes."""
EXPLAINED = 2e-2
"""At most this part of the difference may be left over."""
ROUNDED = 2.0**-23
"""What rounding in fp32 may take from a tensor of which only a part is looked at, of its norm."""
LARGEST_DENOMINATOR = 16
MOST_GROUPS = 96


def explained_by_parts(
    plan: Plan,
    global_rank: int,
    expected: np.ndarray,
    found: np.ndarray,
    contributions: Contributions,
    *,
    scale: float,
    rows: Mapping[str, slice] | None = None,
    dtype: str = "fp32",
    axes: Sequence[str] = AXES,
) -> tuple[Class, str] | None:
    """Kind and words of `found`, of which `expected` is the right one and `scale` times the sum of the contributions;
    all are those of one rank's region. Where the whole has no such multiples, the elements that differ may have, or
    `rows` that have names, each its own. None where no multiples of the parts make it up. `axes` may have made a
    multiple of the whole."""
    parts, difference = contributions.parts, found.astype(np.float64) - expected
    values = contributions.values * scale
    if (
        explained := _fitted(
            plan, global_rank, parts, values.reshape(len(parts), -1), difference.reshape(-1), dtype, axes
        )
    ) is not None:
        return explained
    differ = difference != 0
    if (
        not differ.all()
        and (explained := _fitted(plan, global_rank, parts, values[:, differ], difference[differ], dtype, axes))
        is not None
    ):
        return explained
    if (
        difference.size > 1
        and dtype == "fp32"
        and (explained := _rounded_parts(plan, parts, contributions.values, difference / scale)) is not None
    ):
        return explained
    by_rows = []
    for name, here in (rows or {}).items():
        if differ[here].any():
            part = values[:, here].reshape(len(parts), -1)
            by_rows.append((name, _fitted(plan, global_rank, parts, part, difference[here].reshape(-1), dtype, axes)))
    kinds = {explained and explained[0] for _, explained in by_rows}
    if len(by_rows) < 2 or len(kinds) > 1 or None in kinds:
        return None
    return next(
        (explained[0], "; ".join(f"{name} {explained[1]}" for name, explained in by_rows if explained))
        for _, explained in by_rows
        if explained
    )


def _fitted(
    plan: Plan,
    global_rank: int,
    parts: Sequence[Part],
    values: np.ndarray,
    difference: np.ndarray,
    dtype: str,
    axes: Sequence[str],
) -> tuple[Class, str] | None:
    """Kind and words of a sum of `values` [parts, n] that is off by `difference` [n], by the
    first grouping that fits."""
    slack = slack_of(values, dtype)
    for labels in groupings(plan, parts):
        groups = list(dict.fromkeys(labels))
        if len(groups) > (MOST_GROUPS if len(difference) == 1 else min(MOST_GROUPS, len(difference) - 1)):
            continue
        columns = np.stack([values[[own == group for own in labels]].sum(0) for group in groups])
        if (factors := solved(columns, difference, slack)) is not None:
            return in_words(plan, global_rank, dict(zip(groups, factors, strict=True)), axes)
    return None


def explained_by_columns(
    expected: np.ndarray,
    found: np.ndarray,
    columns: Mapping[str, np.ndarray],
    extra: Mapping[str, tuple[Class, np.ndarray]],
    *,
    dtype: str,
) -> tuple[Class, str] | None:
    """Kind and words of `found` by what the right values are the sum of, in words, and by what else may have been added
    to them, with the kind of difference that this is. Multiples may be any."""
    difference = (found.astype(np.float64) - expected).reshape(-1)
    rounding = ROUNDED * float(np.linalg.norm(expected))
    fits: list[dict[str, float]] = []
    added = [{words: values} for words, (_, values) in extra.items()]
    for chosen in (
        columns,
        *({**columns, **each} for each in added),
        *({"the right values": expected, **each} for each in added),
    ):
        used = {words: values.astype(np.float64).reshape(-1) for words, values in chosen.items() if values.any()}
        if not used or len(difference) < 2 * len(used):
            continue
        stacked = np.stack(list(used.values()))
        slack = slack_of(stacked, dtype) + rounding
        if (off := _least_squares(stacked, difference, slack)) is None or not explains(
            off @ stacked, difference, slack
        ):
            continue
        fits.append({words: each + (words not in extra) for words, each in zip(used, off, strict=True)})
    if not fits:
        return None
    # an update of one sign and weights that are all ones are multiples of each other
    return _columns_in_words(next(filter(_are_simple, fits), fits[0]), extra)


def _are_simple(factors: Mapping[str, float]) -> bool:
    """Whether all multiples are such as mistakes make: none, halves and whole ones up to 4."""
    return all(abs(2 * factor - round(2 * factor)) < 2e-3 and abs(factor) < 4.5 for factor in factors.values())


def _columns_in_words(factors: Mapping[str, float], extra: Mapping[str, tuple[Class, np.ndarray]]) -> tuple[Class, str]:
    for words in extra.keys() & factors.keys():
        times = "" if abs(factors[words] - 1) < 1e-3 else f" times {factors[words]:.4g}"
        return extra[words][0], f"with {words} added{times}"
    if lost := [words for words, factor in factors.items() if abs(factor) < 1e-3]:
        return "missing", f"without {' and '.join(lost)}"
    odd = {words: factor for words, factor in factors.items() if abs(factor - 1) > 1e-5}
    explained = " and ".join(
        f"{words} {'twice' if abs(factor - 2) < 1e-3 else f'times {factor:.4g}'}" for words, factor in odd.items()
    )
    return ("doubled" if all(abs(factor - 2) < 1e-3 for factor in odd.values()) else "scaled"), explained


def slack_of(values: np.ndarray, dtype: str) -> float:
    """What rounding may leave over of a sum of `values` [parts, n]."""
    return ROUNDING[dtype] * float(np.linalg.norm(np.abs(values).sum(0)))


def solved(columns: np.ndarray, difference: np.ndarray, slack: float) -> list[Fraction] | None:
    """How often each column [m, n] is in a sum that is off by `difference` [n], once being right; None where no
    simple multiples fit."""
    off = (
        _of_one_number(columns[:, 0], float(difference[0]))
        if len(difference) == 1
        else _least_squares(columns, difference, slack)
    )
    if off is None:
        return None
    simple = [Fraction(1 + each).limit_denominator(LARGEST_DENOMINATOR) for each in off]
    fits = explains(np.array([float(each) - 1 for each in simple]) @ columns, difference, slack)
    return simple if fits else None


def _least_squares(columns: np.ndarray, difference: np.ndarray, slack: float) -> np.ndarray | None:
    """The multiples of columns that come nearest to a difference; 0 of those that rounding hides. None
    where they are not unique."""
    size = np.linalg.norm(columns, axis=1)
    used = size > 5 * slack
    if not used.any():
        return None
    unit = columns[used] / size[used, None]
    if np.linalg.cond(unit) > 1e6:
        return None
    found = np.zeros(len(columns))
    found[used] = np.linalg.lstsq(unit.T, difference, rcond=None)[0] / size[used]
    return found


def _of_one_number(parts: np.ndarray, difference: float) -> np.ndarray | None:
    """Multiples of the parts of one number by which it is off: one is missing or comes twice, or
    all others are missing."""
    total, found = parts.sum(), parts.sum() + difference
    for at, part in enumerate(parts):
        only = np.full(len(parts), -1.0)
        for alone in (0.0, len(parts) - 1.0):
            only[at] = alone
            if abs(found - (1 + alone) * part) <= 1e-7 * abs(total):
                return only
        for factor in (-1.0, 1.0):
            if abs(difference - factor * part) <= 1e-7 * abs(total):
                return factor * (np.arange(len(parts)) == at)
    return None


def explains(fit: np.ndarray, difference: np.ndarray, slack: float) -> bool:
    """Whether a difference is `fit`, but for rounding (`slack`) and a small part of it."""
    left = float(np.linalg.norm(difference - fit))
    return left <= slack and left <= EXPLAINED * float(np.linalg.norm(difference))


def _rounded_parts(
    plan: Plan, parts: Sequence[Part], values: np.ndarray, difference: np.ndarray
) -> tuple[Class, str] | None:
    """Whether a difference is mostly what comes of rounding every rank's part to bf16, or the
    sums of some of them too."""
    difference, values = difference.reshape(-1), values.reshape(len(parts), -1)
    right = values.sum(0)
    for labels in groupings(plan, parts):
        sums = in_bf16(np.stack([values[[own == group for own in labels]].sum(0) for group in dict.fromkeys(labels)]))
        for total in (sums.sum(0), _in_turn(sums), _in_turn(sums[::-1]), _in_pairs(sums)):
            if float(np.linalg.norm(total - right - difference)) <= 0.25 * float(np.linalg.norm(difference)):
                return "order only", "the sum of its parts after they were rounded to bf16"
    return None


def _in_turn(sums: np.ndarray) -> np.ndarray:
    """The sum in bf16, one after the other."""
    total = sums[0]
    for each in sums[1:]:
        total = in_bf16(total + each)
    return total


def _in_pairs(sums: np.ndarray) -> np.ndarray:
    """The sum in bf16, of pairs, of pairs of pairs and so on."""
    while len(sums) > 1:
        last = sums[len(sums) & ~1 :]
        sums = np.concatenate([in_bf16(sums[0 : len(sums) & ~1 : 2] + sums[1::2]), last])
    return sums[0]


def explained_by_narrow_operands(
    expected: np.ndarray, found: np.ndarray, narrow: np.ndarray
) -> tuple[Class, str] | None:
    """Whether `found` is what products of operands in bf16 make of it, `narrow`, but for a tenth of its difference."""
    difference = np.linalg.norm(found.astype(np.float64) - expected)
    near = np.linalg.norm(found.astype(np.float64) - narrow) <= 0.1 * difference
    return ("order only", "the product of its operands after they were rounded to bf16") if near else None


def explained_by_moved_use(
    expected: np.ndarray, found: np.ndarray, whole: Contributions, box: tuple[slice, ...], scale: float
) -> tuple[Class, str] | None:
    """Whether `found`, the part `box` of a gradient, has one use of its parameter in other places: what is left without
    the others are values of that use, from elsewhere in the tensor. `whole` are the contributions to all of it."""
    for use in sorted({part.use for part in whole.parts if part.use}):
        own = whole.values[[part.use == use for part in whole.parts]].sum(0) * scale
        left = found.astype(np.float64) - (expected - own[box])
        places = np.sort(own, axis=None)
        above = np.searchsorted(places, left).clip(1, len(places) - 1)
        off = np.minimum(np.abs(places[above] - left), np.abs(places[above - 1] - left))
        if (off <= 2e-6 * np.abs(expected).max()).all():
            return "permuted", f"with its use as {use} in other places"
    return None
