"""Divisions by a rank's own number of tokens are found by the numbers, where they are unequal."""

from __future__ import annotations

import numpy as np
import pytest

from shardproof.verify.causes.local_means import explained_by_counts
from shardproof.verify.mutations.plans import tiny
from shardproof.verify.run.contributions import Part

PLAN = tiny(dp=2, samples=4)
COUNTS = (5, 7, 16, 9)
COUNTED = [Part(sample, (at, at + 1)) for sample, count in enumerate(COUNTS) for at in range(count)]
GRADIENT = [Part(sample, (lo, lo + 4)) for sample in range(4) for lo in range(0, 16, 4)]
TOTAL, BY_RANK = 37, (12, 25)
OWN = "divided by its own number of tokens, 12 of the part of dp rank 0"


def reported(factor_of, number: int = 30, counted=COUNTED, parts=GRADIENT):
    values = np.random.default_rng(0).normal(size=(len(parts), number))
    factors = np.array([factor_of(part) for part in parts])
    expected, found = values.sum(0), factors @ values
    return explained_by_counts(PLAN, parts, values, found - expected, counted, "fp32")


@pytest.mark.parametrize("number", [30, 1])
@pytest.mark.parametrize(
    ("factor_of", "words"),
    [
        (lambda part: TOTAL / BY_RANK[part.sample // 2], f"each part is {OWN}"),
        (
            lambda part: TOTAL / BY_RANK[part.sample // 2] / 2,
            ("the mean of 2 means, each over its own number of tokens, 12 of"),
        ),
        (
            lambda part: TOTAL / 25,
            ("the whole sum is divided by the 25 tokens of the part of dp rank 1 (samples 2-3), and not by all 37"),
        ),
        (
            lambda part: TOTAL / 25 * (part.sample > 1),
            ("the mean over the 25 tokens of the part of dp rank 1 (samples 2-3) alone"),
        ),
        (
            lambda part: TOTAL / COUNTS[part.sample] / 4,
            ("the mean of 4 means, each over its own number of tokens, 5 of the part of mic"),
        ),
    ],
)
def test_what_was_divided_by_the_tokens_of_a_part_is_a_local_mean(factor_of, words: str, number: int) -> None:
    found = reported(factor_of, number)
    assert found is not None and found[0] == "local mean" and words in found[1]


def test_equal_counts_and_whole_multiples_say_nothing() -> None:
    even = [Part(sample, (at, at + 1)) for sample in range(4) for at in range(8)]
    assert reported(lambda part: 2, counted=even) is None
    halves = [Part(sample, (at, at + 1)) for sample, count in enumerate((4, 4, 8, 16)) for at in range(count)]
    assert reported(lambda part: 2, counted=halves) is None  # 32/16, which a sum taken twice is, too
    assert reported(lambda part: 1.0001) is None


def test_the_gradient_of_a_sample_is_that_of_its_rank() -> None:
    own = [Part(2)]
    words = f"each part is {OWN} (samples 0-1); 25 of the part of dp rank 1 (samples 2-3), and not by all 37"
    assert reported(lambda part: TOTAL / 25, parts=own) == ("local mean", words)
