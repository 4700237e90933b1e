"""Blocks carried out from PTX that is written here by hand: branches, barriers, shared memory, warps, and what is
refused."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.ptx import carry_out, own_element
from shardproof.verify.kernels.ptx_block import UnknownInstruction
from shardproof.verify.kernels.ptx_memory import MemoryFault, Multicast
from shardproof.verify.kernels.ptx_parser import UnreadPTX, parsed
from shardproof.verify.kernels.ptx_races import BlockRace

OWN = own_element(1, 0, 32)
STORE = "st.global.b32 [ %rd1 + 0 ], { %r1 };\n"


def result(body: str, num_threads: int = 64, shared_bytes: int = 0) -> list[int]:
    """What each thread leaves in %r1."""
    out = np.zeros(num_threads, np.uint32)
    carry_out(OWN + body + STORE, [out], num_threads, shared_bytes=shared_bytes)
    return out.tolist()


def test_threads_branch_apart_and_come_together() -> None:
    body = """
    and.b32 %r2, %r39, 1;
    setp.eq.b32 %p1, %r2, 0;
    mov.b32 %r1, 100;
    @%p1 bra $L__even;
    add.s32 %r1, %r1, %r39;
    bra.uni $L__end;
$L__even:
    sub.s32 %r1, %r1, %r39;
$L__end:
    bar.sync 0;
    add.s32 %r1, %r1, 1000;
"""
    assert result(body) == [1100 + (thread if thread % 2 else -thread) for thread in range(64)]


def test_every_thread_has_its_own_number_of_turns() -> None:
    body = """
    mov.b32 %r1, 0;
    mov.b32 %r2, %r39;
$L__again:
    setp.eq.b32 %p1, %r2, 0;
    @%p1 bra $L__end;
    add.s32 %r1, %r1, %r2;
    sub.s32 %r2, %r2, 1;
    bra $L__again;
$L__end:
"""
    assert result(body) == [thread * (thread + 1) // 2 for thread in range(64)]


def test_a_guarded_instruction_leaves_the_registers_of_others() -> None:
    body = "setp.lt.u32 %p1, %r39, 3;\nmov.b32 %r1, 7;\n@%p1 mov.b32 %r1, 8;\n@!%p1 add.s32 %r1, %r1, 2;\n"
    assert result(body, 32) == [8] * 3 + [9] * 29


def test_threads_that_end_store_nothing() -> None:
    assert result("mov.b32 %r1, 5;\nsetp.ge.u32 %p1, %r39, 40;\n@%p1 ret;\n") == [5] * 40 + [0] * 24


def test_shared_memory_hands_values_over() -> None:
    body = """
    mov.b32 %r5, global_smem;
    mad.lo.s32 %r6, %r39, 4, %r5;
    st.shared.b32 [ %r6 + 0 ], %r39;
    bar.sync 0;
    xor.b32 %r7, %r39, 63;
    mad.lo.s32 %r6, %r7, 4, %r5;
    ld.shared.b32 %r1, [ %r6 + 0 ];
"""
    assert result(body, shared_bytes=256) == list(range(63, -1, -1))


HANDED_OVER = """
    mad.lo.s32 %r6, %r39, 4, global_smem;
    st.shared.b32 [ %r6 + 0 ], %r39;
    {between}
    xor.b32 %r7, %r39, {other};
    mad.lo.s32 %r6, %r7, 4, global_smem;
    {use}
"""
READ = "ld.shared.b32 %r1, [ %r6 + 0 ];"


@pytest.mark.parametrize(
    ("other", "use", "words"),
    [
        (32, READ, "thread 0 reads byte 128 of shared memory, which thread 32 writes"),
        (1, READ, "thread 0 reads byte 4 of shared memory, which thread 1 writes"),
        (32, "st.shared.b32 [ %r6 + 0 ], %r39;", "thread 0 writes byte 128 of shared memory, which thread 32 writes"),
    ],
)
def test_what_no_barrier_keeps_apart_is_a_race(other: int, use: str, words: str) -> None:
    assert result(HANDED_OVER.format(between="bar.sync 0;", other=other, use=use), shared_bytes=256)
    with pytest.raises(BlockRace, match=f"{words}, and no barrier of the block lies between"):
        result(HANDED_OVER.format(between="", other=other, use=use), shared_bytes=256)


def test_a_thread_may_read_what_it_wrote_itself_and_all_what_nobody_writes() -> None:
    body = HANDED_OVER.format(between="", other=0, use=READ) + "ld.global.b32 %r2, [ %rd1 + 0 ];\n"
    assert result(body, shared_bytes=256) == list(range(64))


def test_a_race_in_global_memory_is_found_where_threads_branch_apart() -> None:
    """Some write before the barrier, others after it, and all read."""
    body = """
    setp.lt.u32 %p1, %r39, 32;
    mov.b32 %r1, 5;
    @%p1 bra $L__first;
    bar.sync 0;
    st.global.b32 [ %rd1 + 0 ], %r1;
    bra.uni $L__end;
