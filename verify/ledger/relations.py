"""`relate`: how the wrong values of a tensor relate to the right ones, from their summaries, or more exactly
where the values were kept.

One table of kinds for proofs and for ledgers of runs that are over. A kind is named only where it follows from the
numbers; what follows from nothing is `other values`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

import numpy as np

from ...core.base.digest import EMPTY, Digest, Region, bit_words
from ...core.layout.layout import Layout
from .flips import flipped_bits
from .ledger import Key, Piece, RunLedger
from .summary import Summary, summarize

Class = Literal[
    "missing",
    "doubled",
    "scaled",
    "local mean",
    "permuted",
    "stale",
    "bit flip",
    "order only",
    "not finite",
    "run-dependent",
    "other values",
]

HINTS: Mapping[Class, str] = {
    "missing": "A contribution was dropped or a buffer was zeroed: look at the reduction of this tensor.",
    "doubled": (
        "Something was added twice: look at reductions over replicas, and at contributions that are counted "
        "on two ranks."
    ),
    "scaled": "A sum was divided or multiplied once too often: look at where the axis of this ratio is averaged.",
    "local mean": (
        "A sum was divided by what one rank, microbatch or sample counts: add the counts of all before dividing."
    ),
    "permuted": (
        "Shards, samples or chunks were put together in another order: look at gathers and at the order of ranks."
    ),
    "stale": "Something was not refreshed in this step: look at what copies it, and at waits that are missing.",
    "bit flip": (
        "Memory, a cache or a link has changed a bit, or code that writes single bits: run again, and test that device."
    ),
    "order only": "Another order or precision of the same sums: look for a reduction that is not exact.",
    "not finite": "Look at what feeds it: the last tensor before it was right.",
    "run-dependent": (
        "Something depends on time: an unordered reduction, a buffer reused too early, or memory never written."
    ),
    "other values": "Look at what feeds it: the last tensor before it was right.",
}
"""Where to look, by kind of relation."""

AXES = ("tp", "cp", "dp", "ep", "etp", "pp")
LARGEST_RATIO = 64
LARGEST_POWER = 32
MOST_LEVELS = 64
"""Whole multiples of one number, up to so many times it, are made of counts: two tensors of such often have the
same values by chance."""
CHANCE = 10**9
"""Of so many choices of such values one is found by chance."""
LEAST_MOVED, MOST_MOVED = 8, 0.9
"""At least so many elements, and of the wrong ones this share, are found elsewhere."""
ROUNDING = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 3e-2}
"""A distance below this part of the norm is what other orders of the same sums give in tensors of a format."""
SAME_RATIO = {"fp32": 2e-6, "fp16": 1e-3, "bf16": 8e-3}
"""A tensor and a multiple of it that was rounded to a format agree to this part of the norm."""


@dataclass(frozen=True)
class Relation:
    """How the wrong values of a tensor relate to the right ones: `kind` for machines, `words` for people; the distance
    and the norm of the right ones are Euclidean."""

    kind: Class
    words: str
    distance: float
    norm: float
    is_rough: bool = False
    """Whether what the tensor is made from may say more: of a distance alone, and of a multiple that is not simple."""
    axis: str | None = None
    """The one axis that has the degree of a multiple."""


@dataclass(frozen=True)
class Known:
    """A whole tensor of which wrong values may be found to be: then they are of `kind`, and are `words`. `region` is
    the part of it that takes the place of the wrong one."""

    kind: Class
    words: str
    values: np.ndarray
    region: Region


@dataclass(frozen=True)
class Evidence:
    """What else was computed, among which wrong values may be found again: `before` are the same tensor's summaries in
    earlier steps, `others` names other tensors of the step by digest, or by `Summary.value_digest` where they may be in
    other places. `layout` has the degrees of ratios, of the `axes` that may have made them; `dtype` is the format of
    the tensor. `known` are tensors whose values were kept."""

    before: Sequence[Summary] = ()
    others: Mapping[Digest | int, str] = field(default_factory=dict)
    layout: Layout | None = None
    axes: Sequence[str] = AXES
    dtype: str = "fp32"
    known: Sequence[Known] = ()
    elsewhere: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The right values of other tensors of the step, by name."""
    shards: Mapping[int, Sequence[Region]] = field(default_factory=dict)
    """The parts of the tensor that ranks keep, where one that is brought together holds those of several."""
    of_counts: bool = False
    """Whether the tensor is made of counts, so that a few elements are zero, exchanged or of the
    other sign by chance."""


