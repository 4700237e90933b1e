"""Casts to fp8: what a device moves to bring the operands of products to 8 bits, by library and by
how far one scale reaches.

Bytes are per element of a 16-bit operand. A product x W^T of 8-bit operands and its two gradients need the input
and the gradient of the output each in two layouts, as they lie and transposed: tensor cores of Hopper read 8-bit
operands along the sum only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ...core.program import Product, Role

Scaling = Literal["tensor", "row", "block"]
"""How far one scale reaches: a tensor, a row or column, or 32 numbers of one (mxfp8)."""

AFTER_NORM = (Role.QKV, Role.UP)
"""Products whose input a norm writes."""

BEFORE_SUM = (Role.ATTENTION_OUTPUT, Role.DOWN)
"""Products whose gradient is gathered where tensor parallelism cuts tokens."""


@dataclass(frozen=True, slots=True)
class Casts:
    """Bytes per element that casts move.

    `input_bytes` in the forward; `input_again_bytes` in the backward, for the weight gradient; `gradient_bytes` of the
    output's gradient, for both products. `weight_bytes` and `weight_again_bytes` in every forward and backward; both
    zero where weights are cast once a step. `norms_cast`: a norm writes its output narrow. `gathers_narrow`: tokens are
    cast before tensor-parallel ranks gather them, each rank its own, so that half the bytes are sent, and
    `transposed_bytes` turn what was gathered.
    """

    input_bytes: float
    input_again_bytes: float
    gradient_bytes: float
    weight_bytes: float = 0.0
    weight_again_bytes: float = 0.0
    norms_cast: bool = False
    gathers_narrow: bool = False
    transposed_bytes: float = 0.0

    @property
    def once_a_step(self) -> bool:
        """True where the optimizer's step casts weights."""
        return not (self.weight_bytes or self.weight_again_bytes)


TRANSFORMER_ENGINE_CASTS = Casts(4.0, 0.0, 4.0, norms_cast=True)
"""Transformer Engine reads an operand once and writes it as it is and transposed (2 + 1 + 1: cast_transpose);
LayerNormLinear casts in the norm."""

ROW_INPUT_BYTES, ROW_GRADIENT_BYTES = 31.0, 13.0
"""What an input and a gradient with a scale per row move in forward and backward together, with the sums of the
products' results, which cuBLAS does not scale itself. Fitted, +- 1, to the 108 products of 8,192 tokens and more in the
table of torchao (measured on an H100 limited to 500 W: docs/static/fp8-rowwise-perf.png at 6243040), whose speed-ups
over bf16 they give within 6.4% on average. By counting reads and writes it would be 14 and 8
(torchao/testing/float8/roofline_utils.py)."""

BLOCK_BYTES, BLOCK_TRANSPOSED_BYTES = 3.0 * 0.85 * 8.0 / 5.5, 3.0 * 0.85 * 8.0 / 3.9
"""A cast with a scale per 32 numbers, along rows and across: 3 bytes an element at 5.5 and 3.9 TB/s
(measured on a B200: torchao/prototype/ mx_formats/README.md at 7eb7c8d), as bytes at the rate of large
streaming kernels, 0.85 of 8 TB/s."""

TORCHAO_CASTS: Mapping[Scaling, Casts] = {
    # Maxima are found by the kernel before; read and written narrow (2 + 1) in the forward, again transposed in the
    # backward, gradients in both layouts (2 + 1 + 1). FSDP gathers weights in 8 bits, of which the backward takes a
    # transposed copy (1 + 1). Of tensor-parallel ranks too: torchao/float8/float8_tensor_parallel.py.
    "tensor": Casts(3.0, 3.0, 4.0, 0.0, 2.0, gathers_narrow=True, transposed_bytes=2.0),
    # Forward 2 + 1. Weights: 2 + 1, in the backward a transposed copy and its cast (4 + 3).
    "row": Casts(3.0, ROW_INPUT_BYTES - 3.0, ROW_GRADIENT_BYTES, 3.0, 7.0),
    "block": Casts(
        BLOCK_BYTES, BLOCK_TRANSPOSED_BYTES, BLOCK_BYTES + BLOCK_TRANSPOSED_BYTES, BLOCK_BYTES, BLOCK_TRANSPOSED_BYTES
    ),
}
"""torchao under torch.compile (torchao/float8/float8_linear.py at 6243040); what fuses with what is as in its own
torchao/testing/float8/roofline_utils.py."""


def cast_bytes(
    casts: Casts, role: Role, product: Product, *, of: Literal["forward", "input", "weight"], cut: int
) -> float:
    """Bytes that the casts for one product move: of `forward` its input and weight, of `input` the output's gradient
    and the weight, of `weight` its input again. `cut` ranks hold the tokens between them."""
    weights, narrow = product.count * product.n * product.k, casts.gathers_narrow and cut > 1
    match of:
        case "forward":
            cast = 0.0 if casts.norms_cast and role in AFTER_NORM else casts.input_bytes
            own = cast / cut if narrow and role in AFTER_NORM else cast
            return own * product.count * product.m * product.k + casts.weight_bytes * weights
        case "input":
            whole = narrow and role in BEFORE_SUM
            cast = casts.input_bytes / cut + casts.transposed_bytes if whole else casts.gradient_bytes
            return cast * product.count * product.m * product.k + casts.weight_again_bytes * weights
        case "weight":
            turned = narrow and role in AFTER_NORM
            cast = casts.transposed_bytes if turned else casts.input_again_bytes
            return cast * product.count * product.k * product.n
