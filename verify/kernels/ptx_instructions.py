"""What an instruction of PTX calculates, for all threads at once: its types and a function of arrays.

Only what the ISA defines to the bit is here. An operation of fp32 without `.rn` may be made one with the next by ptxas,
and `.approx` and `.full` promise a bound, so none of them is known. Values of type `b` and `u` are unsigned arrays, `s`
signed ones, `f32` float32, `pred` bool; bf16 and fp16 are bits (`roundings`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from .ptx_whole import chosen_bytes, cut_quotient, field_of, high_half
from .roundings import (
    canonical_nan,
    fused,
    half_arithmetic,
    half_narrowed,
    half_widened,
    narrowed,
    on_pairs,
    pair,
    widened,
)

Array = np.ndarray
Function = Callable[..., Array]


@dataclass(frozen=True)
class Calculation:
    """A function of operands of the types `sources`, which returns an array of the type `target`."""

    function: Function
    sources: tuple[str, ...]
    target: str


def width_of(kind: str) -> int:
    """The bits of a value: 8, 16, 32 or 64; of a predicate 1."""
    if kind == "pred":
        return 1
    return 32 if kind.endswith("x2") else int(re.findall(r"\d+", kind)[-1])


def dtype_of(kind: str) -> np.dtype:
    """The type of an array of such values."""
    if kind in ("pred", "f32"):
        return np.dtype(bool if kind == "pred" else np.float32)
    return np.dtype(f"{'int' if kind[0] == 's' else 'uint'}{width_of(kind)}")


@cache
def calculation(opcode: str) -> Calculation | None:
    """What an instruction calculates; None for one that is not known here."""
    name, *rest = opcode.split(".")
    make = _BY_NAME.get(name)
    return make(name, rest) if make and rest else None


def why_unknown(opcode: str) -> str:
    """Why there is no calculation of that name."""
    name, *rest = opcode.split(".")
    if name in ("add", "sub", "mul") and rest[-1] in ("f32", "f64", *_HALVES) and "rn" not in rest:
        return "without .rn ptxas may make it one operation with another, so its bits are open"
    if "approx" in rest or "full" in rest:
        return "the ISA promises a bound of its error and no bits"
    return "an instruction that is not modelled"


def _is_whole(kind: str, letters: str = "bsu") -> bool:
    return re.fullmatch(rf"[{letters}](8|16|32|64)", kind) is not None


_HALVES = ("bf16", "f16", "bf16x2", "f16x2")


def _arithmetic(name: str, rest: Sequence[str]) -> Calculation | None:
    """add, sub, mul, fma."""
    kind, count = rest[-1], 3 if name == "fma" else 2
    if list(rest) == ["rn", "f32"]:
        return Calculation(_SINGLE[name], ("f32",) * count, "f32")
    if kind in _HALVES and rest[0] == "rn" and len(rest) == 2:
        each = half_arithmetic(name, kind.removesuffix("x2"))
        return Calculation(on_pairs(each) if kind.endswith("x2") else each, (kind,) * count, kind)
    if len(rest) == 1 and name in ("add", "sub") and _is_whole(kind, "su"):
        return Calculation(np.add if name == "add" else np.subtract, (kind, kind), kind)
    return _product(name, rest) if name == "mul" else None


def _quietly(function: Function) -> Function:
    def calculate(*operands: Array) -> Array:
        return canonical_nan(function(*operands))

    return calculate


_SINGLE: dict[str, Function] = {
    "add": _quietly(np.add),
    "sub": _quietly(np.subtract),
    "mul": _quietly(np.multiply),
    "div": _quietly(np.divide),
    "sqrt": _quietly(np.sqrt),
    "rcp": _quietly(np.reciprocal),
    "fma": fused,
}


def _product(name: str, rest: Sequence[str]) -> Calculation | None:
    """mul and mad of whole numbers."""
    if len(rest) != 2 or rest[0] not in ("lo", "hi", "wide") or not _is_whole(rest[1], "su"):
        return None
    part, kind = rest
    if part == "wide" and width_of(kind) == 64:
        return None
    target = f"{kind[0]}{2 * width_of(kind)}" if part == "wide" else kind
    wide = dtype_of(target)
    products: dict[str, Function] = {
        "lo": np.multiply,
        "hi": high_half,
        "wide": lambda a, b: a.astype(wide) * b.astype(wide),
    }
    product = products[part]
    if name == "mul":
        return Calculation(product, (kind, kind), target)
    return Calculation(lambda a, b, c: product(a, b) + c, (kind, kind, target), target)


def _quotient(name: str, rest: Sequence[str]) -> Calculation | None:
    """div and rem of whole numbers, cut towards 0; div.rn, sqrt.rn, rcp.rn."""
    kind = rest[-1]
    if list(rest) == ["rn", "f32"] and name in _SINGLE:
        return Calculation(_SINGLE[name], ("f32", "f32") if name == "div" else ("f32",), "f32")
    if len(rest) != 1 or name not in ("div", "rem") or not _is_whole(kind, "su"):
        return None
    return Calculation(cut_quotient if name == "div" else np.fmod, (kind, kind), kind)


def _bitwise(name: str, rest: Sequence[str]) -> Calculation | None:
    kind = rest[-1]
    if len(rest) != 1 or not (kind == "pred" or _is_whole(kind, "b")):
        return None
    if name == "not":
        return Calculation(np.invert, (kind,), kind)
    function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[name]
    return Calculation(function, (kind, kind), kind)


def _shift(name: str, rest: Sequence[str]) -> Calculation | None:
    """By more than the width all bits are out, as by the width."""
    kind = rest[-1]
    if len(rest) != 1 or not _is_whole(kind):
        return None
    width = width_of(kind)
    dtype = dtype_of(kind)

    def shifted(values: Array, by: Array) -> Array:
        limited = np.minimum(by, width - 1).astype(dtype)
        if name == "shr":
            moved = values >> limited
            return moved if kind[0] == "s" else np.where(by >= width, dtype.type(0), moved)
        return np.where(by >= width, dtype.type(0), values << limited)

    return Calculation(shifted, (kind, "u32"), kind)


def _sign(name: str, rest: Sequence[str]) -> Calculation | None:
    kind = rest[-1]
    if len(rest) != 1 or not (_is_whole(kind, "s") or kind == "f32"):
        return None
    return Calculation({"neg": np.negative, "abs": np.abs}[name], (kind,), kind)


def _extreme(name: str, rest: Sequence[str]) -> Calculation | None:
    kind = rest[-1]
    if len(rest) != 1 or not _is_whole(kind, "su"):
        return None
    return Calculation(np.minimum if name == "min" else np.maximum, (kind, kind), kind)


_COMPARED: dict[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _comparison(name: str, rest: Sequence[str]) -> Calculation | None:
    """Of fp32, a comparison with what is not a number is false, or true where its name ends in `u`."""
    if len(rest) != 2:
        return None
    how, kind = rest
    if _is_whole(kind) and how in _COMPARED:
        return Calculation(_COMPARED[how], (kind, kind), "pred")
    compare = _COMPARED.get(how[:2])
    if kind != "f32" or compare is None or how[2:] not in ("", "u"):
        return None
    unordered = how.endswith("u")

    def compared(a: Array, b: Array) -> Array:
        return np.where(np.isnan(a) | np.isnan(b), unordered, compare(a, b))

    return Calculation(compared, (kind, kind), "pred")


def _choice(name: str, rest: Sequence[str]) -> Calculation | None:
    kind = rest[-1]
    if len(rest) != 1 or not (_is_whole(kind) or kind == "f32"):
        return None
    return Calculation(_chosen, (kind, kind, "pred"), kind)


def _chosen(a: Array, b: Array, condition: Array) -> Array:
    return np.where(condition, a, b)


def _move(name: str, rest: Sequence[str]) -> Calculation | None:
    kind = rest[-1]
    if len(rest) != 1 or not (_is_whole(kind) or kind in ("f32", "pred")):
        return None
    return Calculation(lambda value: value, (kind,), kind)


def _conversion(name: str, rest: Sequence[str]) -> Calculation | None:
    *how, target, source = rest
    if _is_whole(target, "su") and _is_whole(source, "su") and not how:
        dtype = dtype_of(target)
        return Calculation(lambda value: value.astype(dtype), (source,), target)
    if (how, target) == (["rn"], "f32") and _is_whole(source, "su"):
        return Calculation(lambda value: value.astype(np.float32), (source,), target)
    if (how, target) == ([], "f32") and source in ("bf16", "f16"):
        wide = widened if source == "bf16" else half_widened
        return Calculation(lambda bits: canonical_nan(wide(bits)), (source,), target)
    if how == ["rn"] and source == "f32" and target in _HALVES:
        narrow = narrowed if target.startswith("bf16") else half_narrowed
        if target.endswith("x2"):
            return Calculation(lambda high, low: pair(narrow(high), narrow(low)), ("f32", "f32"), target)
        return Calculation(narrow, ("f32",), target)
    return None


def _of_bits(name: str, rest: Sequence[str]) -> Calculation | None:
    """A field of bits, or chosen bytes."""
    if name == "bfe" and len(rest) == 1 and rest[0] in ("u32", "u64", "s32", "s64"):
        return Calculation(field_of, (rest[0], "u32", "u32"), rest[0])
    return Calculation(chosen_bytes, ("b32",) * 3, "b32") if (name, *rest) == ("prmt", "b32") else None


_BY_NAME: dict[str, Callable[[str, Sequence[str]], Calculation | None]] = {
    **dict.fromkeys(("add", "sub", "mul", "fma"), _arithmetic),
    "mad": _product,
    **dict.fromkeys(("div", "rem", "sqrt", "rcp"), _quotient),
    **dict.fromkeys(("and", "or", "xor", "not"), _bitwise),
    **dict.fromkeys(("shl", "shr"), _shift),
    **dict.fromkeys(("neg", "abs"), _sign),
    **dict.fromkeys(("min", "max"), _extreme),
    "setp": _comparison,
    "selp": _choice,
    "mov": _move,
    "cvt": _conversion,
    **dict.fromkeys(("bfe", "prmt"), _of_bits),
}