def earlier(key: Key, piece: Piece, run: RunLedger) -> list[Summary]:
    """The summaries that a rank's piece of a tensor had in earlier steps, of any sample."""
    same = (each for old, pieces in run.pieces.items() if _is_earlier(old, key) for each in pieces)
    return [each.summary for each in same if each.global_rank == piece.global_rank and each.region == piece.region]


def _is_earlier(old: Key, key: Key) -> bool:
    return old.step < key.step and (old.phase, old.tensor) == (key.phase, key.tensor)


def relate(expected: Summary, found: Summary, evidence: Evidence | None = None) -> Relation:
    """How `found` relates to `expected`, from their summaries."""
    evidence, distance, norm = evidence or Evidence(), found.distance(expected), expected.norm

    def relation(kind: Class, words: str) -> Relation:
        return Relation(kind, words, distance, norm)

    if not (math.isfinite(found.largest) and all(map(math.isfinite, found.sums))):
        return relation("not finite", "not finite numbers")
    if found.digest in {each.digest for each in evidence.before} - {EMPTY}:
        return relation("stale", "the values of an earlier step")
    if found.largest == 0 < expected.largest:
        return relation("missing", "all zero")
    is_distinctive = unit_of(np.array([*expected.sums, expected.largest])) is None
    if is_distinctive and found.value_digest == expected.value_digest:
        return relation("permuted", "the right values in other places")
    ratio = ratio_of(expected.sums, found.sums, evidence.dtype)
    if isinstance(ratio, Fraction):
        axes = axes_of_ratio(ratio, evidence.layout, evidence.axes)
        multiple = relation(*in_ratio(ratio, evidence.layout, evidence.axes))
        return replace(multiple, axis=axes[0] if len(axes) == 1 else None)
    if (
        is_distinctive
        and (other := evidence.others.get(found.digest, evidence.others.get(found.value_digest))) is not None
    ):
        return relation("permuted", f"the values of {other}")
    kind_and_words = (
        apart(distance, norm, evidence.dtype) if ratio is None else in_ratio(ratio, evidence.layout, evidence.axes)
    )
    return replace(relation(*kind_and_words), is_rough=True)


def relate_values(
    expected: np.ndarray,
    found: np.ndarray,
    shape: Sequence[int],
    region: Region,
    evidence: Evidence | None = None,
) -> Relation:
    """How the values of `region` of a tensor of `shape` relate to the right ones: of all its elements, or
    of those that differ."""
    evidence = evidence or Evidence()
    whole = relate(summarize(expected, shape, region), summarize(found, shape, region), evidence)
    right, wrong = expected.astype(np.float64), found.astype(np.float64)
    differ = right != wrong
    if (
        whole.kind != "stale"
        and differ.any()
        and (flipped := flipped_bits(expected, found, region, evidence.dtype)) is not None
    ):
        return replace(whole, kind="bit flip", words=flipped, is_rough=False, axis=None)
    if whole.kind in ("not finite", "stale"):
        return whole
    if not differ.any():  # bits differ all the same: the sign of a zero
        return replace(whole, kind="order only", words="zeros of the other sign", axis=None)
    kind, words, is_rough = _of_elements(right[differ], wrong[differ], evidence)
    if is_rough and not whole.is_rough:
        return whole
    if (
        is_rough
        and not evidence.of_counts
        and (same := _same_as_known(found, differ, region, evidence.known) or _found_in(found, differ, evidence))
        is not None
    ):
        (kind, words), is_rough = same, False
    if kind != "other values" and not differ.all():
        words += _in_shard(differ, region, evidence.shards) + where_of(differ, region)
    distance, norm = float(np.linalg.norm(wrong - right)), float(np.linalg.norm(right))
    return Relation(kind, words, distance, norm, is_rough, whole.axis if kind == whole.kind else None)


