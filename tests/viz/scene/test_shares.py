"""Shares of buckets against a brute-force sum over spans."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardproof.viz.scene.shares import Column, bucket_shares, stack


def test_a_span_over_one_and_a_half_buckets():
    shares = bucket_shares(np.array([0.0]), np.array([1.5]), np.array([1.0]), np.array([0.0, 1.0, 2.0, 3.0]))
    assert shares.tolist() == [1.0, 0.5, 0.0]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10), st.sampled_from([0.25, 0.5])), max_size=4),
    st.integers(1, 7),
)
def test_shares_equal_the_sum_over_spans(rows, num_buckets):
    starts = np.array([row[0] for row in rows], dtype=float)
    ends = starts + np.array([row[1] for row in rows], dtype=float)
    weights = np.array([row[2] for row in rows])
    edges = np.linspace(0, 50, num_buckets + 1)
    expected = [
        min(
            1.0,
            sum(w * max(0.0, min(end, b) - max(start, a)) for start, end, w in zip(starts, ends, weights, strict=True))
            / (b - a),
        )
        for a, b in pairwise(edges)
    ]
    np.testing.assert_allclose(bucket_shares(starts, ends, weights, edges), expected, atol=1e-12)


def test_stack_piles_columns_and_joins_equal_neighbours():
    edges = np.array([0.0, 1.0, 2.0, 3.0])
    columns = [Column(0, 0, np.array([0.25, 0.25, 0.0])), Column(1, 0, np.array([0.5, 0.5, 1.0]))]
    assert list(stack(columns, edges)) == [
        (0.0, 2.0, 0, 0, 0.0, 0.25),
        (0.0, 2.0, 1, 0, 0.25, 0.75),
        (2.0, 3.0, 1, 0, 0.0, 1.0),
    ]


def test_stack_of_nothing_is_empty():
    assert list(stack([], np.array([0.0, 1.0]))) == []
