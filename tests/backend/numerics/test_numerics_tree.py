"""Tensor sums follow the canonical order, written down here a second time one addition after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardproof.backend.numerics import tree
from shardproof.backend.numerics.summands import Summands, sum_over
from shardproof.backend.numerics.tree import fold, token_sums, tree_fold
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.base.reduction import cut, maximal_nodes, split


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tree_value(rows, lo, hi):
    if hi - lo == 1:
        return rows[lo]
    left, right = split((lo, hi))
    return tree_value(rows, *left) + tree_value(rows, *right)


def folded(rows):
    while len(rows) > 1:
        half = len(rows) // 2
        rows = [a + b for a, b in zip(rows[:half], rows[len(rows) - half :], strict=True)] + rows[
            half : len(rows) - half
        ]
    return rows[0]


@given(st.integers(1, 40))
def test_tree_fold_is_the_canonical_tree(length):
    x = rand(length, 3)
    assert torch.equal(tree_fold(x, 0), tree_value(list(x), 0, length))
    assert torch.equal(tree_fold(x.t().contiguous(), 1), tree_value(list(x), 0, length))


@given(st.integers(1, 40))
def test_fold_adds_the_upper_half_to_the_lower_and_lets_the_middle_wait(length):
    x = rand(length, 3)
    assert torch.equal(fold(x, 0), folded(list(x)))


@pytest.mark.parametrize(("sequence", "block"), [(1, 4), (3, 4), (4, 4), (16, 4), (18, 4), (9, 3), (7, 1)])
def test_token_sums_fold_inside_blocks_and_tree_over_blocks(sequence, block):
    x = rand(2, sequence, 5)
    sums = token_sums(x, block)
    for sample, total in zip(x, sums, strict=True):
        blocks = [folded(list(sample[first : first + block])) for first in range(0, sequence, block)]
        assert torch.equal(total, tree_value(blocks, 0, len(blocks)))
    before = x.clone()
    sums.add_(1)
    assert torch.equal(x, before)  # the sums are nobody else's memory


@pytest.mark.parametrize("width", [1, 2, 5])
def test_token_sums_of_a_slice_are_the_slice_of_the_sums(width):
    x = rand(2, 18, 7)
    assert torch.equal(token_sums(x[..., 1 : 1 + width].contiguous(), 4), token_sums(x, 4)[:, 1 : 1 + width])


def sum_rank(transport, payload):
    rows, size = payload
    group = transport.group("all", "dp", range(size))
    summands = Summands(len(rows), tuple(maximal_nodes(len(rows), *cut(len(rows), size, rank)) for rank in range(size)))
    values = torch.stack([tree_value(list(rows), *node) for node in summands.nodes[group.rank]])
    return sum_over(group, values, summands)


@pytest.mark.parametrize(("num_leaves", "size"), [(6, 1), (6, 2), (6, 4), (10, 5), (7, 3), (8, 8), (12, 5)])
@pytest.mark.parametrize("width", [3, 40])
def test_every_member_gets_the_whole_tree_for_any_uneven_cut(num_leaves, size, width):
    rows = rand(num_leaves, width)
    for total in run_threads(MemoryWorld(size), sum_rank, (rows, size)):
        assert torch.equal(total, tree_value(list(rows), 0, num_leaves))


@pytest.mark.parametrize("block", [1, 2, 3, 16, 32, 1000])
@pytest.mark.parametrize("shape", [(2, 128, 96), (1, 1, 5), (3, 7, 70), (2, 33, 64), (2, 100, 129), (1, 5, 1)])
def test_compiled_loops_add_tokens_as_plain_ones_do(
    shape: tuple[int, int, int], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tree.compiled is None:
        pytest.skip("the compiled loops are not built here")
    samples, tokens, width = shape
    wide = torch.randn(samples, tokens, width + 7, generator=torch.Generator().manual_seed(0))
    for x in (wide[..., 2:-5], wide[..., 2:-5].contiguous(), wide.flip(1)[..., :width]):
        found = tree.token_sums(x, block), tree.block_sums(x, block)
        with monkeypatch.context() as without:
            without.setattr(tree, "compiled", None)
            plain = tree.token_sums(x, block), tree.block_sums(x, block)
        assert all(torch.equal(*pair) for pair in zip(found, plain, strict=True))
