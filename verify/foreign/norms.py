"""A wrong norm of right gradients told by squares: which parameters, or which rank's parts of them, are left out or counted twice."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from ..digest import Region
from ..ledger import RunLedger

SQUARE = "square of gradient"
"""The kind of the entries in which each rank gives the squared norm of its part of a gradient, in the largest magnitude."""

SAME = 1e-6
"""Two squares that were added up in fp32 agree to this part."""
LARGEST_COUNT = 64

Parts = Mapping[str, Sequence[tuple[int, Region, float]]]
"""Parameter -> rank, region and square of every part."""


def parts_of(run: RunLedger, step: int) -> Parts:
    """The squares that the ranks of a run gave in a step."""
    squares = {key.tensor: pieces for key, pieces in run.pieces.items() if key.phase == SQUARE and key.step == step}
    return {name: [(each.global_rank, each.region, each.summary.largest) for each in pieces] for name, pieces in squares.items()}


def told_by_squares(right: float, found: float, parts: Parts) -> str | None:
    """What explains that a norm is `found` and not `right`, in words. None where no count of some parameters does."""
    regions = {name: {region: square for _, region, square in held} for name, held in parts.items()}
    whole = {name: math.fsum(each.values()) for name, each in regions.items()}
    total = math.fsum(whole.values())
    if not (right > 0 and total > 0 and math.isfinite(found)):
        return None
    lack = ((found / right) ** 2 - 1) * total  # gradients may have been recorded after they were clipped
    for words, names in _groups(list(whole)):
        of_group = math.fsum(whole[name] for name in names)
        if of_group <= 20 * SAME * total:
            continue
        slack = SAME * max(total, total + lack) / of_group
        count = 1 + lack / of_group
        simple = Fraction(count).limit_denominator(LARGEST_COUNT)
        if simple != 1 and _is_count(simple) and abs(count - simple) <= slack:
            return f"the squares of {words} are " + ("not counted" if not simple else f"counted {simple} times")
        for rank in sorted({rank for name in names for rank, _, _ in parts[name]}):
            own = math.fsum(square for name in names for holder, _, square in parts[name] if holder == rank)
            if 0 < own < of_group and abs(lack + of_group - own) <= slack * of_group:
                return f"of the squares of {words} only those that rank {rank} holds are counted"
    return None


def _is_count(count: Fraction) -> bool:
    """Whether something may be counted so: several times, not at all, or shared out evenly."""
    return 0 <= count <= LARGEST_COUNT and (count.denominator == 1 or count.numerator == 1)


def _groups(names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """All parameters, those that have one name in all layers, and single ones."""
    yield "all parameters", list(names)
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    yield from kinds.items()
    yield from ((name, [name]) for name in names)
