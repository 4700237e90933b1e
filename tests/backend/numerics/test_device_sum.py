"""`device_sum` against rational arithmetic and against `exact_sum`: the same number, and no look at any value."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardproof.backend.numerics import device_sum as module
from shardproof.backend.numerics.device_sum import DeviceSum, device_sum
from shardproof.backend.numerics.exact_sum import exact_sum
from shardproof.core.program import EXACT_SCALAR_BYTES

CPU = torch.device("cpu")
FP32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
LARGEST = torch.finfo(torch.float32).max
SMALLEST = 2.0**-149


def fp32(values) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


@given(st.lists(FP32, max_size=40), st.booleans())
def test_the_sum_is_the_rational_one_rounded_once(values, squares):
    due = float(sum((Fraction(value) ** (1 + squares) for value in values), Fraction()))
    assert float(device_sum([fp32(values)], squares=squares, device=CPU)) == due


@given(st.lists(st.integers(0, 2**24 - 1), min_size=1, max_size=4), st.integers(-149, 60), st.integers(25, 70))
def test_ties_go_to_even_and_what_is_far_below_breaks_them(numbers, exponent, apart):
    values = [math.ldexp(number, exponent + apart * place) for place, number in enumerate(numbers)]
    values = [value for value in values if value < LARGEST]
    for sign in (1, -1):
        given_values = fp32([sign * value for value in values])
        due = float(sum((Fraction(value) for value in given_values.tolist()), Fraction()))
        assert float(device_sum([given_values], device=CPU)) == due


@given(st.lists(FP32, min_size=1, max_size=40), st.integers(1, 5), st.randoms())
def test_order_and_cuts_do_not_matter(values, num_parts, shuffler):
    whole = float(device_sum([fp32(values)], device=CPU))
    shuffler.shuffle(values)
    parts = [device_sum([fp32(values[part::num_parts])], device=CPU) for part in range(num_parts)]
    assert float(sum(parts[1:], parts[0])) == whole


@pytest.mark.parametrize("values", [[LARGEST, SMALLEST, -LARGEST], [SMALLEST] * 3, [LARGEST] * 4, [], [0.0, -0.0]])
@pytest.mark.parametrize("squares", [False, True])
def test_the_ends_of_fp32(values, squares):
    assert float(device_sum([fp32(values)], squares=squares, device=CPU)) == float(
        exact_sum([fp32(values)], squares=squares)
    )


@pytest.mark.parametrize("squares", [False, True])
def test_many_tensors_of_many_runs_and_chunks(squares, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 5000)
    monkeypatch.setattr(module, "RUN_BITS", 9)
    generator = torch.Generator().manual_seed(5)
    tensors = [
        torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-60, 60, shape, generator=generator))
        for shape in ((300, 41), (7,), (0,), (100, 100))
    ]
    tensors.append(tensors[0].t()[3:, ::2])
    assert float(device_sum(tensors, squares=squares, device=CPU)) == float(exact_sum(tensors, squares=squares))


@pytest.mark.parametrize(
    ("values", "squares", "expected"),
    [
        ([1.0, math.inf], False, math.inf),
        ([-math.inf, 5.0], False, -math.inf),
        ([math.inf, -math.inf], False, math.nan),
        ([math.nan, 1.0], False, math.nan),
        ([math.inf, -math.inf], True, math.inf),
    ],
)
def test_what_is_not_finite_is_as_in_ieee_sums(values, squares, expected):
    found = float(device_sum([fp32(values)], squares=squares, device=CPU))
    assert found == expected or (math.isnan(found) and math.isnan(expected))


class NoLook(TorchDispatchMode):
    """Refuses what reads a value of a tensor on the host, or makes a shape from values."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function._schema.name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select")
        return function(*args, **(kwargs or {}))


def test_nothing_is_read_before_the_number_is_asked_for():
    values = torch.randn(1000)
    with NoLook():
        total = device_sum([values], squares=True, device=CPU) + device_sum([values], device=CPU)
        value = total.value
    assert isinstance(total, DeviceSum) and value.dtype == torch.float64
    assert total.limbs.nbytes == EXACT_SCALAR_BYTES  # what a group's member sends
    with pytest.raises(AssertionError), NoLook():
        float(value)
