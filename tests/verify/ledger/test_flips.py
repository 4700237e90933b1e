"""Flipped bits are distinguished from rounding: by values in the bits of their format, by two digests down to the
element."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.core.base.digest import full_region
from shardproof.verify.causes.summaries import with_flip
from shardproof.verify.ledger.relations import Evidence, Relation, in_bf16, relate, relate_values
from shardproof.verify.ledger.summary import summarize

RIGHT = np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32)


def flipped(right: np.ndarray, *flips: tuple[tuple[int, ...], int]) -> np.ndarray:
    wrong = right.copy()
    for at, bit in flips:
        wrong.view(np.uint32)[at] ^= np.uint32(1 << bit)
    return wrong


def by_values(right: np.ndarray, wrong: np.ndarray, dtype: str = "fp32") -> Relation:
    return relate_values(right, wrong, right.shape, full_region(right.shape), Evidence(dtype=dtype))


def by_digests(right: np.ndarray, wrong: np.ndarray, dtype: str = "fp32") -> Relation:
    expected, found = summarize(right), summarize(wrong)
    return with_flip(relate(expected, found), expected, found, right.shape, full_region(right.shape), dtype)


@pytest.mark.parametrize("reported", [by_values, by_digests])
@given(row=st.integers(0, 39), column=st.integers(0, 49), bit=st.integers(0, 31))
def test_one_flipped_bit_is_named_with_its_element(
    reported: Callable[..., Relation], row: int, column: int, bit: int
) -> None:
    with np.errstate(all="ignore"):
        found = reported(RIGHT, flipped(RIGHT, ((row, column), bit)))
    assert (found.kind, found.words) == (
        "bit flip",
        (f"one bit of 1 element flipped (bit {bit} of fp32, at [{row}, {column}])"),
    )


def test_the_element_is_that_of_the_whole_tensor_for_a_part_of_it() -> None:
    part, region = RIGHT[10:20, 5:], ((10, 20), (5, 50))
    wrong = flipped(np.ascontiguousarray(part), ((2, 3), 12))
    assert relate_values(part, wrong, RIGHT.shape, region).words == (
        "one bit of 1 element flipped (bit 12 of fp32, at [12, 8])"
    )
    expected, found = (summarize(each, RIGHT.shape, region) for each in (part, wrong))
    assert "at [12, 8]" in with_flip(relate(expected, found), expected, found, RIGHT.shape, region, "fp32").words


def test_bits_of_bf16_and_fp16_are_counted_in_their_format() -> None:
    for dtype, right, bit in (
        ("bf16", in_bf16(RIGHT).astype(np.float32), 18),
        ("fp16", RIGHT.astype(np.float16).astype(np.float32), 15),
    ):
        assert by_values(right, flipped(right, ((3, 5), bit)), dtype).words == (
            f"one bit of 1 element flipped (bit 2 of {dtype}, at [3, 5])"
        )


def test_several_elements_of_one_bit_each_are_flips_too() -> None:
    found = by_values(RIGHT, flipped(RIGHT, ((3, 5), 12), ((7, 7), 20)))
    assert (found.kind, found.words) == (
        "bit flip",
        ("one bit each of 2 elements flipped (bits 12, 20 of fp32, first at [3, 5])"),
    )


@pytest.mark.parametrize(
    ("change", "dtype", "kind"),
    [
        # two last places: sums in another order
        (lambda x: flipped(x, ((3, 5), 0), ((7, 7), 0)), "fp32", "order only"),
        (lambda x: flipped(x, ((3, 5), 16)), "bf16", "order only"),  # the last place of bf16
        (lambda x: np.where(np.arange(50) == 9, 2 * x, x), "fp32", "doubled"),  # of which half have one bit more
        (lambda x: x + np.where(x == x[3, 5], np.float32(1e-3), np.float32(0)), "fp32", "other values"),
    ],
)
def test_rounding_and_multiples_are_no_flips(change: Callable[[np.ndarray], np.ndarray], dtype: str, kind: str) -> None:
    right = in_bf16(RIGHT).astype(np.float32) if dtype == "bf16" else RIGHT
    wrong = change(right)
    assert by_values(right, wrong, dtype).kind == kind and by_digests(right, wrong, dtype).kind != "bit flip"


def test_a_doubled_loss_of_few_is_no_flip() -> None:
    right = np.linspace(2.1, 3.9, 16, dtype=np.float32)
    wrong = flipped(right, ((4,), 23))  # 0x40.....: twice the number is one bit more, and so is half of it
    assert by_values(right, wrong).kind in ("doubled", "scaled") and by_digests(right, wrong).kind != "bit flip"