$L__first:
    st.global.b32 [ %rd1 + 0 ], %r1;
    bar.sync 0;
    {read}
$L__end:
    mov.b32 %r1, 5;
"""
    assert result(body.format(read="ld.global.b32 %r1, [ %rd1 + 0 ];")) == [5] * 64
    with pytest.raises(BlockRace, match="thread 0 reads byte 128 of array 0, which thread 32 writes"):
        result(body.format(read="ld.global.b32 %r1, [ %rd1 + 128 ];"))


def test_nothing_is_zero_before_it_is_written() -> None:
    assert 0 not in result("", 32)
    assert 0 not in result("ld.shared.b32 %r1, [ global_smem + 4 ];\n", 32, shared_bytes=16)


@pytest.mark.parametrize(
    ("how", "by", "limits", "other"),
    [
        ("bfly", 5, 31, lambda lane: lane ^ 5),
        ("down", 3, 31, lambda lane: lane + 3 if lane + 3 < 32 else lane),
        ("up", 3, 0, lambda lane: lane - 3 if lane >= 3 else lane),
        ("idx", 9, 31, lambda lane: 9),
        ("down", 3, 0x181F, lambda lane: lane + 3 if lane % 8 + 3 < 8 else lane),
        ("idx", 9, 0x181F, lambda lane: lane // 8 * 8 + 1),
    ],
)
def test_shuffles_take_the_value_of_another_lane(how, by, limits, other) -> None:
    body = f"shfl.sync.{how}.b32 %r1, %r39, {by}, {limits}, -1;\n"
    assert result(body) == [thread // 32 * 32 + other(thread % 32) for thread in range(64)]


def test_a_shuffle_says_whether_there_was_another_lane() -> None:
    body = "shfl.sync.down.b32 %r2|%p1, %r39, 16, 31, 0xffffffff;\nselp.b32 %r1, 1, 0, %p1;\n"
    assert result(body, 32) == [1] * 16 + [0] * 16


def test_matrices_go_from_rows_to_threads() -> None:
    rows = np.random.default_rng(1).permutation(32)
    table = (rows * 16).astype(np.uint32)
    body = f"""
    {own_element(2, 1, 32)}
    ld.global.b32 %r10, [ %rd2 + 0 ];
    mul.lo.s32 %r11, %r39, 16;
    mul.lo.s32 %r12, %r39, 8;
    add.s32 %r14, %r12, 1;
    st.shared.b16 [ %r11 + 0 ], %r12;
    st.shared.b16 [ %r11 + 2 ], %r14;
    add.s32 %r12, %r12, 2;
    add.s32 %r14, %r14, 2;
    st.shared.b16 [ %r11 + 4 ], %r12;
    st.shared.b16 [ %r11 + 6 ], %r14;
    add.s32 %r12, %r12, 2;
    add.s32 %r14, %r14, 2;
    st.shared.b16 [ %r11 + 8 ], %r12;
    st.shared.b16 [ %r11 + 10 ], %r14;
    add.s32 %r12, %r12, 2;
    add.s32 %r14, %r14, 2;
    st.shared.b16 [ %r11 + 12 ], %r12;
    st.shared.b16 [ %r11 + 14 ], %r14;
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{ %r1, %r2, %r3, %r4 }}, [ %r10 + 0 ];
    mul.wide.u32 %rd3, %r39, 12;
    add.s64 %rd1, %rd1, %rd3;
    st.global.v4.b32 [ %rd1 + 0 ], {{ %r1, %r2, %r3, %r4 }};
