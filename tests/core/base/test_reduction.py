"""The canonical trees against a recursive definition, and the promise that no cut and no order of arrival
changes a sum's expression."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.core.base.reduction import CarryTree, cut, maximal_nodes, merges_of, sibling, split

SIZES = st.integers(1, 70)


def expression(lo: int, hi: int):
    """The sum over [lo, hi) as nested pairs, written down from the definition: the left child is the
    largest power of two below."""
    if hi - lo == 1:
        return lo
    left = 1
    while left * 2 < hi - lo:
        left *= 2
    return expression(lo, lo + left), expression(lo + left, hi)


def all_nodes(lo: int, hi: int) -> set[tuple[int, int]]:
    if hi - lo == 1:
        return {(lo, hi)}
    left, right = split((lo, hi))
    return {(lo, hi)} | all_nodes(*left) | all_nodes(*right)


def test_six_leaves_split_after_four_and_then_after_two():
    assert expression(0, 6) == (((0, 1), (2, 3)), (4, 5))
    assert split((0, 6)) == ((0, 4), (4, 6))
    assert split((0, 7)) == ((0, 4), (4, 7))
    assert split((0, 8)) == ((0, 4), (4, 8))


@given(SIZES, st.data())
def test_maximal_nodes_are_the_nodes_inside_whose_parents_are_not(num_leaves, data):
    lo = data.draw(st.integers(0, num_leaves))
    hi = data.draw(st.integers(lo, num_leaves))
    inside = {node for node in all_nodes(0, num_leaves) if lo <= node[0] and node[1] <= hi}
    maximal = {
        node
        for node in inside
        if not any(other != node and other[0] <= node[0] and node[1] <= other[1] for other in inside)
    }
    found = maximal_nodes(num_leaves, lo, hi)
    assert found == tuple(sorted(maximal))
    assert sum(last - first for first, last in found) == hi - lo
    assert len(found) <= max(1, 2 * math.ceil(math.log2(num_leaves + 1)))


@given(SIZES, st.data())
def test_sibling_is_the_other_child_and_none_for_the_root(num_leaves, data):
    node = data.draw(st.sampled_from(sorted(all_nodes(0, num_leaves))))
    other = sibling(num_leaves, node)
    if node == (0, num_leaves):
        assert other is None
    else:
        assert split((min(node[0], other[0]), max(node[1], other[1]))) == tuple(sorted((node, other)))


def test_sibling_refuses_an_interval_that_is_no_node():
    with pytest.raises(ValueError, match=r"\(1, 3\) is no node of the tree over 6 leaves"):
        sibling(6, (1, 3))


@given(SIZES, st.integers(1, 9), st.randoms())
def test_any_cut_and_any_order_of_arrival_give_the_recursive_expression(num_leaves, num_ranks, random):
    nodes = [node for rank in range(num_ranks) for node in maximal_nodes(num_leaves, *cut(num_leaves, num_ranks, rank))]
    random.shuffle(nodes)
    tree = CarryTree(num_leaves, lambda left, right: (left, right))
    for node in nodes:
        tree.insert(node, expression(*node))
    assert tree.root() == expression(0, num_leaves)


@given(SIZES)
def test_in_order_arrivals_hold_at_most_log2_n_plus_1_values(num_leaves):
    tree = CarryTree(num_leaves, lambda left, right: None)
    held = 0
    for leaf in range(num_leaves):
        tree.insert((leaf, leaf + 1), None)
        held = max(held, len(tree.nodes))
    assert held <= math.floor(math.log2(num_leaves)) + 1
    assert tree.nodes == ((0, num_leaves),)


def test_an_unfinished_tree_has_no_root_and_says_what_it_holds():
    tree = CarryTree(6, lambda left, right: left + right)
    for leaf in (0, 1, 4):
        tree.insert((leaf, leaf + 1), 1)
    with pytest.raises(ValueError, match=r"tree over 6 leaves is unfinished: it holds \[\(0, 2\), \(4, 5\)\]"):
        tree.root()


@given(st.integers(0, 200), st.integers(1, 17))
def test_cut_covers_everything_in_order_and_evenly(num_items, num_parts):
    parts = [cut(num_items, num_parts, part) for part in range(num_parts)]
    assert parts[0][0] == 0 and parts[-1][1] == num_items
    assert all(before[1] == after[0] for before, after in pairwise(parts))
    sizes = [hi - lo for lo, hi in parts]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@given(st.data(), st.integers(1, 200))
def test_merges_of_nodes_from_left_to_right_are_those_of_the_carry_tree(data: st.DataObject, num_leaves: int) -> None:
    bounds = sorted(data.draw(st.lists(st.integers(0, num_leaves), max_size=8)))
    nodes = [node for lo, hi in pairwise([0, *bounds, num_leaves]) for node in maximal_nodes(num_leaves, lo, hi)]
    tree: CarryTree[str] = CarryTree(num_leaves, lambda left, right: f"({left}+{right})")
    held: list[str] = []
    for node, count in zip(nodes, merges_of(num_leaves, nodes), strict=True):
        tree.insert(node, str(node))
        held.append(str(node))
        for _ in range(count):
            right = held.pop()
            held[-1] = f"({held[-1]}+{right})"
        assert held == [tree.value(each) for each in tree.nodes]
    assert held == [tree.root()]
