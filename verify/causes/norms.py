"""A wrong norm explained by its squares: which parameters, or which ranks' parts of them, are counted twice,
several times or not at all.

One mechanism for proofs, which have a plan and all values, and for ledgers of other stacks, which have names and
the squares of each part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ...core.base.digest import Region
from ...core.model.parameters import Parameter, parameters
from ...core.plan.plan import Plan
from ..ledger.ledger import SQUARE, Piece, RunLedger
from ..ledger.relations import AXES, Class, degree_of, section_of

SAME_EXACT, SAME = 1e-7, 1e-6
"""Two squares agree to this part of the norm's: of fp32 numbers added up exactly, and of a norm that a loop
has added up in fp32."""
EXPLAINED = 1e-2
"""At most this part of the difference of squares may be left over."""
LARGEST_COUNT = 64

Group = tuple[str, Sequence[str]]
"""Parameters that have something in common: in words, and their names."""


@dataclass(frozen=True)
class Squares:
    """Squared norms of right gradients: of each whole, and of the parts that ranks `held`, by rank and region. They may
    have been clipped, all by one factor."""

    whole: Mapping[str, float]
    held: Mapping[str, Sequence[tuple[int, Region, float]]]

    @classmethod
    def of_values(cls, squares: Mapping[str, np.ndarray], pieces: Mapping[str, Sequence[Piece]]) -> Squares:
        """From the squares of all elements, and who holds which part of them."""
        held = {
            name: [
                (each.global_rank, each.region, float(squares[name][_box(each.region)].sum()))
                for each in pieces.get(name, ())
            ]
            for name in squares
        }
        return cls({name: float(each.sum()) for name, each in squares.items()}, held)

    @classmethod
    def recorded(cls, run: RunLedger, step: int) -> Squares:
        """From what the ranks of a run gave in a step."""
        found = {key.tensor: pieces for key, pieces in run.pieces.items() if key.phase == SQUARE and key.step == step}
        held = {
            name: [(each.global_rank, each.region, each.summary.largest) for each in pieces]
            for name, pieces in found.items()
        }
        return cls(
            {name: math.fsum({region: own for _, region, own in each}.values()) for name, each in held.items()}, held
        )


@dataclass(frozen=True)
class Suspects:
    """What may be counted otherwise: `groups` of parameters, of them the parts of `holders` (ranks by words); so often
    as `counts`, None any number of times and evenly shared; `same` is how well squares agree."""

    groups: Sequence[Group]
    holders: Mapping[str, Collection[int]]
    counts: Sequence[Fraction] | None
    same: float

    @classmethod
    def of_plan(cls, plan: Plan, squares: Squares) -> Suspects:
        """Parameters by what a plan says of them; ranks, alone and all of one place along an axis."""
        degrees = {
            2,
            *(degree_of(plan.layout, axis) for axis in AXES),
            plan.layout.dp * plan.layout.cp,
            plan.world_size,
        } - {1}
        counts = [
            Fraction(0),
            *(each for degree in sorted(degrees) for each in (Fraction(degree), Fraction(1, degree))),
        ]
        return cls(list(_groups(plan, squares.whole)), _holders(plan), counts, SAME_EXACT)

    @classmethod
    def by_name(cls, squares: Squares) -> Suspects:
        """All parameters, those that have one name in all layers, and single ones; and every rank alone."""
        kinds: dict[str, list[str]] = {}
        for name in squares.whole:
            kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
        groups = [("all parameters", list(squares.whole)), *kinds.items(), *((name, [name]) for name in squares.whole)]
        ranks = sorted({rank for parts in squares.held.values() for rank, _, _ in parts})
        return cls(groups, {f"rank {rank}": {rank} for rank in ranks}, None, SAME)


def explained_by_squares(right: float, found: float, squares: Squares, suspects: Suspects) -> tuple[Class, str] | None:
    """Kind and words of a norm `found` where `right` is right. None where no count of some
    parameters gives that norm."""
    total = math.fsum(squares.whole.values())
    if not (math.isfinite(found) and right > 0 and total > 0):
        return None
    lack = ((found / right) ** 2 - 1) * total
    matches: list[tuple[float, Class, str]] = []
    for words, names in suspects.groups:
        of_group = math.fsum(squares.whole[name] for name in names)
        if not of_group:
            continue
        for count in _simple(1 + lack / of_group) if suspects.counts is None else suspects.counts:
            matches.append((abs(lack - (float(count) - 1) * of_group), *_counted(words, count)))
        for holders, ranks in suspects.holders.items():
            own = {
                (name, region): each
                for name in names
                for rank, region, each in squares.held.get(name, ())
                if rank in ranks
            }
            if 0 < (part := math.fsum(own.values())) < of_group * (1 - suspects.same):
                explained = f"of the squares of {words} only those that {holders} holds are counted"
                matches.append((abs(lack + of_group - part), "missing", explained))
    off, kind, words = min(matches, key=lambda match: match[0])
    if off <= suspects.same * max(total, total + lack) and off <= EXPLAINED * abs(lack):
        return kind, words
    norms = [math.sqrt(each / total) * right for each in squares.whole.values()]
    for words, value in (
        ("the sum of the norms", math.fsum(norms)),
        ("the largest norm", max(norms)),
        ("the square", right * right),
    ):
        if abs(found - value) <= suspects.same * value:
            return "other values", f"{words} of the parameters" if words != "the square" else "the square of the norm"
    return None


def _simple(count: float) -> list[Fraction]:
    """How often something may be counted, near to a number: not at all, several times, or shared out evenly."""
    several = [Fraction(round(count))] if 1.5 < count < LARGEST_COUNT else []
    return [Fraction(0), *several, *([Fraction(1, round(1 / count))] if 1 / LARGEST_COUNT < count < 0.75 else [])]


def _counted(words: str, count: Fraction) -> tuple[Class, str]:
    if count == 0:
        return "missing", f"the squares of {words} are not counted"
    if count == 2:
        return "doubled", f"the squares of {words} are counted twice"
    return "scaled", f"the squares of {words} are counted {count} times"


def _groups(plan: Plan, squares: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Parameters that have something in common: all, kinds of them, parts of the model, and single ones."""
    held = [each for each in parameters(plan.model) if each.name in squares]

    def group(words: str, chosen: Iterator[Parameter]) -> Iterator[tuple[str, list[str]]]:
        names = [each.name for each in chosen]
        if names:
            yield words, names

    yield from group("all parameters", iter(held))
    yield from group(
        "the parameters that tensor parallelism cuts",
        (each for each in held if each.cut is not None and not each.expert),
    )
    yield from group(
        "the parameters that tensor parallelism does not cut",
        (each for each in held if each.cut is None and not each.expert),
    )
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


def _holders(plan: Plan) -> dict[str, set[int]]:
    ranks = range(plan.world_size)
    places = [(axis, place) for axis in AXES for place in range(degree_of(plan.layout, axis))]
    along = {
        f"{axis} rank {place}": {rank for rank in ranks if _place(plan, rank, axis) == place} for axis, place in places
    }
    return {f"rank {rank}": {rank} for rank in ranks} | along


def _place(plan: Plan, global_rank: int, axis: str) -> int:
    if axis in ("ep", "etp"):
        return plan.layout.expert_coordinates(global_rank)["tp" if axis == "etp" else "ep"]
    return plan.layout.coordinates(global_rank)[axis]


def _box(region: Region) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in region)