"""
    out = np.zeros(33 * 4, np.uint32)
    begin = -(out.ctypes.data % 16) % 16 // 4
    out = out[begin : begin + 128]
    carry_out(OWN + body, [out, table], 32, shared_bytes=512)
    matrices = (np.arange(32 * 8, dtype=np.uint16).reshape(32, 8))[rows].reshape(4, 8, 8)
    assert (out.view(np.uint16).reshape(32, 4, 2) == matrices.reshape(4, 32, 2).transpose(1, 0, 2)).all()


@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrices_go_from_threads_to_rows_and_back(trans: str) -> None:
    """Thread t holds, of matrix m, values 2 (t mod 4) and the next of row t / 4; thread 8 m + r says where row r goes.
    Transposed, rows are columns."""
    rows = np.random.default_rng(6).permutation(32).astype(np.uint32)
    held = np.arange(32 * 8, dtype=np.uint16).reshape(32, 4, 2)
    own = np.ascontiguousarray(held).view(np.uint32).reshape(-1)
    both = np.concatenate([rows * 16, own])
    body = f"""
    {own_element(2, 1, 32)}
    ld.global.b32 %r10, [ %rd2 + 0 ];
    mul.wide.u32 %rd3, %r39, 12;
    add.s64 %rd4, %rd2, %rd3;
    ld.global.b32 %r1, [ %rd4 + 128 ];
    ld.global.b32 %r2, [ %rd4 + 132 ];
    ld.global.b32 %r3, [ %rd4 + 136 ];
    ld.global.b32 %r4, [ %rd4 + 140 ];
    stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [ %r10 + 0 ], {{ %r1, %r2, %r3, %r4 }};
    bar.sync 0;
    mul.lo.s32 %r11, %r39, 16;
    ld.shared.v4.b32 {{ %r1, %r2, %r3, %r4 }}, [ %r11 + 0 ];
    mul.wide.u32 %rd3, %r39, 12;
    add.s64 %rd1, %rd1, %rd3;
    st.global.v4.b32 [ %rd1 + 0 ], {{ %r1, %r2, %r3, %r4 }};
    ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{ %r1, %r2, %r3, %r4 }}, [ %r10 + 0 ];
    st.global.v4.b32 [ %rd1 + 512 ], {{ %r1, %r2, %r3, %r4 }};
"""
    out = np.zeros(65 * 4, np.uint32)
    begin = -(out.ctypes.data % 16) % 16 // 4
    out = out[begin : begin + 256]
    carry_out(OWN + body, [out, both], 32, shared_bytes=512)
    matrices = held.transpose(1, 0, 2).reshape(4, 8, 8)
    expected = np.zeros((32, 8), np.uint16)
    expected[rows] = (matrices.transpose(0, 2, 1) if trans else matrices).reshape(32, 8)
    assert (out[:128].view(np.uint16).reshape(32, 8) == expected).all()
    assert (out[128:] == own).all()


def test_registers_are_made_of_their_halves() -> None:
    body = (
        "cvt.u16.u32 %rs1, %r39;\nmov.b16 %rs2, 0x3F80;\nmov.b32 %r2, { %rs1, %rs2 };\n"
        "mov.b32 { %rs3, %rs4 }, %r2;\nmov.b32 %r1, { %rs4, %rs3 };\n"
    )
    assert result(body, 32) == [thread << 16 | 0x3F80 for thread in range(32)]


def test_narrow_loads_are_extended_as_their_type_says() -> None:
    source = np.array([0x80, 0x7F] * 16, np.uint8)
    out = np.zeros(64, np.uint32)
    body = f"{OWN}{own_element(2, 1, 8)}ld.global.s8 %r1, [ %rd2 + 0 ];\nld.global.b8 %r2, [ %rd2 + 0 ];\n{STORE}"
    carry_out(body + "st.global.b32 [ %rd1 + 128 ], %r2;\n", [out, source])
    assert out[:32].view(np.int32).tolist() == [-128, 127] * 16
    assert out[32:].tolist() == [0x80, 0x7F] * 16


def test_hints_for_caches_change_nothing() -> None:
    source, out = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    body = f"""{OWN}{own_element(2, 1, 32)}
    createpolicy.fractional.L2::evict_first.b64 %rd3, 1.0;
    ld.global.L1::evict_last.L2::cache_hint.b32 {{ %r1 }}, [ %rd2 + 0 ], %rd3;
"""
    carry_out(body + STORE, [out, source])
    assert (out == source).all()


def test_a_swap_that_fails_is_handed_over_with_its_address() -> None:
    pad = np.array([0, 5], np.uint32)
    found: list[int] = []
    body = """
    ld.param.b64 %rd1, [kernel_param_0];
    setp.eq.b32 %p1, %r39, 0;
    @%p1 atom.global.acquire.sys.cas.b32 %r2, [ %rd1 + 0 ], 0, 3;
    @%p1 atom.global.release.sys.cas.b32 %r3, [ %rd1 + 4 ], 0, 3;
