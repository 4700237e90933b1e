"""Which combinations of values to try so that every pair of values occurs together: a deterministic pairwise covering.

Most faults of combined features need two of them (Kuhn, Wallace & Gallo 2004, IEEE TSE 30(6)), and pairs take dozens of
rows where all combinations take millions. Rows are built one by one, each around a pair that has not occurred yet,
other values chosen for the new pairs they bring (the greedy of AETG: Cohen, Dalal, Fredman & Patton 1997, IEEE TSE
23(7)). A caller says which rows are possible.
"""

from __future__ import annotations

import functools
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product

Value = str | int
Row = Mapping[str, Value]
Feature = tuple[str, Value]
"""A property of a row that is to meet every other one: most are a factor and its value."""
Pair = tuple[Feature, Feature]

NUM_DRAWN = 2000
"""Rows that are drawn in search of a possible one before a pair is given up."""


@dataclass(frozen=True)
class Space:
    """What rows are made of. `factors` maps names to values; `plain` are rows to start from, which
    have every kind of feature.

    `features(row)` are the properties whose pairs count. `admits(row)` says whether the row is possible,
    `too_large(row)` that it is not and larger values would not help. Rows are chosen by new pairs per `cost(row,
    alone)`, where `alone` is true for the first row of its `group(row)`. Where no value of a factor brings a new pair,
    those of `varied` are drawn.
    """

    factors: Mapping[str, Sequence[Value]]
    plain: Sequence[Row]
    features: Callable[[Row], Sequence[Feature]]
    admits: Callable[[Row], bool]
    too_large: Callable[[Row], bool]
    cost: Callable[[Row, bool], float]
    group: Callable[[Row], Hashable]
    varied: frozenset[str] = frozenset()

    def pairs(self, row: Row) -> Iterator[Pair]:
        """The pairs of features of a row, each in the order of `features`."""
        return combinations(self.features(row), 2)


@dataclass(frozen=True)
class Covering:
    """Possible rows that hold every pair of `covered`, and what no possible row was found for, with the plainest row
    that would have it: single features, and pairs of features that are possible alone."""

    rows: tuple[Row, ...]
    covered: frozenset[Pair]
    impossible: tuple[tuple[Feature, Row], ...]
    left: tuple[tuple[Pair, Row], ...]


def all_pairs(space: Space) -> dict[Pair, Row]:
    """Every pair that two factors can have, with the plainest row that has it, in the order of the factors."""
    found: dict[Pair, Row] = {}
    bits = _Bits()
    met: defaultdict[Feature, int] = defaultdict(int)  # the features that stood behind one in a row
    for first, second in combinations(space.factors, 2):
        for plain, a, b in product(space.plain, space.factors[first], space.factors[second]):
            row = {**plain, first: a, second: b}
            features = space.features(row)
            behind = bits.of(features)
            for index, feature in enumerate(features):
                behind &= ~bits[feature]
                if behind & ~met[feature]:  # few rows have a new pair
                    met[feature] |= behind
                    for other in features[index + 1 :]:
                        found.setdefault((feature, other), row)
    return found


def cover(space: Space, *, candidates: int = 4, seed: int = 0) -> Covering:
    """Rows that hold every pair which a possible row can have. The same space gives the same rows."""
    impossible = dict(_impossible(space))
    wanted = {pair: row for pair, row in all_pairs(space).items() if impossible.keys().isdisjoint(pair)}
    missing = _Missing(wanted)
    rows: list[Row] = []
    left: list[tuple[Pair, Row]] = []
    groups: set[Hashable] = set()
    draw = random.Random(seed)
    for pair, plain in wanted.items():
        if not missing.has(pair):
            continue
        start = None if space.too_large(plain) else first_possible(space, plain, pair)
        if start is None:
            left.append((pair, plain))
            continue
        found = [_grown(space, start, pair, missing, draw) for _ in range(candidates)]
        best = max(
            found, key=lambda row: missing.number(space.features(row)) / space.cost(row, space.group(row) not in groups)
        )
        rows.append(best)
        groups.add(space.group(best))
        missing.remove(space.features(best))
    return Covering(
        tuple(rows), frozenset(wanted.keys() - {pair for pair, _ in left}), tuple(impossible.items()), tuple(left)
    )


class _Bits(dict[Feature, int]):
    """A bit of its own for every feature that is asked for."""

    def __missing__(self, feature: Feature) -> int:
        return self.setdefault(feature, 1 << len(self))

    def of(self, features: Sequence[Feature]) -> int:
        """The bits of some features."""
        return functools.reduce(int.__or__, map(self.__getitem__, features), 0)


class _Missing:
    """The pairs that no row has yet: for every feature a bit set of the partners that it still has to meet."""

    def __init__(self, pairs: Iterable[Pair]):
        self._bits = _Bits()
        self._partners: defaultdict[Feature, int] = defaultdict(int)
        for first, second in pairs:
            self._partners[first] |= self._bits[second]
            self._partners[second] |= self._bits[first]

    def has(self, pair: Pair) -> bool:
        return bool(self._partners[pair[0]] & self._bits[pair[1]])

    def number(self, features: Sequence[Feature]) -> int:
        """How many of the pairs of some features are missing."""
        found = self._bits.of(features)
        return sum([(self._partners[feature] & found).bit_count() for feature in features]) // 2

    def remove(self, features: Sequence[Feature]) -> None:
        found = self._bits.of(features)
        for feature in features:
            self._partners[feature] &= ~found


def _impossible(space: Space) -> Iterator[tuple[Feature, Row]]:
    """The features that no row near a plain one can have."""
    seen: set[Feature] = set()
    for plain, (name, values) in product(space.plain, space.factors.items()):
        for value in values:
            row = {**plain, name: value}
            for feature in space.features(row):
                if feature not in seen:
                    seen.add(feature)
                    if first_possible(space, row, (feature,)) is None:
                        yield feature, row


def first_possible(space: Space, plain: Row, features: Sequence[Feature]) -> Row | None:
    """The first possible row with some features: `plain`, one with one or two other values, or one that is
    drawn; None without any."""
    return next(
        (row for row in _nearby(space, plain) if set(features) <= set(space.features(row)) and space.admits(row)), None
    )


def _nearby(space: Space, plain: Row) -> Iterator[Row]:
    for number in (0, 1, 2):
        for names in combinations(space.factors, number):
            for values in product(*(space.factors[name] for name in names)):
                yield {**plain, **dict(zip(names, values, strict=True))}
    draw = random.Random(0)
    for _ in range(NUM_DRAWN):
        yield {name: draw.choice((plain[name], draw.choice(values))) for name, values in space.factors.items()}


def _grown(space: Space, start: Row, features: Sequence[Feature], missing: _Missing, draw: random.Random) -> Row:
    """A possible row with `features` whose other values were chosen, one factor after
    another, by missing pairs."""
    row = start
    for name in draw.sample(list(space.factors), len(space.factors)):
        values = draw.sample(list(space.factors[name]), len(space.factors[name]))
        others = [other for value in values if set(features) <= set(space.features(other := {**row, name: value}))]
        row = _best_of(space, others if name in space.varied else [row, *others], missing)
    return row


def _best_of(space: Space, rows: Sequence[Row], missing: _Missing) -> Row:
    """The possible row with the most missing pairs, the first of several. One of them is possible."""
    gains = [missing.number(space.features(row)) for row in rows]
    return next(rows[i] for i in sorted(range(len(rows)), key=lambda i: -gains[i]) if space.admits(rows[i]))
