"""Whole numbers of PTX: what an instruction calculates from numbers that are known. Numbers are held as unsigned ones
of any width and read as the instruction says."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache

Value = int | None
"""None is unknown: a floating-point number, or made from something unknown."""

_SIMPLE: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "min": min,
    "max": max,
    "shl": lambda value, by: value << min(by, 64),
    "shr": lambda value, by: value >> min(by, 64),
}
_COMPARED: dict[str, Callable[[int, int], bool]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}


def calculated(opcode: str, operands: Sequence[Value]) -> Value:
    """The result of an instruction, as an unsigned number of its width; None where it is unknown."""
    name, rest, kind = _parts(opcode)
    if kind == "pred":
        return _of_predicates(name, operands)
    if kind[:1] not in ("b", "s", "u") or not kind[1:].isdigit():
        return None
    width = int(kind[1:])
    if name == "selp":
        return _chosen(operands)
    if any(value is None for value in operands):
        return None
    numbers = [_read(value, width, kind[0] == "s") for value in operands[:2] if value is not None]
    numbers += [value for value in operands[2:] if value is not None]  # of `mad`: wider where the product is
    result = _combined(name, rest, numbers, width)
    if result is None or name == "setp":
        return result
    return result % (1 << (2 * width if "wide" in rest else int(rest[0][1:]) if name == "cvt" else width))


@cache
def _parts(opcode: str) -> tuple[str, list[str], str]:
    """The name, the other parts, and the last one, which is the type."""
    name, *rest = opcode.split(".")
    return name, rest, rest[-1] if rest else ""


def _combined(name: str, rest: Sequence[str], numbers: Sequence[int], width: int) -> Value:
    if name in ("mov", "cvt"):
        return numbers[0] if len(numbers) == 1 and _is_whole(rest) else None
    if name == "neg":
        return -numbers[0]
    if name == "setp" and len(rest) == 2:
        return int(_COMPARED[rest[0]](*numbers)) if rest[0] in _COMPARED else None
    if name in ("mul", "mad"):
        product = numbers[0] * numbers[1] >> (width if "hi" in rest else 0)
        return product + (numbers[2] if name == "mad" else 0)
    if name == "bfe":
        return _field(*numbers[:3], is_signed=rest[0].startswith("s"))
    if name in ("div", "rem"):
        quotient = abs(numbers[0]) // abs(numbers[1]) * (1 if (numbers[0] < 0) == (numbers[1] < 0) else -1)
        return quotient if name == "div" else numbers[0] - quotient * numbers[1]
    return _SIMPLE[name](*numbers) if name in _SIMPLE and len(rest) == 1 else None


def _field(value: int, position: int, length: int, *, is_signed: bool) -> int:
    """`length` bits from bit `position` on; of a signed number the highest of them is its sign. A value that is read as
    signed is so for Python too, so bits above its own are its sign."""
    field = value >> position & ((1 << length) - 1)
    return field - (1 << length) if is_signed and length and field >> (length - 1) else field


def _is_whole(rest: Sequence[str]) -> bool:
    return all(kind[:1] in ("b", "s", "u") and kind[1:].isdigit() for kind in rest)


def _of_predicates(name: str, operands: Sequence[Value]) -> Value:
    """A false operand decides `and`, a true one `or`, even where the other is unknown."""
    if name == "and" and 0 in operands:
        return 0
    if name == "or" and any(operands):
        return 1
    if None in operands or name not in ("and", "or", "not", "mov"):
        return None
    numbers = [int(value) for value in operands if value is not None]
    if len(numbers) == 1:
        return 1 - numbers[0] if name == "not" else numbers[0]
    return int(name == "and")


def _chosen(operands: Sequence[Value]) -> Value:
    first, second, condition = operands
    return None if condition is None else first if condition else second


def _read(value: int, width: int, is_signed: bool) -> int:
    value %= 1 << width
    return value - (1 << width) if is_signed and value >> (width - 1) else value
