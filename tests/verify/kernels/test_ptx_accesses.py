"""What a block does to shared memory, read by carrying out PTX that is written here by hand."""

from __future__ import annotations

import pytest

from shardproof.verify.kernels.protocols import UnreadProtocol
from shardproof.verify.kernels.ptx_accesses import PADS, PRIVATE, TABLE, Access, Launch, accesses
from shardproof.verify.kernels.ptx_numbers import calculated

SIGNAL = """
    ld.param.b64 %rd1, [kernel_param_1];
    ld.global.b64 { %rd2 }, [ %rd1 + 8 ];
    mov.u32 %r1, %tid.x;
    setp.eq.b32 %p1, %r1, 0;
$L__swap:
    bar.sync 0;
    @%p1 atom.global.release.sys.cas.b32 %r2, [ %rd2 + 4 ], 0, 1;
    @%p1 st.shared.b32 [global_smem], %r2;
    bar.sync 0;
    ld.shared.b32 %r3, [global_smem];
    setp.ne.b32 %p2, %r3, 0;
    @%p2 bra $L__swap;
"""
READ = """
    ld.param.b64 %rd3, [kernel_param_0];
    ld.global.b64 { %rd4 }, [ %rd3 + 8 ];
    mad.wide.u32 %rd5, %r1, 4, %rd4;
    ld.global.b32 { %r4 }, [ %rd5 + 0 ];
"""
SIGNALLED = Access("swap", 1, 4, "release", 0, 1)


def done(body: str, num_threads: int = 2) -> list[Access]:
    ptx = f".visible .entry kernel(\n.param .u64 kernel_param_0\n)\n{{\n{body}    ret;\n}}\n"
    return accesses(ptx, Launch(2, num_threads, (TABLE, PADS), {PRIVATE: 7}))


def test_a_swap_that_is_tried_again_is_one_signal() -> None:
    assert done(SIGNAL) == [SIGNALLED]


def test_what_threads_read_of_a_peer_comes_with_its_place() -> None:
    assert done(SIGNAL + "bar.sync 0;\n" + READ) == [SIGNALLED, Access("read", 1, 0), Access("read", 1, 4)]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("    @%p2 bra $L__swap;\n", "", "is not tried again"),
        ("setp.ne", "setp.eq", "is not tried again"),
        ("release.sys", "release.gpu", "the scope is not sys"),
        ("], 0, 1;", "], 0, 2;", "swaps 0 for 2"),
        (
            "atom.global.release.sys.cas.b32",
            "atom.global.release.sys.exch.b32",
            "this access",
        ),
        ("%rd2 + 4 ], 0", "%rd9 + 4 ], 0", "the address is unknown"),
        ("@%p1 st.shared", "bar.sync 1;\n    @%p1 st.shared", "this access"),
        ("@%p1 st.shared", "@%p7 st.shared", "unknown whether"),
        ("@%p1 st.shared", "{ mysterious }\n    @%p1 st.shared", "no instruction"),
    ],
)
def test_a_signal_of_another_form_is_refused(before: str, after: str, words: str) -> None:
    assert SIGNAL.count(before) == 1
    with pytest.raises(UnreadProtocol, match=words):
        done(SIGNAL.replace(before, after))


def test_a_read_that_no_barrier_of_the_block_keeps_from_a_swap_is_refused() -> None:
    """One thread signals that all have read, and has not waited for the others."""
    swap_first = SIGNAL.replace("$L__swap:\n    bar.sync 0;", "$L__swap:")
    swap_first = swap_first.replace("    setp.ne", "    bar.sync 0;\n    setp.ne")
    head, _, tail = swap_first.partition("$L__swap:")
    assert done(head + READ + "    bar.sync 0;\n$L__swap:" + tail)[-1] == SIGNALLED
    with pytest.raises(UnreadProtocol, match="no barrier of the block lies between"):
        done(head + READ + "$L__swap:" + tail)


def test_threads_that_do_not_all_come_to_a_barrier_are_refused() -> None:
    with pytest.raises(UnreadProtocol, match="do not come to the same barrier"):
        done(SIGNAL + "    @%p1 bra $L__end;\n    bar.sync 0;\n$L__end:\n")


def test_what_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardproof.verify.kernels.ptx_accesses.MOST_STEPS", 1000)
    with pytest.raises(UnreadProtocol, match="not done after 1,000 steps"):
        done("$L__again:\n    bra $L__again;\n")


@pytest.mark.parametrize(
    ("opcode", "operands", "result"),
    [
        ("add.s32", (1, -2), 2**32 - 1),
        ("sub.s64", (1, 2), 2**64 - 1),
        ("mul.lo.s32", (2**31, 2), 0),
        ("mul.hi.s32", (-1, 3), 2**32 - 1),
        ("mul.hi.u32", (2**31, 6), 3),
        ("mul.wide.u32", (2**31, 4), 2**33),
        ("mad.wide.s32", (-1, 4, 2**40), 2**40 - 4),
        ("mad.lo.s64", (2, 3, 4), 10),
        ("shr.s32", (2**32 - 8, 2), 2**32 - 2),
        ("shr.u32", (2**32 - 8, 2), 2**30 - 2),
        ("cvt.s64.s32", (2**32 - 1,), 2**64 - 1),
        ("cvt.u64.u32", (2**32 - 1,), 2**32 - 1),
        ("setp.lt.s32", (2**32 - 1, 0), 1),
        ("setp.lt.u32", (2**32 - 1, 0), 0),
        ("min.s64", (-1, 0), 2**64 - 1),
        ("div.s32", (-7, 2), 2**32 - 3),
        ("rem.s32", (-7, 2), 2**32 - 1),
        ("bfe.u32", (0b110100, 2, 3), 0b101),
        ("bfe.s64", (0b110100, 2, 3), 2**64 - 3),
        ("bfe.s64", (-1, 62, 1), 2**64 - 1),
        ("bfe.s32", (2**31, 30, 9), 2**32 - 2),
        ("selp.b32", (5, 6, 0), 6),
        ("and.pred", (0, None), 0),
        ("or.pred", (None, 1), 1),
        ("and.pred", (1, None), None),
        ("add.rn.f32", (1, 2), None),
        ("cvt.rn.f32.s64", (1,), None),
        ("shfl.sync.bfly.b32", (1, 2, 3), None),
        ("add.s32", (1, None), None),
    ],
)
def test_whole_numbers_are_those_of_the_isa(opcode: str, operands: tuple[int | None, ...], result: int | None) -> None:
    assert calculated(opcode, operands) == result