def _of_elements(expected: np.ndarray, found: np.ndarray, evidence: Evidence) -> tuple[Class, str, bool]:
    """Kind and words of a list of elements that all differ, and whether they are rough."""
    if not found.any() and not evidence.of_counts:
        return "missing", "all zero", False
    if evidence.dtype == "fp32" and np.array_equal(found, in_bf16(expected)):
        return "order only", "rounded to bf16", False
    unit = unit_of(np.concatenate([expected, found]))
    if (
        len(found) > 1
        and np.array_equal(np.sort(expected), np.sort(found))
        and (unit is None or _is_no_chance(expected))
    ):
        return "permuted", "the right values in other places", False
    ratio = None if evidence.of_counts else ratio_of(expected, found, evidence.dtype)
    if ratio is not None and (len(found) > 2 or isinstance(ratio, Fraction)):
        return *in_ratio(ratio, evidence.layout, evidence.axes), isinstance(ratio, float)
    distance, norm = (float(np.linalg.norm(each)) for each in (found - expected, expected))
    if evidence.dtype == "fp32" and np.array_equal(found, in_bf16(found)) and distance <= norm * 2.0**-8:
        return "order only", f"rounded to bf16: off by {distance / norm:.1e} of their norm", False
    kind, words = apart(distance, norm, evidence.dtype)
    return (
        kind,
        words
        if unit is None
        else (f"{words}; the right and the wrong ones are whole multiples of {unit:.6g}, as counts give"),
        True,
    )


def _same_as_known(
    found: np.ndarray, differ: np.ndarray, region: Region, known: Sequence[Known]
) -> tuple[Class, str] | None:
    """Kind and words of wrong elements that are those of known tensors: in their places, or in rows that were moved."""
    for each in known:
        if np.array_equal(found[differ], each.values[_box(each.region)][differ]):
            return each.kind, each.words
    for each in known:
        if each.kind == "permuted" and (shifted := _shifted(found, differ, each)) is not None:
            return shifted
    for dim in range(found.ndim):
        if found.ndim > 1 and (moved := _moved_rows(found, differ, region, dim, known)) is not None:
            return moved
    return None


def _found_in(found: np.ndarray, differ: np.ndarray, evidence: Evidence) -> tuple[Class, str] | None:
    """Kind and words where the values of wrong elements are those of other tensors, in whatever places: what lies in
    one buffer was taken apart otherwise than it was put together."""
    wrong = found[differ & (found != 0)]
    if len(wrong) < LEAST_MOVED or evidence.dtype != "fp32" or unit_of(wrong) is not None:
        return None
    names, left = [], wrong
    for name, values in evidence.elsewhere.items():
        own = np.isin(left, values)
        if np.count_nonzero(own) >= LEAST_MOVED:
            names.append(name)
            left = left[~own]
    if len(left) > (1 - MOST_MOVED) * len(wrong):
        return None
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return "permuted", f"the values of {', '.join(names[:3])}{more}"


def _moved_rows(
    found: np.ndarray, differ: np.ndarray, region: Region, dim: int, known: Sequence[Known]
) -> tuple[Class, str] | None:
    """Kind and words where every wrong row along a dimension is a row of a known tensor, or zero."""
    places: dict[bytes, tuple[Known, int]] = {}
    for each in known:
        box = tuple(slice(None) if other == dim else slice(lo, hi) for other, (lo, hi) in enumerate(each.region))
        for place, row in enumerate(np.moveaxis(each.values[box], dim, 0)):
            if row.size > 1 and row.any():
                places.setdefault(np.ascontiguousarray(row).tobytes(), (each, place))
    rows = np.moveaxis(found, dim, 0)
    wrong = np.flatnonzero(np.moveaxis(differ, dim, 0).reshape(len(rows), -1).any(1))
    taken = [(int(at), places.get(np.ascontiguousarray(rows[at]).tobytes())) for at in wrong if rows[at].any()]
    sources = [source for _, source in taken if source is not None]
    if not sources or len(sources) < len(taken):
        return None
    kinds = {source.kind for source, _ in sources}
    (source, place), at = sources[0], taken[0][0] + region[dim][0]
    kind: Class = "stale" if kinds == {"stale"} else "permuted"
    return kind, f"{source.words} along dimension {dim}: at {at} those of {place}"


