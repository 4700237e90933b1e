"""Weight gradients of fast numerics are computed into the sum over microbatches: nothing else of
their size is ever held."""

from __future__ import annotations

import pytest
import torch

from shardproof.backend.numerics import FastNumerics, OwnedLeaves
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
