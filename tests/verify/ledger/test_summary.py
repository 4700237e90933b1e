"""Summaries add up over any cut, and distinguish scaled, permuted and slightly different tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.core.base.digest import bit_words, element_index
from shardproof.verify.ledger.summary import Summary, add_summaries, summarize, summarize_plainly


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def equal(one: Summary, other: Summary) -> bool:
    same = (one.digest, one.value_digest, one.largest) == (other.digest, other.value_digest, other.largest)
    return same and one.sums == pytest.approx(other.sums, abs=1e-12)


@given(st.integers(0, 7), st.integers(0, 40), st.data())
def test_summaries_of_a_grid_of_pieces_add_up_and_are_those_of_numpy(
    rows: int, columns: int, data: st.DataObject
) -> None:
    whole = values(rows, columns)
    row_cuts = [0, *sorted(data.draw(st.lists(st.integers(0, rows), max_size=3))), rows]
    column_cuts = [0, *sorted(data.draw(st.lists(st.integers(0, columns), max_size=3))), columns]
    regions = [((a, b), (c, d)) for a, b in pairwise(row_cuts) for c, d in pairwise(column_cuts)]
    pieces = [summarize(whole[a:b, c:d], whole.shape, ((a, b), (c, d))) for (a, b), (c, d) in regions]
    plain = summarize_plainly(bit_words(whole).reshape(-1), element_index(whole.shape).reshape(-1))
    assert equal(add_summaries(pieces), plain) and equal(summarize(whole), plain)
    assert plain.largest == np.abs(whole).max(initial=0)


@given(st.integers(1, 80), st.integers(1, 1100), st.data())
def test_a_matrix_that_lies_by_columns_has_the_summary_of_its_copy(
    rows: int, columns: int, data: st.DataObject
) -> None:
    top, left = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    shape, region = (rows + 4, columns + 4), ((top, top + rows), (left, left + columns))
    by_columns = values(columns, rows).T
    assert equal(summarize(by_columns, shape, region), summarize(np.ascontiguousarray(by_columns), shape, region))


def test_the_same_values_in_other_places_have_one_digest() -> None:
    one, turned = summarize(values(60, 50)), summarize(np.ascontiguousarray(values(60, 50)[::-1]))
    assert one.value_digest == turned.value_digest and one.digest != turned.digest
    assert summarize(2 * values(60, 50)).value_digest != one.value_digest


def test_the_sums_of_a_multiple_are_the_multiple() -> None:
    one, twice = summarize(values(3000)), summarize(2 * values(3000))
    assert twice.sums == tuple(2 * each for each in one.sums)


@pytest.mark.parametrize("distance", [1e-6, 1e-2, 30.0])
def test_distances_are_seen_within_a_factor_and_nothing_is_at_distance_0(distance: float) -> None:
    one, step = values(200, 300), values(200, 300, seed=1).astype(np.float64)
    other = (one + distance * step / np.linalg.norm(step)).astype(np.float32)
    exact = float(np.linalg.norm(one.astype(np.float64) - other))
    assert exact / 3 < summarize(one).distance(summarize(other)) < 3 * exact
    assert summarize(one).distance(summarize(one.copy())) == 0.0
    assert summarize(one).norm == pytest.approx(np.linalg.norm(one), rel=1.0)


def test_signs_of_equal_numbers_do_not_cancel_in_tensors_of_up_to_4096_elements_nor_in_even_parts_of_those() -> None:
    words, index = bit_words(np.ones(4096, np.float32)), np.arange(4096, dtype=np.uint64)
    eights = [summarize_plainly(words[at : at + 8], index[at : at + 8]) for at in range(0, 4096, 8)]

    def share(summaries: Iterable[Summary], size: int) -> float:
        return float(np.linalg.norm(np.sum([each.sums for each in summaries], axis=0))) / math.sqrt(8 * size)

    whole = [share(eights[:count], 8 * count) for count in range(1, 513)]
    assert min(whole) > 0.7 and max(whole) < 1.3
    parts = [
        share(eights[at : at + width], 8 * width)
        for width in (2, 3, 4, 6, 8, 16)
        for at in range(0, 512 - width + 1, width)
    ]
    assert min(parts) > 0.4


def test_a_distance_is_at_least_what_the_largest_magnitudes_differ_by() -> None:
    one, other = Summary(largest=3.0), Summary(largest=1.0, sums=(0.5,) * 8)
    assert one.distance(other) == 2.0 and one.norm == 3.0


def test_a_nan_is_the_largest() -> None:
    broken = values(5)
    broken[2] = np.nan
    assert np.isnan(summarize(broken).largest) and np.isnan(
        add_summaries([summarize(values(3)), summarize(broken)]).largest
    )
