"""Digests of expressions: what they must see, and what the unordered one must not."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.core.base.reduction import cut, maximal_nodes
from shardproof.verify.symbolic.expressions import (
    MODULUS,
    add,
    apply,
    exactly_summed,
    interval,
    summed,
    symbol,
    tree,
)
from shardproof.verify.symbolic.layers import _node_value
from shardproof.verify.symbolic.tensors import MisfitError, Part, collective

A, B, C = symbol("a"), symbol("b"), symbol("c")


def test_six_orders_and_two_groupings_of_three_terms_are_one_sum_and_twelve_orders():
    results = [add(add(x, y), z) for x, y, z in permutations([A, B, C])] + [
        add(x, add(y, z)) for x, y, z in permutations([A, B, C])
    ]
    assert len({result.unordered for result in results}) == 1
    assert len({result.ordered for result in results}) == 12


def test_a_missing_and_a_doubled_term_are_other_mathematics():
    whole = summed("library", [A, B, C])
    parts = [summed("library", chosen) for n in (1, 2) for chosen in combinations([A, B, C], n)]
    doubled = [add(whole, each) for each in (A, B, C, whole)]
    assert whole.unordered not in {each.unordered for each in parts + doubled}
    assert add(whole, whole).unordered == 2 * whole.unordered % MODULUS


def test_functions_are_not_linear_in_their_arguments():
    assert apply("norm", add(A, B)).unordered != add(apply("norm", A), apply("norm", B)).unordered
    assert apply("f", A, B).unordered != apply("f", B, A).unordered != apply("g", B, A).unordered
    assert apply("norm", add(A, B)).unordered == apply("norm", add(B, A)).unordered
    assert apply("norm", add(A, B)).ordered != apply("norm", add(B, A)).ordered


def test_a_sum_that_cannot_round_has_no_order():
    assert exactly_summed([A, B, C]) == exactly_summed([C, A, B]) != exactly_summed([A, B])


@given(st.lists(st.integers(0, 100), max_size=6))
def test_intervals_of_tokens_that_tile_add_up_to_the_whole(cuts: list[int]):
    ends = [0, *sorted(cuts), 100]
    parts = [interval(A, lo, hi) for lo, hi in pairwise(ends)]
    assert sum(part.unordered for part in parts) % MODULUS == interval(A, 0, 100).unordered


def test_intervals_that_overlap_or_leave_a_hole_do_not():
    whole = interval(A, 0, 12).unordered
    for other in ([(0, 5), (4, 12)], [(0, 5), (6, 12)], [(0, 12), (0, 12)], [(0, 6)]):
        assert sum(interval(A, lo, hi).unordered for lo, hi in other) % MODULUS != whole


@given(st.integers(1, 40), st.integers(1, 9))
def test_the_canonical_tree_has_one_order_for_every_cut(num_leaves: int, num_ranks: int):
    leaves = {(leaf, leaf + 1): symbol("leaf", leaf) for leaf in range(num_leaves)}
    nodes = {}
    for rank in range(min(num_ranks, num_leaves)):
        for node in maximal_nodes(num_leaves, *cut(num_leaves, min(num_ranks, num_leaves), rank)):
            nodes[node] = _node_value(node, leaves)
    assert tree(num_leaves, nodes) == tree(num_leaves, leaves) is not None


def test_a_tree_with_a_hole_is_not_finished():
    assert tree(4, {(0, 2): A, (2, 3): B}) is None
    assert tree(4, {(1, 3): A, (0, 1): B, (3, 4): C}) is None  # [1, 3) is no node


def part_of(member: int, size: int) -> Part:
    return Part(A, cut(12, size, member))


THIRDS = [cut(12, 3, member) for member in range(3)]


def test_an_all_gather_puts_3_parts_of_12_tokens_together_and_refuses_anything_else():
    parts = [part_of(member, 3) for member in range(3)]
    assert collective("all_gather", parts, THIRDS, by_tokens=True) == [Part(A, (0, 12))] * 3
    for wrong in (
        [parts[0]] * 3,
        [parts[1], parts[0], parts[2]],
        parts[:2],
        [Part(A, (0, 12))] * 3,
        [*parts[:2], Part(B, (8, 12))],
    ):
        with pytest.raises(MisfitError, match="all_gather"):
            collective("all_gather", wrong, THIRDS, by_tokens=True)


def test_a_reduce_scatter_and_an_all_gather_are_an_all_reduce():
    parts = [Part(symbol("term", rank), (0, 12), leaves=(rank, rank + 1, 3)) for rank in range(3)]
    scattered = collective("reduce_scatter", parts, THIRDS, by_tokens=True)
    assert [part.tokens for part in scattered] == [(0, 4), (4, 8), (8, 12)]
    (whole, *_), (reduced, *_) = (
        collective("all_gather", scattered, THIRDS, by_tokens=True),
        collective("all_reduce", parts, THIRDS, by_tokens=True),
    )
    assert whole.value.unordered == reduced.value.unordered and whole.extents == reduced.extents