def _shifted(found: np.ndarray, differ: np.ndarray, known: Known) -> tuple[Class, str] | None:
    """Kind and words where wrong elements are those of a known tensor so many places further on in memory, which lies
    by rows or by columns: what is cut begins too early or too late. Few of them, at its ends, may be others."""
    numbers = np.arange(known.values.size).reshape(known.values.shape)
    orders = [(known.values, numbers)]
    if known.values.ndim > 1:
        shape = known.values.mT.shape
        orders.append((known.values.mT, numbers.reshape(shape).mT))
    shares: dict[str, float] = {}
    for right, places in orders:
        flat, wrong, here = right.ravel(), found[differ], places[_box(known.region)][differ]
        values, first, count = np.unique(flat, return_index=True, return_counts=True)
        at = np.searchsorted(values, wrong).clip(max=len(values) - 1)
        is_once = (values[at] == wrong) & (count[at] == 1) & (wrong != 0)
        if np.count_nonzero(is_once) < max(LEAST_MOVED, len(wrong) / 2):
            continue
        by, times = np.unique(first[at[is_once]] - here[is_once], return_counts=True)
        number = int(by[times.argmax()])
        source = here + number
        inside = (source >= 0) & (source < flat.size)
        share = np.count_nonzero(flat[source[inside]] == wrong[inside]) / len(wrong)
        shares.setdefault(f"{abs(number)} {'further on' if number > 0 else 'before'} in memory", share)
    nearest = max(shares, key=lambda words: shares[words], default="")
    return ("permuted", f"{known.words}, {nearest}") if shares.get(nearest, 0.0) >= MOST_MOVED else None


def _box(region: Region) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in region)


def unit_of(values: np.ndarray) -> float | None:
    """The number of which all values are whole multiples, if there is one that none is more than
    `MOST_LEVELS` times; None of zeros.

    >>> unit_of(np.array([0.02, -0.01, 0.0, 0.05])), unit_of(np.array([0.02, 0.0141, 0.3]))
    (0.01, None)
    """
    sizes = np.unique(np.abs(values))
    largest = float(sizes[-1]) if len(sizes) else 0.0
    least, unit = largest / MOST_LEVELS, largest
    for size in sizes if largest and math.isfinite(largest) else ():
        rest = float(size)
        while rest > 1e-6 * largest:  # Euclid's algorithm, with room for rounding
            unit, rest = rest, abs(unit - rest * round(unit / rest))
            if unit < least * (1 - 1e-6):
                return None
    return unit if largest and math.isfinite(largest) else None


def _is_no_chance(values: np.ndarray) -> bool:
    """Whether so many values of so few levels are hardly ever the same by chance."""
    levels = len(np.unique(values))
    return math.comb(len(values) + levels - 1, levels - 1) > CHANCE


def ratio_of(
    expected: Sequence[float] | np.ndarray, found: Sequence[float] | np.ndarray, dtype: str
) -> Fraction | float | None:
    """The ratio of two tensors that are multiples of each other, simple where it may be; None of all
    others, and 1 is none."""
    right, wrong = np.asarray(expected, dtype=np.float64).reshape(-1), np.asarray(found, dtype=np.float64).reshape(-1)
    size = float(right @ right)
    if not size or not math.isfinite(size):
        return None
    ratio, tolerance = float(right @ wrong) / size, SAME_RATIO[dtype]
    for simple in _simple_near(ratio, dtype):
        if simple not in (0, 1) and _fits(right, wrong, float(simple), tolerance):
            return simple
    odd = ratio != 0 and abs(ratio - 1) > 10 * tolerance and (wrong != wrong[0]).any()  # any two numbers have a ratio
    return ratio if odd and _fits(right, wrong, ratio, tolerance) else None


