"""Digests add up over any cut, and see every bit and every place."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.core.base.digest import (
    add,
    bit_words,
    digest,
    digest_plainly,
    element_index,
    regions_overlap,
    to_hex,
)


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@given(st.integers(1, 7), st.integers(1, 7), st.data())
def test_digest_of_a_grid_of_pieces_is_that_of_the_whole(rows: int, columns: int, data: st.DataObject) -> None:
    whole = values(rows, columns)
    row_cuts = [0, *sorted(data.draw(st.lists(st.integers(0, rows), max_size=3))), rows]
    column_cuts = [0, *sorted(data.draw(st.lists(st.integers(0, columns), max_size=3))), columns]
    pieces = [
        digest(whole[a:b, c:d], whole.shape, ((a, b), (c, d)))
        for a, b in pairwise(row_cuts)
        for c, d in pairwise(column_cuts)
    ]
    assert add(pieces) == digest(whole)


@given(
    st.lists(st.integers(1, 5), max_size=4), st.sampled_from([np.uint8, np.float16, np.float32, np.float64]), st.data()
)
def test_compiled_loops_give_the_digests_of_numpy(shape: list[int], dtype: type, data: st.DataObject) -> None:
    bounds = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    region = tuple((lo, hi) for lo, hi in bounds)
    part = (100 * values(*shape)).astype(dtype)[tuple(slice(lo, hi) for lo, hi in region)]
    assert digest(part, shape, region) == digest_plainly(
        bit_words(part).reshape(-1), element_index(shape, region).reshape(-1)
    )


def test_two_equal_elements_apart_from_their_places_change_the_digest() -> None:
    whole = values(4, 5)
    swapped = whole.copy()
    swapped[0, 0], swapped[3, 4] = whole[3, 4], whole[0, 0]
    assert digest(swapped) != digest(whole)


def test_one_flipped_bit_of_70000_elements_changes_both_lanes() -> None:
    whole = values(70_000)
    flipped = whole.copy()
    flipped.view(np.uint32)[69_999] ^= 1
    assert all(a != b for a, b in zip(digest(whole), digest(flipped), strict=True))


def test_minus_zero_is_not_zero_and_nan_is_itself() -> None:
    assert digest(np.array([0.0])) != digest(np.array([-0.0]))
    assert digest(np.array([np.nan])) == digest(np.array([np.nan]))


def test_empty_piece_adds_nothing() -> None:
    whole = values(3)
    assert add([digest(whole[:0], (3,), ((0, 0),)), digest(whole)]) == digest(whole)


def test_index_of_a_region_is_its_row_major_place() -> None:
    assert element_index((3, 4), ((1, 3), (2, 4))).tolist() == [[6, 7], [10, 11]]


def test_values_that_do_not_fill_their_region_are_our_bug() -> None:
    with pytest.raises(AssertionError, match="3 values do not fill a region of 2"):
        digest(values(3), (5,), ((0, 2),))


def test_regions_overlap_only_when_they_share_an_element() -> None:
    assert regions_overlap(((0, 2), (0, 2)), ((1, 3), (1, 3)))
    assert not regions_overlap(((0, 2), (0, 2)), ((2, 3), (0, 2)))


def test_hex_is_32_digits_and_bits_are_words_of_the_width() -> None:
    assert len(to_hex(digest(values(2)))) == 32
    assert bit_words(np.array([1.0], dtype=np.float32)).tolist() == [0x3F800000]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_signs_that_flip_together_and_blocks_that_trade_places_are_seen(dtype: type) -> None:
    """Highest bits alone, of any two elements; whole blocks of keys, whose elements keep their places in the block."""
    whole = values(4096).astype(dtype)
    found = {digest(whole)}
    for other in range(1, 2048, 13):
        flipped = whole.copy()
        flipped[[0, other]] *= -1
        found.add(digest(flipped))
    for block in range(1, 4):
        traded = whole.copy()
        traded[:1024], traded[block * 1024 : (block + 1) * 1024] = (
            whole[block * 1024 : (block + 1) * 1024],
            whole[:1024],
        )
        found.add(digest(traded))
    assert len({lane for each in found for lane in each}) == 2 * (1 + len(range(1, 2048, 13)) + 3)


def test_rows_that_move_by_any_number_and_scaled_tensors_have_digests_of_their_own() -> None:
    whole = values(64, 48)
    moved = {digest(np.roll(whole, rows, 0)) for rows in range(64)} | {
        digest(np.roll(whole, columns, 1)) for columns in range(1, 48)
    }
    scaled = {digest(whole * np.float32(2.0**power)) for power in range(1, 20)}
    assert len(moved | scaled | {digest(np.zeros((64, 48), dtype=np.float32)), digest(whole.T)}) == 64 + 47 + 19 + 2
