"""Products of matrices by tensor cores: mma.sync of m16n8k16 with operands of 16 bits and sums in fp32.

An element is the exact sum of its 16 products and what was there, in float64, rounded once to fp32. A tensor core adds
in an order and with roundings of its own, which NVIDIA does not publish: bits are those of a device where no order and
no rounding inside an instruction can change them, and open otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from .ptx_block import Active, Array, Block, Step, expect, source, target, warps_of
from .ptx_parser import Line, Program, registers
from .roundings import canonical_nan, half_widened, widened

_PRODUCT = re.compile(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.\1\.f32")

LANE = np.arange(32)
GROUP, IN_GROUP = LANE // 4, LANE % 4
LEFT = [(GROUP + 8 * (register % 2), 2 * IN_GROUP + 8 * (register // 2)) for register in range(4)]
RIGHT = [(2 * IN_GROUP + 8 * register, GROUP) for register in range(2)]
SUM = [(GROUP + 8 * (register // 2), 2 * IN_GROUP + register % 2) for register in range(4)]
"""Row and column of the first value of each thread's registers; the second one of LEFT has the next column, of RIGHT
the next row (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type")."""


def tensor_core(program: Program, line: Line) -> Step | None:
    """The instruction as a step; None for one that is none of these. Raises `UnknownInstruction`."""
    found = _PRODUCT.fullmatch(line.opcode)
    if found is None:
        return None
    expect(line, line.operands, 4)
    wide = widened if found.group(1) == "bf16" else half_widened
    names = [registers(operand) for operand in line.operands]
    for each, count in zip(names, (4, 4, 2, 4), strict=True):
        expect(line, each, count)
    targets = [target(program, line, name, "f32") for name in names[0]]
    left, right = ([source(program, line, name, "b32") for name in each] for each in names[1:3])
    before = [source(program, line, name, "f32") for name in names[3]]

    def multiply(block: Block, active: Active) -> None:
        threads = warps_of(line, block, active)

        def matrix(words: Sequence[Array], places: Sequence[tuple[Array, Array]], shape: tuple[int, int]) -> Array:
            found = np.empty((len(threads), *shape))
            for word, (row, column) in zip(words, places, strict=True):
                found[:, row, column] = word
            return found

        def operand(words: Sequence[Array], places: Sequence[tuple[Array, Array]], shape: tuple[int, int]) -> Array:
            """With two values in each word, of which the second is in the next column, or row of the right one."""
            halves, both = [], []
            for word, (row, column) in zip(words, places, strict=True):
                halves += [wide((word & np.uint32(0xFFFF)).astype(np.uint16)), wide((word >> 16).astype(np.uint16))]
                both += [(row, column), (row, column + 1) if shape == (16, 16) else (row + 1, column)]
            return matrix(halves, both, shape)

        a, b = ([block.whole(read(block))[threads] for read in each] for each in (left, right))
        c = matrix([block.whole(read(block))[threads] for read in before], SUM, (16, 8))
        total = canonical_nan((operand(a, LEFT, (16, 16)) @ operand(b, RIGHT, (16, 8)) + c).astype(np.float32))
        for write, (row, column) in zip(targets, SUM, strict=True):
            result = np.zeros(block.num_threads, np.float32)
            result[threads] = total[:, row, column]
            write(block, result, active)

    return multiply
