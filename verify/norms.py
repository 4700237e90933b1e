"""A wrong norm told by its squares: which parameters, or which ranks' parts of them, are counted twice, several times or not at all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import numpy as np

from ..core.parameters import Parameter, parameters
from ..core.plan import Plan
from .bounds import section_of
from .ledger import Piece
from .relations import AXES, Class, degree_of

SAME = 1e-7
"""Norms are added up exactly, and squares of fp32 numbers are right to this."""
EXPLAINED = 1e-2
"""At most this part of the difference of squares may be left over."""


def told_by_squares(
    plan: Plan, right: float, found: float, squares: Mapping[str, np.ndarray], pieces: Mapping[str, Sequence[Piece]]
) -> tuple[Class, str] | None:
    """Kind and words of a norm `found` where `right` is right. `squares` are those of the elements of every gradient, `pieces` who holds
    which part of it. None where no count of some parameters gives that norm."""
    if not (math.isfinite(found) and right > 0 and squares):
        return None
    total, wrong = right * right, found * found
    counts = _counts(plan)
    matches: list[tuple[float, Class, str]] = []
    for words, group in _groups(plan, squares):
        of_group = math.fsum(float(squares[name].sum()) for name in group)
        for count in counts:
            matches.append((abs(wrong - total - (float(count) - 1) * of_group), *_counted(words, count)))
        for holders, own in _parts_of_ranks(plan, group, squares, pieces):
            told = f"of the squares of {words} only those that {holders} holds are counted"
            matches.append((abs(wrong - (total - of_group + own)), "missing", told))
    off, kind, words = min(matches, key=lambda match: match[0])
    if off <= SAME * max(total, wrong) and off <= EXPLAINED * abs(wrong - total):
        return kind, words
    norms = [math.sqrt(float(each.sum())) for each in squares.values()]
    for words, value in (("the sum of the norms", math.fsum(norms)), ("the largest norm", max(norms)), ("the square", total)):
        if abs(found - value) <= SAME * value:
            return "other values", f"{words} of the parameters" if words != "the square" else "the square of the norm"
    return None


def _counts(plan: Plan) -> list[Fraction]:
    """How often squares may be counted: not at all, twice, as often as an axis has ranks, and the inverse of these."""
    degrees = {2, *(degree_of(plan.layout, axis) for axis in AXES), plan.layout.dp * plan.layout.cp, plan.world_size} - {1}
    return [Fraction(0), *(each for degree in sorted(degrees) for each in (Fraction(degree), Fraction(1, degree)))]


def _counted(words: str, count: Fraction) -> tuple[Class, str]:
    if count == 0:
        return "missing", f"the squares of {words} are not counted"
    if count == 2:
        return "doubled", f"the squares of {words} are counted twice"
    return "scaled", f"the squares of {words} are counted times {count}"


def _groups(plan: Plan, squares: Mapping[str, np.ndarray]) -> Iterator[tuple[str, list[str]]]:
    """Parameters that have something in common: all, kinds of them, parts of the model, and single ones."""
    held = [each for each in parameters(plan.model) if each.name in squares]

    def group(words: str, chosen: Iterator[Parameter]) -> Iterator[tuple[str, list[str]]]:
        names = [each.name for each in chosen]
        if names:
            yield words, names

    yield from group("all parameters", iter(held))
    yield from group("the parameters that tensor parallelism cuts", (each for each in held if each.cut is not None and not each.expert))
    yield from group("the parameters that tensor parallelism does not cut", (each for each in held if each.cut is None and not each.expert))
    yield from group("experts", (each for each in held if each.expert))
    yield from group("all but experts", (each for each in held if not each.expert))
    yield from group("the parameters without weight decay", (each for each in held if not each.decay))
    yield from group("the parameters with weight decay", (each for each in held if each.decay))
    for stage, content in enumerate(plan.stages):
        sections = {f"layers.{layer}" for layer in content.layers} | ({"embedding"} if content.embedding else set())
        yield from group(f"stage {stage}", (each for each in held if section_of(each.name) in sections))
    for section in dict.fromkeys(section_of(each.name) for each in held):
        yield from group(section, (each for each in held if section_of(each.name) == section))
    for each in held:
        yield each.name, [each.name]


def _parts_of_ranks(
    plan: Plan, group: Sequence[str], squares: Mapping[str, np.ndarray], pieces: Mapping[str, Sequence[Piece]]
) -> Iterator[tuple[str, float]]:
    """Ranks, alone and all of one place along an axis, with the squares of what they hold of some parameters, every element once."""
    holders = {f"rank {rank}": {rank} for rank in range(plan.world_size)}
    for axis in AXES:
        for place in range(degree_of(plan.layout, axis)):
            holders[f"{axis} rank {place}"] = {rank for rank in range(plan.world_size) if _place(plan, rank, axis) == place}
    for words, ranks in holders.items():
        held = {(name, piece.region) for name in group for piece in pieces.get(name, ()) if piece.global_rank in ranks}
        if held:
            yield words, math.fsum(float(squares[name][tuple(slice(lo, hi) for lo, hi in region)].sum()) for name, region in held)


def _place(plan: Plan, global_rank: int, axis: str) -> int:
    if axis in ("ep", "etp"):
        return plan.layout.expert_coordinates(global_rank)["tp" if axis == "etp" else "ep"]
    return plan.layout.coordinates(global_rank)[axis]
