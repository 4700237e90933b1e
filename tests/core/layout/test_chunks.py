"""Chunks of sequences: zig-zag over context-parallel ranks, balanced under a causal mask, whole tree nodes
wherever they are cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.core.base.reduction import CarryTree, maximal_nodes
from shardproof.core.layout.chunks import Chunks


def test_rank_1_of_3_holds_the_second_and_the_last_but_one_of_6_chunks():
    chunks = Chunks(24, 3, 1)
    assert (chunks.size, chunks.num_own, chunks.starts, chunks.spans) == (4, 8, (4, 16), ((4, 8), (16, 20)))
    assert chunks.places(2, 6) == ((6, 8), (16, 18)) and [chunks.local(item) for item in (4, 7, 16, 19)] == [0, 3, 4, 7]
    assert [chunks.rows_before(4, end) for end in (0, 4, 6, 8, 24)] == [0, 0, 2, 4, 4]


def test_the_two_chunks_of_the_last_rank_touch_and_are_one_span_and_one_node():
    assert Chunks(16, 4, 3).spans == ((6, 10),)
    assert Chunks(12, 3, 2).nodes() == ((4, 8),)


def test_one_rank_holds_everything_whatever_the_length():
    assert Chunks(7).spans == ((0, 7),) and Chunks(7).nodes() == ((0, 7),) and Chunks(7).places(2, 5) == ((2, 5),)


@given(st.integers(1, 8), st.integers(1, 12))
def test_ranks_partition_the_items_and_see_equally_many_pairs_under_a_causal_mask(cp: int, size: int):
    ranks = [Chunks(2 * cp * size, cp, rank) for rank in range(cp)]
    held = [[item for lo, hi in chunks.spans for item in range(lo, hi)] for chunks in ranks]
    assert sorted(item for items in held for item in items) == list(range(2 * cp * size))
    assert {sum(item + 1 for item in items) for items in held} == {sum(range(2 * cp * size + 1)) // cp}
    for chunks, items in zip(ranks, held, strict=True):
        assert [chunks.local(item) for item in items] == list(range(chunks.num_own))


@given(st.data())
def test_nodes_of_any_cut_of_all_ranks_finish_the_tree(data: st.DataObject):
    cp, size = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))
    tree: CarryTree[str] = CarryTree(2 * cp * size, lambda a, b: f"({a}{b})")
    whole: CarryTree[str] = CarryTree(2 * cp * size, lambda a, b: f"({a}{b})")
    for leaf in range(2 * cp * size):
        whole.insert((leaf, leaf + 1), f"{leaf},")
    for rank in range(cp):
        chunks = Chunks(2 * cp * size, cp, rank)
        cut = data.draw(st.integers(0, chunks.num_own))
        for lo, hi in ((0, cut), (cut, chunks.num_own)):
            for node in chunks.nodes(lo, hi):
                part: CarryTree[str] = CarryTree(node[1] - node[0], lambda a, b: f"({a}{b})")
                for leaf in range(*node):
                    part.insert((leaf - node[0], leaf - node[0] + 1), f"{leaf},")
                tree.insert(node, part.root())
    assert tree.root() == whole.root()


@pytest.mark.parametrize(("cp", "size"), [(2, 8), (3, 4), (5, 2)])
def test_aligned_chunks_are_one_node_each(cp: int, size: int):
    for rank in range(cp - 1):
        assert Chunks(2 * cp * size, cp, rank).nodes() == Chunks(2 * cp * size, cp, rank).spans
        assert all(maximal_nodes(2 * cp * size, *span) == (span,) for span in Chunks(2 * cp * size, cp, rank).spans)
