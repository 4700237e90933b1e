"""Products of matrices in executed PTX: where the values of threads are, by way of ldmatrix, and how sums round."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.ptx import carry_out, own_element
from shardproof.verify.kernels.ptx_block import UnknownInstruction
from shardproof.verify.kernels.roundings import half_narrowed, narrowed

ROWS, COLUMNS, TERMS = 16, 8, 16
NARROWED = {"bf16": narrowed, "f16": half_narrowed}
BODY = """
    mul.lo.s32 %r10, %r39, 16;
    ld.global.v4.b32 {{ %r1, %r2, %r3, %r4 }}, [ %rd1 + 0 ];
    st.shared.v4.b32 [ %r10 + 0 ], {{ %r1, %r2, %r3, %r4 }};
    mul.lo.s32 %r11, %r39, 8;
    ld.global.v2.b32 {{ %r5, %r6 }}, [ %rd2 + 0 ];
    st.shared.v2.b32 [ %r11 + 512 ], {{ %r5, %r6 }};
    bar.sync 0;
    and.b32 %r12, %r39, 15;
    shr.u32 %r13, %r39, 4;
    mul.lo.s32 %r12, %r12, 32;
    mad.lo.s32 %r12, %r13, 16, %r12;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{ %r1, %r2, %r3, %r4 }}, [ %r12 + 0 ];
    and.b32 %r14, %r39, 15;
    mul.lo.s32 %r14, %r14, 16;
    ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {{ %r5, %r6 }}, [ %r14 + 512 ];
    ld.global.v4.b32 {{ %r20, %r21, %r22, %r23 }}, [ %rd3 + 0 ];
    mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32
        {{ %r20, %r21, %r22, %r23 }}, {{ %r1, %r2, %r3, %r4 }}, {{ %r5, %r6 }}, {{ %r20, %r21, %r22, %r23 }};
    st.global.v4.b32 [ %rd3 + 0 ], {{ %r20, %r21, %r22, %r23 }};
"""


def fragment() -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of each thread's four values of a sum (PTX ISA, figure of the accumulators of m16n8k16)."""
    thread, value = np.arange(32)[:, None], np.arange(4)[None, :]
    return thread // 4 + 8 * (value // 2), 2 * (thread % 4) + value % 2


def multiplied(left: np.ndarray, right: np.ndarray, before: np.ndarray, kind: str) -> np.ndarray:
    """`left @ right + before` by one warp."""
    bits = [np.ascontiguousarray(NARROWED[kind](each.astype(np.float32))) for each in (left, right)]
    sums = np.ascontiguousarray(before.astype(np.float32)[fragment()])
    body = own_element(1, 0, 128) + own_element(2, 1, 64) + own_element(3, 2, 128) + BODY.format(kind=kind)
    carry_out(" ".join(body.split()).replace("; ", ";\n"), [*bits, sums], 32, shared_bytes=768)
    found = np.empty((ROWS, COLUMNS), np.float32)
    found[fragment()] = sums
    return found


@pytest.mark.parametrize("kind", NARROWED)
def test_every_value_is_in_its_place(kind: str) -> None:
    generator = np.random.default_rng(1)
    left, right = generator.integers(-8, 9, (ROWS, TERMS)), generator.integers(-8, 9, (TERMS, COLUMNS))
    before = generator.integers(-100, 100, (ROWS, COLUMNS))
    assert (multiplied(left, right, before, kind) == left @ right + before).all()


def test_a_sum_is_rounded_once() -> None:
    left, right = np.ones((ROWS, TERMS)), np.ones((TERMS, COLUMNS))
    assert (multiplied(left, right, np.full((ROWS, COLUMNS), 2.0**24), "bf16") == 2.0**24 + 16).all()
    left[:, 1:] = 0
    assert (multiplied(left, right, np.full((ROWS, COLUMNS), 2.0**24), "bf16") == 2.0**24).all()


def test_other_shapes_and_types_are_refused() -> None:
    line = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 { %r1 }, { %r2 }, { %r3 }, { %r4 };\n"
    with pytest.raises(UnknownInstruction, match="not modelled"):
        carry_out(line, [], 32)