def _simple_near(ratio: float, dtype: str) -> Iterator[Fraction]:
    """Simple ratios near one: numerator and denominator up to 64, or where rounding hides such up to 8 and whole
    multiples and parts; and powers of two, as losses are scaled by."""
    most = LARGEST_RATIO if dtype == "fp32" else 8
    near = [Fraction(ratio).limit_denominator(most), Fraction(round(ratio))]
    if 1 / LARGEST_RATIO < abs(ratio) < 1:
        near.append(Fraction(1, round(1 / ratio)))
    for each in near:
        limit = LARGEST_RATIO if 1 in (abs(each.numerator), each.denominator) else most
        if max(abs(each.numerator), each.denominator) <= limit:
            yield each
    if ratio and abs(power := round(math.log2(abs(ratio)))) <= LARGEST_POWER:
        yield Fraction(2) ** power * (1 if ratio > 0 else -1)


def _fits(right: np.ndarray, wrong: np.ndarray, ratio: float, tolerance: float) -> bool:
    return bool(np.abs(wrong - ratio * right).max() <= tolerance * abs(ratio) * np.abs(right).max())


def axes_of_ratio(ratio: Fraction, layout: Layout | None, axes: Sequence[str] = AXES) -> list[str]:
    """Those of the axes that have the degree of a multiple."""
    return [] if layout is None else [axis for axis in axes if degree_of(layout, axis) in (ratio, 1 / ratio)]


def in_ratio(ratio: Fraction | float, layout: Layout | None, axes: Sequence[str] = AXES) -> tuple[Class, str]:
    """Kind and words of a multiple, with those of the axes that have this degree."""
    if not isinstance(ratio, Fraction):
        return "scaled", f"the right values times {ratio:.6g}"
    meant = axes_of_ratio(ratio, layout, axes)
    named = f", as {' or '.join(meant)} is" if meant else ""
    return "doubled" if ratio == 2 else "scaled", f"the right values times {ratio}{named}"


def apart(distance: float, norm: float, dtype: str) -> tuple[Class, str]:
    """Kind and words of values of which only a distance is known."""
    if not norm:
        return "other values", "not zero as they should be"
    if distance <= ROUNDING[dtype] * norm:
        return "order only", f"off by {distance / norm:.1e} of their norm, as rounding is"
    return "other values", f"off by {distance / norm:.1e} of their norm"


def in_bf16(values: np.ndarray) -> np.ndarray:
    """fp64 values rounded to the nearest numbers of bf16, ties to even."""
    words = bit_words(values.astype(np.float32))
    words = (words + np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return words.view(np.float32).astype(np.float64)


def _in_shard(differ: np.ndarray, region: Region, shards: Mapping[int, Sequence[Region]]) -> str:
    """`, in the shard of rank 2`, where all elements that differ are of one rank's, and not all elements are."""
    sizes: dict[int, int] = {}
    for rank, regions in shards.items():
        own = np.zeros(differ.shape, dtype=bool)
        for each in regions:
            box = [(max(a, lo) - lo, min(b, hi) - lo) for (a, b), (lo, hi) in zip(each, region, strict=True)]
            own[tuple(slice(max(first, 0), max(last, 0)) for first, last in box)] = True
        if not own.all() and not (differ & ~own).any():
            sizes[rank] = int(np.count_nonzero(own))
    ranks = [str(rank) for rank, size in sorted(sizes.items()) if size == min(sizes.values())]
    return f", in the shard of rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}" if ranks else ""


def where_of(differ: np.ndarray, region: Region) -> str:
    """The smallest box around the elements that differ, in words: `, in 12 of 48 elements: [4:8, 0:6]`."""
    box = []
    for dim, (lo, _) in enumerate(region):
        hit = np.flatnonzero(differ.any(axis=tuple(other for other in range(differ.ndim) if other != dim)))
        box.append(f"{lo + hit[0]}:{lo + hit[-1] + 1}")
    return f", in {int(np.count_nonzero(differ)):,} of {differ.size:,} elements: [{', '.join(box)}]"


def degree_of(layout: Layout, axis: str) -> int:
    """The ranks along an axis."""
    return layout.expert_tp if axis == "etp" else int(getattr(layout, axis))


def section_of(name: str) -> str:
    """`layers.3` of everything in that layer; otherwise the first word.

    >>> section_of("layers.3.mlp.up.weight"), section_of("head.norm.weight")
    ('layers.3', 'head')
    """
    words = name.split(".")
    return ".".join(words[:2]) if len(words) > 1 and words[1].isdecimal() else words[0]
