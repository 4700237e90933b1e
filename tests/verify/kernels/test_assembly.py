"""What kernels take when they are assembled, for GPUs that are not here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardproof.backend.kernels.catalog import KERNELS
from shardproof.backend.kernels.kernel import Limits
from shardproof.verify.kernels.amd import compiled_for_amd
from shardproof.verify.kernels.assembly import ARCHITECTURES, Assembled, assemble
from shardproof.verify.kernels.launches import FORMS, launches_of
from shardproof.verify.kernels.ptx_counts import chained, copied_bytes, fused, multiplied, stored_bytes, vector_bytes

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
    assert len(found) == sum(
        len(launches_of(kernel, each))
        for kernel in KERNELS
        for each in ARCHITECTURES
        if kernel.least_architecture <= each
    )
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
    product = replace(right, kernel="exact_product", form="project bfloat16", vector_bytes=4, others=("no stores",))
    assert product.why_not(KERNEL["exact_product"]) == (
        "project bfloat16: no stores; operands are read 4 bytes at a time, not 16"
    )


def test_products_are_assembled_in_every_form_and_type(hopper: list[Assembled]) -> None:
    forms = {each.form: each for each in hopper if each.kernel == "exact_product"}
    assert set(forms) == {f"{form} {dtype}" for form in FORMS for dtype in ("bfloat16", "float32")}
    assert all(("wgmma.mma_async" in each.ptx) == ("bfloat16" in form) for form, each in forms.items())
    assert all(each.spills == 0 for each in forms.values())


@pytest.mark.full
def test_kernels_without_multicast_become_code_for_amd() -> None:
    assert compiled_for_amd() == {kernel.name: "" for kernel in KERNELS if "multicast" not in kernel.function.arg_names}


def test_products_of_a_tile_are_counted_for_each_kind_of_instruction() -> None:
    warps = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 }, { %r2 }, { %r3 }, { %r4 };\n"
    groups = "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, 1, 1, 1, 0, 1;\n"
    block = "@%p1 tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd1, %rd2, %r2, %p2;\n"
    tile = (128, 128, 64)
    assert multiplied(64 * warps, 8, tile) == 128 * 128 * 64
    assert multiplied(4 * groups, 8, tile) == 128 * 128 * 64
    assert multiplied(4 * block, 8, tile) == 128 * 128 * 64
    assert chained(448 * "fma.rn.f32 %r1, %r2, %r3, %r1;\n" + 32 * "fma.rn.f32x2 %rd1, %rd2, %rd3, %rd1;\n", 256) == (
        128 * 128 * 8
    )


@pytest.mark.parametrize(
    ("lines", "copied", "stored"),
    [
        ("cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;", 16, 0),
        (
            "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;\nld.global.b16 { %rs1 }, [ %rd1 + 0 ];",
            2,
            0,
        ),
        ("cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x4, %r2;\nst.global.b16 [ %rd1 + 0 ], { %rs1 };", 4, 2),
        ("ld.global.b32 { %r1 }, [ %rd1 + 0 ];\n@%p1 st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };", 0, 16),
    ],
)
def test_the_narrowest_copy_and_store_are_read(lines: str, copied: int, stored: int) -> None:
    assert (copied_bytes(lines), stored_bytes(lines)) == (copied, stored)


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("fma.rn.f32 %r1, %r2, %r3, %r4;", 1),
        ("add.f32 %r1, %r2, %r3;", 1),
        ("mul.ftz.f32 %r1, %r2, %r3;", 1),
        ("add.rn.f32 %r1, %r2, %r3;", 0),
        ("fma.rn.f32x2 %rd1, %rd2, %rd3, %rd4;", 2),
        ("add.rn.f32x2 %rd1, %rd2, %rd3;", 0),
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
