"""The pairwise covering against brute force over all rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st

from shardproof.verify.matrix.covering import Feature, Row, Space, Value, cover


def space_of(factors: Mapping[str, tuple[Value, ...]], most: int) -> Space:
    """Rows whose values add up to `most` at most, without the pair `a=1, b=2`."""

    def total(row: Row) -> int:
        return sum(int(value) for value in row.values())

    return Space(
        factors,
        plain=({name: values[0] for name, values in factors.items()},),
        features=lambda row: tuple(row.items()),
        admits=lambda row: total(row) <= most and not (row["a"] == 1 and row["b"] == 2),
        too_large=lambda row: total(row) > most,
        cost=lambda row, alone: 1 + total(row),
        group=total,
    )


def free_space(factors: Mapping[str, tuple[Value, ...]]) -> Space:
    """All rows are possible and cost the same."""
    return Space(
        factors,
        plain=(dict.fromkeys(factors, 0),),
        features=lambda row: tuple(row.items()),
        admits=lambda row: True,
        too_large=lambda row: False,
        cost=lambda row, alone: 1,
        group=lambda row: 0,
    )


def pairs_of(rows: list[Row]) -> set[tuple[Feature, Feature]]:
    return {pair for row in rows for pair in combinations(row.items(), 2)}


@given(
    sizes=st.lists(st.integers(2, 4), min_size=3, max_size=5),
    most=st.integers(2, 9),
    candidates=st.integers(1, 4),
)
def test_every_pair_that_a_possible_row_has_is_covered_and_no_other(
    sizes: list[int], most: int, candidates: int
) -> None:
    factors = {name: tuple(range(size)) for name, size in zip("abcde", sizes, strict=False)}
    space = space_of(factors, most)
    found = cover(space, candidates=candidates)
    everything = [
        row for values in product(*factors.values()) if space.admits(row := dict(zip(factors, values, strict=True)))
    ]
    assert all(row in everything for row in found.rows)
    assert pairs_of(list(found.rows)) == pairs_of(everything) == set(found.covered)
    possible = {feature for row in everything for feature in row.items()}
    assert {feature for feature, _ in found.impossible} == {
        (name, v) for name, values in factors.items() for v in values
    } - possible
    left = {pair for pair, _ in found.left}
    assert not left & found.covered and all(feature in possible for pair in left for feature in pair)


def test_five_factors_of_four_values_take_few_rows_and_always_the_same() -> None:
    factors = {name: tuple(range(4)) for name in "abcde"}
    space = free_space(factors)
    rows = cover(space).rows
    assert len(rows) <= 30  # 16 at best (an orthogonal array), 1024 rows in all
    assert rows == cover(space).rows


def test_where_nothing_new_is_to_be_had_varied_values_are_drawn_and_others_stay_plain() -> None:
    factors = {"a": (0, 1, 2, 3), "b": (0, 1, 2, 3), "c": (0, 1), "d": (0, 1)}
    space = replace(free_space(factors), features=lambda row: (("a", row["a"]), ("b", row["b"])), varied=frozenset("c"))
    rows = cover(space).rows
    assert len(rows) == 16 and {row["c"] for row in rows} == {0, 1} and {row["d"] for row in rows} == {0}
