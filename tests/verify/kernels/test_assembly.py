"""What kernels take when they are assembled, for GPUs that are not here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardproof.backend.kernels.catalog import KERNELS
from shardproof.backend.kernels.kernel import Limits
from shardproof.verify.kernels.assembly import ARCHITECTURES, Assembled, assemble, fused, vector_bytes

KERNEL = {kernel.name: kernel for kernel in KERNELS}


@pytest.fixture(scope="module")
def hopper() -> list[Assembled]:
    return assemble(architectures=[90])


def test_every_kernel_keeps_its_limits(hopper: list[Assembled]) -> None:
    assert {each.kernel for each in hopper} == set(KERNEL)
    assert [why for each in hopper if (why := each.why_not(KERNEL[each.kernel]))] == []


@pytest.mark.full
def test_every_kernel_keeps_its_limits_on_all_architectures() -> None:
    found = assemble(architectures=ARCHITECTURES)
    assert len(found) == sum(kernel.least_architecture <= each for kernel in KERNELS for each in ARCHITECTURES)
    assert [why for each in found if (why := each.why_not(KERNEL[each.kernel]))] == []


def test_what_is_beyond_a_limit_is_said() -> None:
    kernel = replace(KERNEL["add_norm_gather"], limits=Limits(registers=64, spills=0, vector_bytes=16))
    right = Assembled(kernel.name, 90, registers=64, spills=0, shared_bytes=0, vector_bytes=16, fused=0, ptx="")
    assert right.why_not(kernel) == ""
    for wrong, words in (
        ({"registers": 65}, "65 registers are more than 64"),
        ({"spills": 1}, "1 spilled loads and stores are more than 0"),
        ({"vector_bytes": 2}, "peers are read 2 bytes at a time, not 16"),
        ({"fused": 3}, "3 products and sums are one operation or may become one"),
    ):
        assert replace(right, **wrong).why_not(kernel) == words


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("fma.rn.f32 %r1, %r2, %r3, %r4;", 1),
        ("add.f32 %r1, %r2, %r3;", 1),
        ("mul.ftz.f32 %r1, %r2, %r3;", 1),
        ("add.rn.f32 %r1, %r2, %r3;", 0),
        ("add.s32 %r1, %r2, %r3;", 0),
        ("fma.rn.bf16 %rs1, %rs2, %rs3, %rs4;", 0),
    ],
)
def test_operations_that_may_become_one_are_counted(line: str, count: int) -> None:
    assert fused(line) == count


@pytest.mark.parametrize(
    ("line", "width"),
    [
        ("@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];", 16),
        ("ld.global.L1::evict_last.v2.b64 { %rd1, %rd2 }, [ %rd3 + 0 ];", 16),
        ("ld.global.b16 { %rs1 }, [ %rd1 + 0 ];", 2),
        ("ld.global.b64 { %rd1 }, [ %rd2 + 0 ];", 0),
        ("st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };", 0),
    ],
)
def test_the_width_of_loads_is_read(line: str, width: int) -> None:
    assert vector_bytes(line) == width
