"""Triton's interpreter made right: `mend`.

The stock interpreter is silently wrong in bf16, and in Triton 3.6 cannot count to a bound that is known at run time
only (numpy >= 2.4). TRITON_INTERPRET must be set before Triton is loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from .bf16_bits import narrowed, widened
from .kernel import Kernel

Handle = interpreter.TensorHandle
Builder = interpreter.InterpreterBuilder


def is_interpreted() -> bool:
    """Whether kernels of this process are interpreted."""
    return bool(triton.knobs.runtime.interpret)


_ONE_AT_A_TIME = threading.Lock()
"""The interpreter replaces functions of Triton's language while it runs a kernel."""


def launch_interpreted(
    kernel: Kernel,
    num_blocks: int,
    arguments: Mapping[str, Any],
    constants: Mapping[str, Any],
    reached: Sequence[Tensor] = (),
) -> None:
    """Runs a kernel that meets nobody, one block after the other, as `Launcher`."""
    with _ONE_AT_A_TIME:
        mend()
        kernel.function[(num_blocks,)](**arguments, **constants)


def mend() -> None:
    """Replaces what is wrong in this process's interpreter, once."""
    if not hasattr(Builder, "stock"):
        Builder.stock = {name: getattr(Builder, name) for name in STOCK}
        _mend_casts()
        _mend_products()
        _refuse_arithmetic()
        _mend_bounds()


STOCK = (
    "cast_impl",
    "create_fp_to_fp",
    "create_dot",
    "create_atomic_cas",
    "binary_op",
    "unary_op",
    "ternary_op",
    "create_fma",
)


def _is_bf16(handle: Any) -> bool:
    return isinstance(handle, Handle) and handle.dtype.scalar == tl.bfloat16


def _mend_casts() -> None:
    stock_cast, stock_convert = Builder.stock["cast_impl"], Builder.stock["create_fp_to_fp"]

    def wide(self: Any, handle: Any) -> Any:
        """Any number as float32: exact for the types that are narrower."""
        if handle.dtype.scalar.is_fp8():
            return stock_convert(self, handle, tl.float32, None)
        return handle if handle.dtype.scalar == tl.float32 else stock_cast(self, handle, tl.float32)

    def cast(self: Any, source: Any, dtype: Any) -> Any:
        scalar = dtype.scalar
        if source.dtype.scalar == scalar:
            return source
        if _is_bf16(source):
            return cast(self, Handle(widened(source.data), tl.float32), dtype)
        if scalar == tl.bfloat16:
            if source.dtype.scalar in (tl.float64, tl.int32, tl.int64, tl.uint32, tl.uint64):
                raise NotImplementedError(f"{source.dtype.scalar} to bfloat16 in one step: cast to float32 first")
            return Handle(narrowed(wide(self, source).data), scalar)
        return stock_cast(self, source, dtype)

    def convert(self: Any, source: Any, dtype: Any, rounding: Any) -> Any:
        if tl.bfloat16 in (source.dtype.scalar, dtype.scalar):
            return cast(self, source, dtype)
        return stock_convert(self, source, dtype, rounding)

    Builder.cast_impl, Builder.create_fp_to_fp = cast, convert


def _mend_products() -> None:
    stock = Builder.stock["create_dot"]

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        a, b = (Handle(widened(each.data), tl.float32) if _is_bf16(each) else each for each in (a, b))
        return stock(self, a, b, *rest)

    Builder.create_dot = dot


def _refuse_arithmetic() -> None:
    """bf16 values are uint16 here: a sum of them would be one of their bits."""

    def refusing(name: str) -> Callable[..., Any]:
        stock = Builder.stock[name]

        def operation(self: Any, *operands: Any) -> Any:
            if any(_is_bf16(operand) for operand in operands) and not (
                name == "ternary_op" and operands[-1] is np.where
            ):
                raise NotImplementedError("arithmetic on bfloat16 in the interpreter: cast to float32 first")
            return stock(self, *operands)

        return operation

    for name in ("binary_op", "unary_op", "ternary_op", "create_fma"):
        setattr(Builder, name, refusing(name))


def _mend_bounds() -> None:
    """A scalar is an array of one element here, which numpy >= 2.4 turns into a number only where asked for it."""
    stock = interpreter._patch_lang_tensor

    def patch(tensor: Any, *scope: Any) -> None:
        stock(tensor, *scope)
        as_number = lambda self: int(np.asarray(self.handle.data).squeeze())  # noqa: E731 - as the stock one is set
        if scope:
            scope[0].set_attr(tensor, "__index__", as_number)
        else:
            tensor.__index__ = as_number

    interpreter._patch_lang_tensor = patch