"""
    carry_out("mov.u32 %r39, %tid.x;\n" + body, [pad], failed=found.append)
    assert (pad.tolist(), found) == ([3, 5], [pad.ctypes.data + 4])


def test_all_threads_add_to_a_counter() -> None:
    counter = np.zeros(1, np.uint32)
    body = "ld.param.b64 %rd1, [kernel_param_0];\natom.global.relaxed.sys.add.u32 %r2, [ %rd1 + 0 ], 2;\n"
    carry_out(body, [counter], num_threads=64, num_blocks=3)
    assert counter.tolist() == [2 * 64 * 3]


@pytest.mark.parametrize(
    ("instruction", "words"),
    [
        ("ex2.approx.ftz.f32 %r1, %r2;", "a bound of its error and no bits"),
        ("mul.f32 %r1, %r2, %r3;", "without .rn ptxas may make it one operation with another"),
        ("tanh.f32 %r1, %r2;", "tanh.f32 %r1, %r2;: an instruction that is not modelled"),
        ("add.s32 %r1, %x2, 1;", "%x2 is neither a declared register nor a number"),
        ("add.s64 %rd1, %r2, 1;", "%r2 of type b32 is read as s64"),
        ("add.s32 %r1, %r2;", "2 operands in the place of 3"),
        ("@%p1 bra $L__nowhere;", "a branch to no label"),
        ("bar.sync 1;", "not modelled"),
        ("ld.global.v2.b32 { %r1 }, [ %rd1 + 0 ];", "1 registers for 2 values"),
        ("ld.acquire.sys.global.b32 %r1, [ %rd1 + 0 ];", "not modelled"),
        ("atom.global.relaxed.sys.xor.b32 %r1, [ %rd1 + 0 ], 1;", "not modelled"),
        ("multimem.ld_reduce.relaxed.sys.global.add.v4.bf16x2 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];", "acc::f32"),
    ],
)
def test_an_unknown_instruction_is_named_before_anything_is_done(instruction: str, words: str) -> None:
    out = np.zeros(32, np.uint32)
    with pytest.raises(UnknownInstruction) as refused:
        carry_out(f"{OWN}mov.b32 %r1, 1;\n{STORE}{instruction}\n", [out])
    assert words in str(refused.value) and instruction in str(refused.value)
    assert not out.any()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("setp.eq.b32 %p1, %r39, 0;\n@%p1 ret;\nbar.sync 0;\n", "some threads of a block end and others wait"),
        ("setp.lt.u32 %p1, %r39, 40;\n@%p1 shfl.sync.bfly.b32 %r1, %r39, 1, 31, -1;\n", "only a part of a warp"),
        ("shfl.sync.bfly.b32 %r1, %r39, 1, 31, 0xffff;\n", "not all threads of a warp are its members"),
        ("multimem.red.release.sys.global.add.u32 [ %rd1 + 0 ], 1;\n", "the launch has no multicast address"),
    ],
)
def test_what_the_model_has_no_meaning_for_is_refused(body: str, words: str) -> None:
    with pytest.raises(UnknownInstruction, match=words):
        result(body)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("ld.global.b32 %r1, [ %rd1 + 128 ];", r": 4 bytes beyond the end of array 0 of 256 bytes"),
        ("ld.global.b32 %r1, [ %rd1 + -4 ];", "are no memory of the launch"),
        ("ld.global.b32 %r1, [ %rd1 + 2 ];", "is no multiple of the 4 bytes"),
        ("mov.b64 %rd9, 0;\nst.global.b32 [ %rd9 + 0 ], %r1;", r"4 bytes at 0x0 are no memory of the launch\."),
        ("st.shared.b32 [ global_smem + 16 ], %r1;", "beyond the end of shared memory of 16 bytes"),
        ("mov.b64 %rd9, 0;\natom.global.relaxed.sys.cas.b32 %r1, [ %rd9 + 0 ], 0, 1;", "no memory of the launch"),
    ],
)
def test_an_address_outside_of_the_launch_is_refused_with_the_line(body: str, words: str) -> None:
    with pytest.raises(MemoryFault, match=words) as refused:
        result(f"{body}\n", 64, shared_bytes=16)
    assert body.splitlines()[-1].split(" [")[0] in str(refused.value)


def test_what_is_only_read_is_not_written() -> None:
    table = np.zeros(32, np.uint32)
    with pytest.raises(MemoryFault, match="is in array 0, which is only read"):
        carry_out(f"{OWN}mov.b32 %r1, 1;\n{STORE}", [table], is_writable=False)
    assert not table.any()


def aligned(num_words: int) -> np.ndarray:
    whole = np.zeros(num_words + 4, np.uint32)
    begin = -(whole.ctypes.data % 16) % 16 // 4
    return whole[begin : begin + num_words]


WINDOW = 1 << 60


def window(buffers: list[np.ndarray], before: int = 0) -> Multicast:
    return Multicast(WINDOW, before, buffers[0].nbytes, tuple(each.ctypes.data for each in buffers))


LANE = "mov.u32 %r39, %tid.x;\nmul.wide.u32 %rd2, %r39, 16;\n"
REDUCE = """
    mov.b64 %rd3, 1152921504606846976;
    add.s64 %rd3, %rd3, %rd2;
    multimem.ld_reduce.relaxed.sys.global.add{kind} {{ %r1, %r2, %r3, %r4 }}, [ %rd3 + 0 ];
    ld.param.b64 %rd4, [kernel_param_3];
    add.s64 %rd4, %rd4, %rd2;
    st.global.v4.b32 [ %rd4 + 0 ], {{ %r1, %r2, %r3, %r4 }};
