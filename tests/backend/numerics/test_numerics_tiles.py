"""Products by tiles: the sums of the canonical tree, bit for bit, wherever tiles lie, and no farther from
fp64 than the library's."""

from __future__ import annotations

import pytest
import torch

from shardproof.backend.numerics.exact import ExactNumerics
from shardproof.backend.numerics.fast import FastNumerics
from shardproof.backend.numerics.outer_sums import outer_sum
from shardproof.backend.numerics.owned_leaves import OwnedLeaves
from shardproof.backend.numerics.same_bits import multiply_into
from shardproof.backend.numerics.tiles import contract_tiles, follow, project_tiles, scratch, steps, tree_over
from shardproof.backend.numerics.tree import token_sums
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.base.reduction import maximal_nodes, split
from shardproof.core.layout.leaves import Leaves, leaf_sizes
from shardproof.core.model.model_presets import model_preset

CPU = torch.device("cpu")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def intervals(length: int, size: int) -> tuple[tuple[int, int], ...]:
    return tuple((lo, min(lo + size, length)) for lo in range(0, length, size))


def tree_sum(terms: list[torch.Tensor], node: tuple[int, int]) -> torch.Tensor:
    """The canonical tree, every addition in a tensor of its own."""
    if node[1] - node[0] == 1:
        return terms[node[0]]
    left, right = split(node)
    return tree_sum(terms, left) + tree_sum(terms, right)


SHAPES = [(1, 1, 5, 1, 1), (7, 6, 3, 2, 4), (20, 18, 10, 5, 8), (33, 17, 24, 1, 8), (128, 60, 48, 12, 32)]
"""Rows, cut features, whole features, features of a leaf, rows of a block."""


@pytest.mark.parametrize(("rows", "cut", "whole", "leaf", "block"), SHAPES)
def test_every_tile_is_a_product_of_its_own_and_tiles_add_up_as_the_tree(
    rows: int, cut: int, whole: int, leaf: int, block: int
) -> None:
    x, weight, y = drawn(rows, whole), drawn(cut, whole, seed=1), drawn(rows, cut, seed=2)
    features, blocks = intervals(cut, leaf), intervals(rows, block)
    projected, outer = project_tiles(x, weight, features, blocks), outer_sum(y, x, features, blocks)
    nodes = maximal_nodes(len(features) + 3, 1, 1 + len(features))  # leaves 1, 2, ... of a sum with three more
    contracted = contract_tiles(y, weight, features, blocks, tuple((lo - 1, hi - 1) for lo, hi in nodes))
    for first, last in blocks:
        terms = [y[first:last, lo:hi].contiguous() @ weight[lo:hi] for lo, hi in features]
        for value, (lo, hi) in zip(contracted, nodes, strict=True):
            assert torch.equal(value[first:last], tree_sum(terms, (lo - 1, hi - 1)))
        for lo, hi in features:
            alone = torch.empty(last - first, hi - lo)
            multiply_into(alone, x[first:last].clone(), weight[lo:hi].clone().t())
            assert torch.equal(projected[first:last, lo:hi], alone)
            torch.testing.assert_close(alone, x[first:last] @ weight[lo:hi].t())
    for lo, hi in features:
        terms = [y[first:last, lo:hi].contiguous().t() @ x[first:last] for first, last in blocks]
        assert torch.equal(outer[lo:hi], tree_sum(terms, (0, len(blocks))))


def test_one_column_is_multiplied_apart_because_its_bits_follow_the_strides_of_the_result() -> None:
    x, weight = drawn(24, 37), drawn(1, 37, seed=1)
    wide, alone = torch.empty(24, 6), torch.empty(24, 1)
    multiply_into(wide[:, 3:4], x, weight.t())
    multiply_into(alone, x, weight.t())
    assert torch.equal(wide[:, 3:4], alone)


@pytest.mark.parametrize(
    ("num_leaves", "apart", "as_made"), [(1, 0, 0), (2, 1, 0), (3, 1, 0), (4, 2, 1), (8, 3, 2), (12, 3, 2)]
)
def test_a_tree_needs_a_buffer_for_every_level_of_right_halves_that_are_not_added_as_they_are_made(
    num_leaves: int, apart: int, as_made: int
) -> None:
    for added, count in ((False, apart), (True, as_made)):
        order = steps(tree_over((0, num_leaves)), lambda product, added=added: added)
        assert len(scratch(torch.empty(2, 5), 4, [order])) == count


@pytest.mark.parametrize("as_made", [False, True])
def test_a_sum_is_written_or_added_in_the_order_of_its_tree(as_made: bool) -> None:
    """Integers: both ways give the same sum."""
    left = [torch.full((2, 1), float(3**i)) for i in range(7)]
    right = [torch.ones(1, 3)] * 7
    for added in (False, True):
        order, total = steps(tree_over((0, 7)), lambda product: as_made, added=added), torch.full((2, 3), 5.0)
        follow(order, [total, *scratch(total, 2, [order])], left, right)
        assert (total == (3**7 - 1) / 2 + 5 * added).all()


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).square().mean().sqrt())


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("rows", "cut", "whole", "leaves"), [(512, 768, 256, 12), (256, 192, 48, 6), (1024, 512, 512, 8), (96, 60, 64, 5)]
)
def test_the_error_against_fp64_is_no_larger_than_the_librarys(
    rows: int, cut: int, whole: int, leaves: int, seed: int
) -> None:
    x, weight, y = drawn(rows, whole, seed=seed), drawn(cut, whole, seed=seed + 10), drawn(rows, cut, seed=seed + 20)
    features, blocks = intervals(cut, cut // leaves), intervals(rows, 128)
    wide_x, wide_weight, wide_y = (each.double() for each in (x, weight, y))
    for ours, library, exact, share in (
        (project_tiles(x, weight, features, blocks), x @ weight.t(), wide_x @ wide_weight.t(), 1.001),
        (contract_tiles(y, weight, features, blocks, ((0, leaves),))[0], y @ weight, wide_y @ wide_weight, 0.85),
        (
            outer_sum(y, x, features, blocks),
            y.t() @ x,
            wide_y.t() @ wide_x,
            1.001 if rows <= 256 else 0.9,
        ),
        (token_sums(x.unsqueeze(0), 32)[0], x.unsqueeze(0).sum((0, 1)), wide_x.sum(0), 0.95),
    ):
        assert error(ours, exact) <= share * error(library, exact)


def contracted(transport, of) -> torch.Tensor:
    numerics, y, weight, leaves = of
    tp = transport.group("tp", "tp", range(transport.world_size))
    owned = OwnedLeaves(leaves, 1, tp.size, tp.rank)
    lo, hi = owned.items
    return numerics.contract(y[..., lo:hi], weight[lo:hi], owned, tp, None)


def test_bf16_over_8_ranks_is_rounded_once_where_the_library_rounds_every_partial_sum() -> None:
    y, weight, leaves = drawn(2, 64, 512).bfloat16(), drawn(512, 48, seed=1).bfloat16(), Leaves(512, 64)
    exact = y.double() @ weight.double()
    sizes = leaf_sizes(model_preset("tiny-gpt"), 64)
    ours, fast = (
        error(run_threads(MemoryWorld(8, timeout_s=60), contracted, (numerics, y, weight, leaves))[0], exact)
        for numerics in (ExactNumerics(sizes, CPU), FastNumerics(CPU))
    )
    assert ours == pytest.approx(error(exact.bfloat16(), exact), rel=1e-3) and fast > 1.5 * ours
