"""How wrong values relate to right ones: by summaries and by values, the same words for both."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.paths import ROOT
from shardproof.core.base.digest import full_region
from shardproof.core.layout.layout import Layout
from shardproof.verify.ledger.relations import HINTS, Class, Evidence, Known, relate, relate_values
from shardproof.verify.ledger.summary import Summary, summarize

RIGHT = np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32)


def by_summaries(right: np.ndarray, wrong: np.ndarray, wraps_rank: Evidence | None = None):
    return relate(summarize(right), summarize(wrong), wraps_rank)


def by_values(right: np.ndarray, wrong: np.ndarray, wraps_rank: Evidence | None = None):
    return relate_values(right, wrong, right.shape, full_region(right.shape), wraps_rank)


@pytest.mark.parametrize("related", [by_summaries, by_values])
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda x: x * 0, "missing"),
        (lambda x: x * 2, "doubled"),
        (lambda x: x / np.float32(3), "scaled"),
        (lambda x: x * np.float32(2 / 3), "scaled"),
        (lambda x: x * np.float32(-1), "scaled"),
        (lambda x: x * np.float32(0.7316), "scaled"),
        (lambda x: x * np.float32(2**-16), "scaled"),
        (lambda x: x[::-1].copy(), "permuted"),
        (lambda x: np.roll(x, 3, 1), "permuted"),
        (lambda x: np.nextafter(x, x + 1), "order only"),
        (lambda x: x + 1, "other values"),
        (lambda x: x / np.float32(0), "not finite"),
    ],
)
def test_the_relation_of_two_tensors_is_known(
    related: Callable, change: Callable[[np.ndarray], np.ndarray], kind: str
) -> None:
    with np.errstate(all="ignore"):
        assert related(RIGHT, change(RIGHT)).kind == kind


@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 2**32 - 1))
def test_every_ratio_up_to_64_is_found_in_its_lowest_terms(top: int, bottom: int, seed: int) -> None:
    ratio = Fraction(top, bottom)
    right = np.random.default_rng(seed).normal(size=(3, 5, 6)).astype(np.float32)
    wrong = (right * np.float32(float(ratio))).astype(np.float32)
    for found in (by_summaries(right, wrong), by_values(right, wrong)) if ratio != 1 else ():
        assert found.kind == ("doubled" if ratio == 2 else "scaled") and found.words == (
            f"the right values times {ratio}"
        )


@given(st.integers(0, 2**32 - 1), st.floats(0.5, 2.0))
def test_other_values_are_never_called_a_multiple_or_moved(seed: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    right = rng.normal(size=(6, 7)).astype(np.float32)
    wrong = right + (size * rng.normal(size=right.shape)).astype(np.float32)
    evidence = Evidence(
        known=[Known("permuted", "the right ones", right, full_region(right.shape))],
        elsewhere={"another": rng.normal(size=1000).astype(np.float32)},
    )
    assert by_summaries(right, wrong).kind == by_values(right, wrong, evidence).kind == "other values"


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda x: x[4:8].fill(0), "missing", "all zero, in 200 of 2,000 elements: [4:8, 0:50]"),
        (
            lambda x: x[:, 5:].__imul__(2),
            "doubled",
            ("the right values times 2, in 1,800 of 2,000 elements: [0:40, 5:50]"),
        ),
        (lambda x: x.__setitem__([0, 3], x[[3, 0]]), "permuted", "[0:4, 0:50]"),
    ],
)
def test_a_part_that_is_wrong_is_related_by_itself(
    change: Callable[[np.ndarray], object], kind: str, words: str
) -> None:
    wrong = RIGHT.copy()
    change(wrong)
    found = by_values(RIGHT, wrong)
    assert found.kind == kind and words in found.words


def test_stale_values_other_samples_and_the_axis_of_a_ratio_are_named() -> None:
    old, new = (np.random.default_rng(seed).normal(size=99).astype(np.float32) for seed in (0, 1))
    for related in (by_summaries, by_values):
        assert related(new, old, Evidence(before=[summarize(old)])).kind == "stale"
        other = related(new, old, Evidence(others={summarize(old).digest: "sample 3"}))
        assert (other.kind, other.words) == ("permuted", "the values of sample 3")
        assert "1/3, as dp is" in related(new, new / np.float32(3), Evidence(layout=Layout(tp=2, dp=3))).words


@pytest.mark.parametrize("by", [1, -1, 7])
@pytest.mark.parametrize("columns", [False, True])
def test_a_part_that_begins_elsewhere_is_named_by_how_far(by: int, columns: bool) -> None:
    right = RIGHT[:10, :12]
    laid_out = right.T if columns else right
    moved = np.roll(laid_out, -by).reshape(laid_out.shape)
    whole = Evidence(known=[Known("permuted", "the right ones", right, full_region(right.shape))])
    moved[:1, :1] = 5.0  # what rolls in is not of the tensor
    found = by_values(right, moved.T if columns else moved, whole)
    way = f"{abs(by)} {'further on' if by > 0 else 'before'} in memory"
    assert (found.kind, found.words) == ("permuted", f"the right ones, {way}")


def test_values_of_other_tensors_are_named_where_they_lie() -> None:
    right, first, second = RIGHT[:4], RIGHT[10:12], RIGHT[20:22].T
    evidence = Evidence(elsewhere={"up": first, "down": second, "norm": RIGHT[30]})
    found = by_values(right, np.concatenate([first.reshape(-1), second.reshape(-1)]).reshape(4, 50), evidence)
    assert (found.kind, found.words) == ("permuted", "the values of up, down")
    half = np.concatenate([first.reshape(-1), RIGHT[33:35].reshape(-1)]).reshape(4, 50)
    assert by_values(right, half, evidence).kind == "other values"


def test_a_tensor_that_went_through_bf16_is_called_so() -> None:
    wrong = (RIGHT.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    found = by_values(RIGHT, wrong)
    assert found.kind == "order only" and found.words.startswith("rounded to bf16")


def test_a_constant_is_found_by_its_values_where_its_signed_sums_cancel() -> None:
    tenth, one = (np.full(16, value, np.float32) for value in (0.1, 1.0))
    found = by_values(tenth, one, Evidence(others={summarize(one).digest: "head.losses"}))
    assert (found.kind, found.words) == ("scaled", "the right values times 10")


def test_nothing_is_a_multiple_of_zero() -> None:
    assert relate(Summary(), summarize(RIGHT)).words == "not zero as they should be"


@pytest.mark.parametrize("related", [by_summaries, by_values])
def test_counts_that_are_equal_by_chance_are_not_called_permuted(related: Callable) -> None:
    biases = np.float32(1e-3) * np.array([1, -1, 1, -1, 2, 0], dtype=np.float32)
    dropped = np.float32(1e-3) * np.array([-1, 1, 1, -1, 0, 2], dtype=np.float32)
    found = related(biases, dropped)
    assert found.kind == "other values"
    assert related is by_summaries or "whole multiples of 0.001, as counts give" in found.words
    assert (
        related(biases, dropped, Evidence(others={summarize(dropped).digest: "layers.1.mlp.router.expert_bias"})).kind
        == "other values"
    )


def test_many_counts_in_other_places_are_no_chance() -> None:
    counts = np.random.default_rng(0).integers(0, 40, 200).astype(np.float32)
    assert by_values(counts, counts[::-1].copy()).kind == "permuted"


def test_few_elements_of_a_tensor_of_counts_are_given_no_name() -> None:
    biases, zeroed = np.float32([1e-3, -1e-3, 1e-3, -1e-3]), np.float32([1e-3, -1e-3, 0, 0])
    before = (Known("stale", "those before the first step", np.zeros(4, np.float32), ((0, 4),)),)
    assert by_values(biases, zeroed, Evidence(known=before)).kind == "missing"
    assert by_values(biases, zeroed, Evidence(known=before, of_counts=True)).kind == "other values"
    assert by_values(biases, np.float32([-1e-3, 1e-3, 1e-3, -1e-3]), Evidence(of_counts=True)).kind == "other values"


def test_a_part_that_is_old_is_named_with_the_rank_that_keeps_it() -> None:
    old = np.random.default_rng(1).normal(size=RIGHT.shape).astype(np.float32)
    wrong = RIGHT.copy()
    wrong[10:20] = old[10:20]
    shards = {
        0: [((0, 10), (0, 50))],
        1: [((10, 15), (0, 50)), ((15, 20), (0, 50))],
        2: [((20, 40), (0, 50))],
        4: [((10, 20), (0, 50))],
    }
    known = (Known("stale", "those of step 3", old, full_region(RIGHT.shape)),)
    found = by_values(RIGHT, wrong, Evidence(known=known, shards=shards))
    assert (found.kind, found.words) == (
        "stale",
        "those of step 3, in the shard of ranks 1, 4, in 500 of 2,000 elements: [10:20, 0:50]",
    )
    assert "shard" not in by_values(RIGHT, old, Evidence(known=known, shards=shards)).words


def test_every_kind_is_in_the_documentation_with_a_place_to_look() -> None:
    assert set(HINTS) == set(get_args(Class))
    table = (ROOT / "docs" / "verification.md").read_text().partition("### Kinds of difference")[2]
    rows = "".join(
        line.split("|")[1] for line in table.partition("Where several")[0].splitlines() if line.startswith("| `")
    )
    assert {kind for kind in get_args(Class) if f"`{kind}`" in rows} == set(get_args(Class))