"""


@pytest.mark.parametrize("kind", [".v4.f32", ".acc::f32.v4.bf16x2"])
def test_a_multicast_sum_is_that_of_the_ranks_in_order(kind: str) -> None:
    generator = np.random.default_rng(3)
    out, buffers = aligned(128), [aligned(128) for _ in range(3)]
    values = [(generator.standard_normal(256) * np.exp2(generator.integers(-9, 9, 256))) for _ in range(3)]
    if kind == ".v4.f32":
        for buffer, each in zip(buffers, values, strict=True):
            buffer[:] = each[:128].astype(np.float32).view(np.uint32)
        parts = [buffer.view(np.float32) for buffer in buffers]
        wanted = ((parts[0] + parts[1]) + parts[2]).view(np.uint32)
    else:
        for buffer, each in zip(buffers, values, strict=True):
            buffer.view(np.uint16)[:] = (each.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        parts = [(buffer.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for buffer in buffers]
        bits = ((parts[0] + parts[1]) + parts[2]).view(np.uint32)
        wanted = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(np.uint32)
    carry_out(LANE + REDUCE.format(kind=kind), [*buffers, out], multicast=window(buffers))
    assert (out == wanted).all()


def test_multicast_stores_and_additions_reach_every_rank() -> None:
    buffers = [aligned(132) for _ in range(2)]
    pads = [buffer[:4] for buffer in buffers]
    body = """
    mov.b64 %rd3, 1152921504606846976;
    add.s64 %rd4, %rd3, %rd2;
    multimem.st.relaxed.sys.global.v4.f32 [ %rd4 + 0 ], { %r39, %r39, %r39, %r39 };
    setp.eq.b32 %p1, %r39, 0;
    @%p1 multimem.red.release.sys.global.add.u32 [ %rd3 + -8 ], 3;
"""
    arrays = [buffer[4:] for buffer in buffers]
    carry_out(LANE + body, [*arrays, *pads], multicast=window(arrays, before=16))
    assert all((array == np.repeat(np.arange(32), 4)).all() for array in arrays)
    assert [pad.tolist() for pad in pads] == [[0, 0, 3, 0]] * 2


def test_an_address_outside_of_the_window_is_refused() -> None:
    buffers = [aligned(128) for _ in range(2)]
    body = LANE + REDUCE.format(kind=".v4.f32").replace("[ %rd3 + 0 ]", "[ %rd3 + 2048 ]")
    with pytest.raises(MemoryFault, match="is no multicast address of the launch"):
        carry_out(body, [*buffers, buffers[0], buffers[0]], multicast=window(buffers))


@pytest.mark.parametrize("ptx", ["", ".visible .entry a(\n)\n{\nret;\n}\n.visible .entry b(\n)\n{\nret;\n}\n"])
def test_a_text_that_is_not_of_one_kernel_is_refused(ptx: str) -> None:
    with pytest.raises(UnreadPTX, match="no text of one kernel"):
        parsed(ptx)
