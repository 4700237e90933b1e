"""Instructions of PTX on arrays against exact fractions and against whole numbers one at a time."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.ptx import calculated
from shardproof.verify.kernels import ptx_numbers
from shardproof.verify.kernels.ptx_instructions import calculation, width_of

FORMATS = {"f32": (24, -149, 128, np.uint32), "bf16": (8, -133, 128, np.uint16), "f16": (11, -24, 16, np.uint16)}
"""Bits of a significand, exponent of the least number and of what is too large, and the type of the bits."""
NAN = {"f32": 0x7FFFFFFF, "bf16": 0x7FFF, "f16": 0x7FFF}


def exact(bits: int, kind: str) -> Fraction:
    """The number of a finite pattern."""
    precision, least, _, dtype = FORMATS[kind]
    magnitude = bits & ((1 << (8 * np.dtype(dtype).itemsize - 1)) - 1)
    exponent, significand = divmod(magnitude, 1 << (precision - 1))
    value = Fraction(significand + (1 << (precision - 1) if exponent else 0)) * Fraction(2) ** (
        least + max(exponent - 1, 0)
    )
    return -value if bits != magnitude else value


def is_finite(bits: int, kind: str) -> bool:
    precision, _, _, dtype = FORMATS[kind]
    exponent_bits = 8 * np.dtype(dtype).itemsize - precision
    return (bits >> (precision - 1)) & ((1 << exponent_bits) - 1) != (1 << exponent_bits) - 1


def rounded(value: Fraction, kind: str) -> int:
    """The pattern nearest to a number that is not 0, the even one of two."""
    precision, least, too_large, dtype = FORMATS[kind]
    sign = (1 << (8 * np.dtype(dtype).itemsize - 1)) if value < 0 else 0
    value = abs(value)
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    exponent -= value < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - precision + 1, least)
    count = round(value / unit)  # to even
    if count * unit >= Fraction(2) ** too_large:
        return sign | ((1 << (8 * np.dtype(dtype).itemsize - precision)) - 1) << (precision - 1)
    steps = max(exponent - precision + 1, least) - least
    return sign | (count + (steps << (precision - 1)) if steps or count >> (precision - 1) else count)


def patterns(kind: str) -> st.SearchStrategy[int]:
    """Finite numbers: any, and those near each other and near powers of two, whose sums are ties."""
    width = 8 * np.dtype(FORMATS[kind][3]).itemsize
    precision = FORMATS[kind][0]
    middle = ((1 << (width - precision - 1)) - 1) << (precision - 1)
    near = st.integers(-3 << (precision - 1), 3 << (precision - 1)).map(lambda steps: middle + steps)
    return (st.integers(0, (1 << width) - 1) | near).filter(lambda bits: is_finite(bits, kind))


def operands(kind: str, count: int) -> st.SearchStrategy[list[tuple[int, ...]]]:
    return st.lists(st.tuples(*[patterns(kind)] * count), min_size=8, max_size=8)


def columns(rows: list[tuple[int, ...]], kind: str) -> list[np.ndarray]:
    return [np.array(column, FORMATS[kind][3]) for column in zip(*rows, strict=True)]


def value_of(name: str, numbers: list[Fraction]) -> Fraction:
    if name == "fma":
        return numbers[0] * numbers[1] + numbers[2]
    return {"add": numbers[0] + numbers[1], "sub": numbers[0] - numbers[1], "mul": numbers[0] * numbers[1]}[name]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_arithmetic_is_rounded_once_to_nearest_even(name: str, kind: str, data: st.DataObject) -> None:
    rows = data.draw(operands(kind, 3 if name == "fma" else 2))
    got = calculated(f"{name}.rn.{kind}", columns(rows, kind), width_of(kind))
    for row, bits in zip(rows, got.tolist(), strict=True):
        value = value_of(name, [exact(each, kind) for each in row])
        if value:  # the sign of 0 is tested below
            assert bits == rounded(value, kind), (row, value)
        else:
            assert exact(bits, kind) == 0


def single(*values: float) -> np.ndarray:
    return np.array(values, np.float32).view(np.uint32)


def test_a_fused_product_and_sum_is_not_a_product_and_a_sum() -> None:
    a, c = single(1 + 2.0**-12), single(-(1 + 2.0**-11))
    assert calculated("fma.rn.f32", [a, a, c], 32).view(np.float32) == 2.0**-24
    product = calculated("mul.rn.f32", [a, a], 32)
    assert calculated("add.rn.f32", [product, c], 32).view(np.float32) == 0


def test_a_sum_near_a_tie_is_not_rounded_twice() -> None:
    """24929 x 673 = 2^24 + 1 is a tie of fp32, and 2^-40 more or less is lost in a sum of float64."""
    a, b, little = single(24929, 24929, -24929), single(673, 673, 673), single(2.0**-40, -(2.0**-40), -(2.0**-40))
    got = calculated("fma.rn.f32", [a, b, little], 32).view(np.float32)
    assert got.tolist() == [2**24 + 2, 2**24, -(2**24 + 2)]
    assert (np.float64(2**24 + 1) + 2.0**-40).astype(np.float32) == 2**24


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_no_number_is_the_one_of_a_gpu(kind: str) -> None:
    precision, _, _, dtype = FORMATS[kind]
    width = 8 * np.dtype(dtype).itemsize
    infinity = ((1 << (width - precision)) - 1) << (precision - 1)
    least, sign = infinity | 1, 1 << (width - 1)
    one = np.array([infinity, least, infinity | sign], dtype)
    two = np.array([infinity | sign, 0, infinity], dtype)
    assert calculated(f"add.rn.{kind}", [one, two], width).tolist() == [NAN[kind]] * 3
    assert calculated(f"mul.rn.{kind}", [one, np.zeros(3, dtype)], width).tolist() == [NAN[kind]] * 3
    if kind != "f32":
        assert calculated(f"cvt.rn.{kind}.f32", [single(np.nan, -np.nan)], 16).tolist() == [NAN[kind]] * 2
    assert calculated(f"add.rn.{kind}", [one[:1], one[:1]], width).tolist() == [infinity]
    assert calculated(f"mul.rn.{kind}", [np.array([sign], dtype), np.array([0], dtype)], width).tolist() == [sign]


@settings(max_examples=60, deadline=None)
@given(rows=operands("f32", 2))
def test_quotients_and_roots_are_rounded_once(rows: list[tuple[int, ...]]) -> None:
    a, b = columns([(x, y | 1) for x, y in rows], "f32")
    for x, y, bits in zip(a.tolist(), b.tolist(), calculated("div.rn.f32", [a, b], 32).tolist(), strict=True):
        if value := exact(x, "f32") / exact(y, "f32"):
            assert bits == rounded(value, "f32")
    positive = a & np.uint32(0x7FFFFFFF)
    for x, bits in zip(positive.tolist(), calculated("sqrt.rn.f32", [positive], 32).tolist(), strict=True):
        low, high = (exact(bits + step, "f32") + exact(bits, "f32") for step in (-1 if bits else 0, 1))
        assert low * low <= 4 * exact(x, "f32") <= high * high  # between the middles to its neighbours


@pytest.mark.parametrize("target", ["bf16", "f16"])
@settings(max_examples=60, deadline=None)
@given(rows=operands("f32", 2))
def test_conversions_to_16_bits_are_rounded_to_nearest_even(target: str, rows: list[tuple[int, ...]]) -> None:
    high, low = columns(rows, "f32")
    one = calculated(f"cvt.rn.{target}.f32", [high], 16).tolist()
    for bits, source in zip(one, high.tolist(), strict=True):
        value = exact(source, "f32")
        assert bits == rounded(value, target) if value else bits == source >> 16
    both = calculated(f"cvt.rn.{target}x2.f32", [high, low], 32)
    assert (both >> 16).tolist() == one
    assert (both & 0xFFFF).tolist() == calculated(f"cvt.rn.{target}.f32", [low], 16).tolist()


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_16_bits_become_single_precision_exactly(kind: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 1024)
    for row in bits[::5]:
        got = calculated(f"cvt.f32.{kind}", [row], 32)
        finite = [is_finite(each, kind) for each in row.tolist()]
        wanted = [exact(each, kind) for each in row[finite].tolist()]
        assert [exact(each, "f32") for each in got[finite].tolist()] == wanted


def test_whole_numbers_become_single_precision_rounded_once() -> None:
    values = np.array([2**53 + 1, 2**60 + 2**36 + 1, -(2**24) - 1, 7], np.int64)
    got = calculated("cvt.rn.f32.s64", [values.view(np.uint64)], 32)
    assert got.tolist() == [rounded(Fraction(int(each)), "f32") for each in values]


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_pairs_are_two_numbers_each(name: str) -> None:
    generator = np.random.default_rng(5)
    count = 3 if name == "fma" else 2
    given = [generator.integers(0, 1 << 32, 256, np.uint32) for _ in range(count)]
    got = calculated(f"{name}.rn.bf16x2", given, 32)
    for shift in (0, 16):
        halves = [(each >> shift).astype(np.uint16) for each in given]
        assert (got >> shift & 0xFFFF).tolist() == calculated(f"{name}.rn.bf16", halves, 16).tolist()


WHOLE = [
    *(f"{name}.{kind}" for name in ("add", "sub", "min", "max") for kind in ("s32", "u32", "s64", "u64")),
    *(f"mul.{part}.{kind}" for part in ("lo", "hi") for kind in ("s32", "u32", "s64", "u64", "s16", "u16")),
    *(f"mul.wide.{kind}" for kind in ("s16", "u16", "s32", "u32")),
    *(f"{name}.b{bits}" for name in ("and", "or", "xor") for bits in (16, 32, 64)),
    *(f"{name}.{kind}" for name in ("div", "rem") for kind in ("s32", "u32", "s64", "u64")),
    *(f"setp.{how}.{kind}" for how in ("eq", "ne", "lt", "le", "gt", "ge") for kind in ("s32", "u32", "s64", "u64")),
    "neg.s32",
    "neg.s64",
    *(f"cvt.{to}.{of}" for to in ("s64", "u64", "s32", "u16") for of in ("s32", "u32")),
    "mad.lo.s32",
    "mad.lo.s64",
    "mad.wide.s32",
    "mad.wide.u32",
]


@pytest.mark.parametrize("opcode", WHOLE)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_whole_numbers_are_those_of_the_reader_of_protocols(opcode: str, data: st.DataObject) -> None:
    known = calculation(opcode)
    assert known is not None
    edges = [0, 1, 2, 3, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
    number = st.sampled_from(edges) | st.integers(0, 2**64 - 1)
    widths = [width_of(kind) for kind in known.sources]
    rows = [[data.draw(number) % (1 << width) for width in widths] for _ in range(6)]
    if opcode.startswith(("div", "rem")):
        rows = [[a, b or 1] for a, b in rows]
    arrays = [np.array(column, f"uint{width}") for column, width in zip(zip(*rows, strict=True), widths, strict=True)]
    got = calculated(opcode, arrays, width_of(known.target)).tolist()
    assert got == [ptx_numbers.calculated(opcode, row) for row in rows]


@pytest.mark.parametrize("kind", ["b32", "u32", "s32", "b64", "s64", "b16"])
def test_shifts_by_more_than_the_width_leave_nothing(kind: str) -> None:
    width = width_of(kind)
    value = (0xF0E1D2C3B4A59687 >> (64 - width)) | 1
    by = [0, 1, width - 1, width, width + 1, 2**31]
    values, counts = np.full(len(by), value, f"uint{width}"), np.array(by, np.uint32)
    signed = value - (1 << width) if kind[0] == "s" else value
    if kind[0] != "s":
        left = calculated(f"shl.{kind.replace('u', 'b')}", [values, counts], width).tolist()
        assert left == [(value << min(each, 64)) % (1 << width) for each in by]
    right = calculated(f"shr.{kind}", [values, counts], width).tolist()
    assert right == [(signed >> min(each, 64)) % (1 << width) for each in by]


def test_bytes_are_chosen_and_signs_spread() -> None:
    a, b = np.array([0x83828180] * 3, np.uint32), np.array([0x07060504] * 3, np.uint32)
    selector = np.array([0x3210, 0x7531, 0xC48F], np.uint32)
    assert calculated("prmt.b32", [a, b, selector], 32).tolist() == [0x83828180, 0x07058381, 0x0004FF00]


def test_comparisons_with_what_is_no_number() -> None:
    a, b = single(1, np.nan, -0.0), single(np.nan, np.nan, 0.0)
    found = {how: calculated(f"setp.{how}.f32", [a, b], 1).tolist() for how in ("eq", "ne", "lt", "equ", "neu", "ltu")}
    assert found == {
        "eq": [0, 0, 1],
        "ne": [0, 0, 0],
        "lt": [0, 0, 0],
        "equ": [1, 1, 1],
        "neu": [1, 1, 0],
        "ltu": [1, 1, 0],
    }


def test_predicates_and_choices() -> None:
    a, b = np.array([True, True, False, False]), np.array([True, False, True, False])
    for name, wanted in (("and", a & b), ("or", a | b), ("xor", a ^ b)):
        assert (calculated(f"{name}.pred", [a, b], 1) == wanted).all()
    x, y = np.arange(4, dtype=np.uint32), np.arange(10, 14, dtype=np.uint32)
    assert calculated("selp.b32", [x, y, a], 32).tolist() == [0, 1, 12, 13]


@pytest.mark.parametrize(
    "opcode",
    [
        "add.f32",
        "mul.f32",
        "div.full.f32",
        "sqrt.approx.f32",
        "fma.rn.f64",
        "add.rn.ftz.f32",
        "mul.wide.s64",
        "min.f32",
    ],
)
def test_what_is_not_defined_to_the_bit_is_not_known(opcode: str) -> None:
    assert calculation(opcode) is None


@pytest.mark.parametrize("kind", ["u32", "u64", "s32", "s64"])
@given(value=st.integers(0, 2**64 - 1), position=st.integers(0, 255), length=st.integers(0, 255))
def test_a_field_of_bits_is_the_one_of_the_isa(kind: str, value: int, position: int, length: int) -> None:
    """The PTX ISA's own description, a bit at a time."""
    width = width_of(kind)
    value %= 1 << width
    highest = min(position + length - 1, width - 1)
    sign = value >> highest & 1 if kind[0] == "s" and length else 0
    expected = sum(
        (value >> (position + place) & 1 if place < length and position + place < width else sign) << place
        for place in range(width)
    )
    known = calculation(f"bfe.{kind}")
    assert known is not None
    sources = [np.array([value], f"uint{width}").view(f"{'int' if kind[0] == 's' else 'uint'}{width}")]
    found = known.function(*sources, *[np.array([each], np.uint32) for each in (position, length)])
    assert int(found.view(f"uint{width}")[0]) == expected
