"""What summaries show beyond a distance: terms whose sum was not taken, and values that are all off by one number."""

from __future__ import annotations

import math

import numpy as np

from shardproof.core.base.digest import full_region
from shardproof.verify.causes.summaries import explained_by_summaries
from shardproof.verify.ledger.ledger import Piece
from shardproof.verify.ledger.relations import Relation, relate
from shardproof.verify.ledger.summary import summarize

RIGHT = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)


def piece(values: np.ndarray, rank: int = 0) -> Piece:
    return Piece(rank, values.shape, full_region(values.shape), summarize(values))


def looked_at(right: np.ndarray, *copies: np.ndarray) -> Relation:
    """How the first of several copies relates to what is right, the others being those of other ranks."""
    held = [piece(each, rank) for rank, each in enumerate(copies)]
    expected = summarize(right)
    return explained_by_summaries(relate(expected, held[0].summary), expected, held[0].summary, held[0], held, 1e-5)


def test_terms_that_were_not_added_are_found_from_all_of_them() -> None:
    first, second = RIGHT * np.float32(0.25) + 1, RIGHT * np.float32(0.75) - 1
    found = looked_at(RIGHT, first, second, second)
    assert (found.kind, found.words) == (
        "missing",
        "what ranks 0, 1, 2 hold is 2 different tensors that add up to the right values: their sum was not taken",
    )
    assert looked_at((first + second) / 2, first, second).words.endswith(
        "are on average the right values: their average was not taken"
    )
    assert looked_at(RIGHT, first, first).kind == "other values"


def test_a_shift_of_few_elements_is_reported_with_the_logarithm_that_it_may_be() -> None:
    assert looked_at(RIGHT, RIGHT + np.float32(math.log(3))).words == (
        "the right values plus 1.09861 everywhere, which is log(3)"
    )
    assert looked_at(RIGHT, RIGHT - np.float32(0.3)).words == "the right values less 0.3 everywhere"


def test_what_is_known_better_than_by_a_distance_stays() -> None:
    assert looked_at(RIGHT, RIGHT * 2, RIGHT).kind == "doubled"
