"""Weight gradients of fast numerics are computed into the sum over microbatches: nothing else of
their size is ever held."""

from __future__ import annotations

import pytest
import torch

from shardproof.backend.numerics import FastNumerics, OwnedLeaves
from shardproof.backend.numerics.row_groups import ExpertRows, RowGroup
from shardproof.backend.numerics.token_product import ROWS_AT_ONCE, TokenProduct
from shardproof.backend.ranks.live_memory import LiveMeter
from shardproof.core.layout.leaves import Leaves

TOKENS, CUT, FULL = 8, 8 * ROWS_AT_ONCE, 96
WEIGHT_BYTES = 4 * CUT * FULL


def rand(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def microbatches(dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (rand(2, TOKENS, CUT, dtype=dtype, seed=i), rand(2, TOKENS, FULL, dtype=dtype, seed=9 + i)) for i in range(3)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_of_three_microbatches_is_that_of_their_products_in_fp64(dtype: torch.dtype) -> None:
    """Each element is a sum of 48 terms: bf16 rounds three partial products of some 4 to 2^-9,
    fp32 everything to less."""
    numerics, leaves = FastNumerics(torch.device("cpu")), OwnedLeaves(Leaves(CUT, 1), 1, 1, 0)
    accumulator = numerics.accumulator(6)
    for index, (x, y) in enumerate(microbatches(dtype)):
        accumulator.add(2 * index, numerics.weight_gradient(x, y, leaves))
    expected = sum(x.double().flatten(0, 1).t() @ y.double().flatten(0, 1) for x, y in microbatches(dtype))
    (total,) = accumulator.held
    assert total.dtype == torch.float32
    assert (total - expected).abs().max() <= (0.1 if dtype == torch.bfloat16 else 2e-5)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 0), (torch.bfloat16, 2 * ROWS_AT_ONCE * FULL)])
def test_adding_a_microbatch_holds_no_second_tensor_of_the_weight(dtype: torch.dtype, most: int) -> None:
    """fp32: nothing besides the sum. bf16: the product of some rows, an eighth of the weight's bf16 bytes here."""
    x, y = (each.flatten(0, 1) for each in microbatches(dtype)[0])
    total, meter = TokenProduct(x, y).total(), LiveMeter(0)
    assert total.nbytes == WEIGHT_BYTES
    meter.hold([x, y, total])
    before = meter.live_bytes
    with meter.watch():
        TokenProduct(x, y).add_to(total)
    assert meter.live_bytes == before
    assert meter.peak_bytes - before <= most < WEIGHT_BYTES / 8


def test_a_sum_with_a_temporary_would_be_seen() -> None:
    x, y = (each.flatten(0, 1) for each in microbatches(torch.float32)[0])
    total, meter = TokenProduct(x, y).total(), LiveMeter(0)
    meter.hold([x, y, total])
    before = meter.live_bytes
    with meter.watch():
        total.add_(x.t() @ y)
    assert meter.peak_bytes - before == WEIGHT_BYTES


ROWS = ExpertRows(4, (RowGroup(0, 0, 0, 3), RowGroup(2, 0, 3, 4), RowGroup(3, 0, 4, 9)), ((0, 0),))


@pytest.mark.parametrize("sums", [torch.float32, torch.bfloat16])
def test_experts_add_to_their_own_sums_and_one_without_rows_has_zeros(sums: torch.dtype) -> None:
    numerics, leaves = FastNumerics(torch.device("cpu"), sums), OwnedLeaves(Leaves(CUT, 1), 1, 1, 0)
    accumulator, expected = numerics.expert_accumulator(2, 1), torch.zeros(4, 6, 5, dtype=torch.float64)
    for step in range(3):
        x, y = rand(9, 6, dtype=torch.float32, seed=step), rand(9, 5, dtype=torch.float32, seed=9 + step)
        accumulator.add(step, numerics.expert_weight_gradient(x, y, ROWS, leaves))
        for group in ROWS.groups:
            rows = slice(group.first, group.last)
            expected[group.expert] += x[rows].double().t() @ y[rows].double()
    (total,) = accumulator.held
    assert total.dtype == sums and not total[1].any()
    assert (total.double() - expected).abs().max() <= (2e-5 if sums == torch.float32 else 0.2)


@pytest.mark.parametrize("sums", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_table_add_to_the_rows_of_their_ids_and_those_of_other_ranks_to_none(
    dtype: torch.dtype, sums: torch.dtype
) -> None:
    """Id 5 of a table of 5 rows belongs to another rank. Gradients are small integers: every sum is exact."""
    numerics = FastNumerics(torch.device("cpu"), sums)
    accumulator, expected = numerics.accumulator(4), torch.zeros(5, 3)
    for ids, start in (([[0, 5, 2, 2], [5, 2, 4, 0]], 0), ([[5, 5, 5, 5], [0, 1, 1, 5]], 3)):
        rows = (torch.arange(24).view(2, 4, 3) % 7 + start).to(dtype)
        accumulator.add(0, numerics.embedding_gradient(torch.tensor(ids), rows, 5))
        for index, row in zip(torch.tensor(ids).flatten().tolist(), rows.flatten(0, 1), strict=True):
            if index < 5:
                expected[index] += row
    (total,) = accumulator.held
    assert torch.equal(total.float(), expected)


@pytest.mark.parametrize("kind", ["experts", "table"])
def test_neither_experts_nor_a_table_hold_a_second_tensor_of_their_size(kind: str) -> None:
    numerics, leaves = FastNumerics(torch.device("cpu")), OwnedLeaves(Leaves(CUT, 1), 1, 1, 0)
    x, y, ids = rand(9, 600, dtype=torch.float32, seed=0), rand(9, 500, dtype=torch.float32, seed=1), torch.arange(9)
    accumulator, meter = numerics.accumulator(4), LiveMeter(0)
    for first_sample in range(2):
        if kind == "experts":
            given = numerics.expert_weight_gradient(x, y, ROWS, leaves)
        else:
            given = numerics.embedding_gradient(ids.view(3, 3), y.view(3, 3, 500), 4000)
        meter.hold([x, y, ids, *accumulator.held])
        before, meter.peak_bytes = meter.live_bytes, 0
        with meter.watch():
            accumulator.add(first_sample, given)
    (total,) = accumulator.held
    assert meter.peak_bytes - before <= 2 * y.nbytes < total.nbytes / 100
