"""Gradients of tables, added row by row: the bits of whole tables, one per sample, that are added up as the tree."""

from __future__ import annotations

import pytest
import torch

from shardproof.backend.numerics.exact_gradients import ExactAccumulator
from shardproof.backend.numerics.lookup_sums import LookupSums
from shardproof.core.base.reduction import CarryTree

ROWS, WIDTH, TOKENS, SAMPLES = 13, 6, 9, 6


def looked_up() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of some rows and of rows elsewhere, and gradients with zeros of both signs, infinities and no numbers."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, ROWS + 1, (SAMPLES, TOKENS), generator=generator)
    gradients = torch.randn(SAMPLES, TOKENS, WIDTH, generator=generator)
    gradients[:, ::2, 0] = -0.0
    gradients[:, 1::2, 0] = 0.0
    gradients[0, 0, 1], gradients[3, 2, 2] = torch.inf, torch.nan
    return ids, gradients


def table(ids_S: torch.Tensor, gradient_SH: torch.Tensor) -> torch.Tensor:
    """The gradient of a whole table, one addition after the other."""
    total = torch.zeros(ROWS + 1, WIDTH)
    for row, values in zip(ids_S.tolist(), gradient_SH, strict=True):
        total[row] += values
    return total[:ROWS]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("microbatches", [[1] * 6, [2, 2, 2], [6], [4, 2], [1, 4, 1]])
def test_a_batch_has_the_bits_of_whole_tables(microbatches: list[int], backwards: bool) -> None:
    ids, gradients = looked_up()
    tree: CarryTree[torch.Tensor] = CarryTree(SAMPLES, torch.add)
    for sample in range(SAMPLES):
        tree.insert((sample, sample + 1), table(ids[sample], gradients[sample]))
    pieces, first = [], 0
    for count in microbatches:
        pieces.append((first, LookupSums(ids[first : first + count], gradients[first : first + count], ROWS)))
        first += count
    accumulator = ExactAccumulator(SAMPLES)
    for first, sums in reversed(pieces) if backwards else pieces:
        accumulator.add(first, sums)
    (total,) = accumulator.held
    assert torch.equal(bits(total), bits(tree.root()))


def test_every_sample_can_be_read() -> None:
    ids, gradients = looked_up()
    sums = LookupSums(ids, gradients, ROWS)
    assert len(sums) == SAMPLES
    for sample, found in enumerate(sums):
        assert torch.equal(bits(found), bits(table(ids[sample], gradients[sample])))


def test_rows_that_all_lie_elsewhere_add_nothing() -> None:
    sums = LookupSums(torch.full((2, TOKENS), ROWS), torch.ones(2, TOKENS, WIDTH), ROWS)
    accumulator = ExactAccumulator(2)
    accumulator.add(0, sums)
    assert (accumulator.held[0] == torch.zeros(ROWS, WIDTH)).all() and (sums[0] == 0).all()
