"""`exact_sum` against rational arithmetic: no order, no cut and no range of fp32 changes it, compiled or not."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardproof.backend.numerics import exact_sum as module
from shardproof.backend.numerics.exact_sum import ExactSum, exact_sum
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.program import EXACT_SCALAR_BYTES

FP32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
LARGEST = torch.finfo(torch.float32).max
SMALLEST = 2.0**-149


PATHS = [None, *([module.compiled] if module.compiled is not None else [])]


@pytest.fixture(autouse=True, scope="module", params=PATHS, ids=["plain", "compiled"][: len(PATHS)])
def path(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "compiled", request.param)
        yield


def fp32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


@given(st.lists(FP32, max_size=60))
def test_the_sum_is_math_fsum_for_any_fp32_numbers(values):
    assert float(exact_sum([fp32(values)])) == math.fsum(values)


@given(st.lists(FP32, max_size=60))
def test_the_sum_of_squares_is_the_rational_one_rounded_once(values):
    assert float(exact_sum([fp32(values)], squares=True)) == float(
        sum((Fraction(value) ** 2 for value in values), Fraction())
    )


@given(st.lists(FP32, min_size=1, max_size=60), st.integers(1, 5), st.randoms())
def test_order_and_cuts_do_not_matter_before_rounding(values, num_parts, shuffler):
    whole = exact_sum([fp32(values)])
    shuffler.shuffle(values)
    parts = [exact_sum([fp32(values[part::num_parts])]) for part in range(num_parts)]
    assert sum(parts[1:], parts[0]) == whole


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("sizes", [[1, 5], [2, 4], [5, 1]])
def test_tensors_that_lie_in_others_are_summed_as_their_copies(dim, sizes):
    tensor = torch.randn(6, 6, 6)
    parts = [
        *tensor.split(sizes, dim),
        *tensor.mT.split(sizes, dim),
        tensor[:, :, 0],
        tensor[::2, ::3],
        tensor[0, 0, :1].expand(5),
    ]
    for part in parts:
        assert exact_sum([part], squares=True) == exact_sum(
            [part.clone(memory_format=torch.contiguous_format)], squares=True
        )


def test_denormals_and_huge_values_cancel_to_what_is_left():
    assert float(exact_sum([fp32([LARGEST, SMALLEST, -LARGEST])])) == SMALLEST
    assert float(exact_sum([fp32([SMALLEST] * 3)], squares=True)) == 3 * SMALLEST**2
    assert float(exact_sum([fp32([LARGEST] * 4)], squares=True)) == 4 * LARGEST**2


def test_300000_numbers_over_60_binades_in_many_chunks():
    shuffled = random.Random(3)
    values = torch.tensor(
        [shuffled.uniform(-1, 1) * 2.0 ** shuffled.randint(-40, 20) for _ in range(300_000)], dtype=torch.float32
    )
    assert float(exact_sum([values[:1000], values[1000:].view(-1, 13)])) == math.fsum(values.tolist())


@pytest.mark.parametrize("squares", [False, True])
def test_a_transposed_matrix_of_all_magnitudes_has_the_sum_of_its_elements(squares):
    bits = torch.arange(1, 2**32, 331_777, dtype=torch.int64).to(torch.int32)
    values = bits[bits.view(torch.float32).isfinite()].view(torch.float32)[:12_800]
    numbers = [Fraction(value) ** (1 + squares) for value in values.tolist()]
    assert float(exact_sum([values.view(100, 128).t()], squares=squares)) == float(sum(numbers, Fraction()))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, math.inf], math.inf),
        ([-math.inf, 5.0], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([math.nan, 1.0], math.nan),
    ],
)
def test_inf_and_nan_propagate_as_ieee_sums_do(values, expected):
    total = float(exact_sum([fp32(values)]))
    assert total == expected or (math.isnan(total) and math.isnan(expected))
    assert float(exact_sum([fp32([1.0])]) + exact_sum([fp32(values)])) == expected or math.isnan(expected)


def test_squares_of_both_infinities_are_inf():
    assert float(exact_sum([fp32([-math.inf, math.inf])], squares=True)) == math.inf


def test_nothing_sums_to_zero():
    assert float(exact_sum([])) == 0.0
    assert float(exact_sum([torch.empty(0)])) == 0.0


@given(st.lists(FP32, max_size=20), st.booleans())
def test_the_tensor_form_is_24_words_and_comes_back_equal(values, squares):
    total = exact_sum([fp32(values)], squares=squares)
    assert total.to_tensor().nbytes == EXACT_SCALAR_BYTES == 192
    assert ExactSum.from_tensor(total.to_tensor()) == total


def add_over_ranks(transport, parts):
    group = transport.group("all", "model", range(transport.world_size))
    return exact_sum([parts[transport.global_rank]]).over(group)


def test_five_ranks_agree_on_the_sum_of_all():
    values = torch.randn(1003, generator=torch.Generator().manual_seed(0)) * 1e20
    sums = run_threads(MemoryWorld(5), add_over_ranks, values.tensor_split([1, 17, 500, 998]))
    assert sums == [exact_sum([values])] * 5
