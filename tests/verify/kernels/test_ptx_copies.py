"""Asynchronous copies into shared memory: nobody knows what is there before they are waited for."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.ptx import carry_out, own_element
from shardproof.verify.kernels.ptx_block import UnknownInstruction
from shardproof.verify.kernels.ptx_copies import UNKNOWN
from shardproof.verify.kernels.ptx_memory import MemoryFault
from shardproof.verify.kernels.ptx_races import BlockRace

THREADS = 32
WORDS = np.arange(4 * THREADS, dtype=np.uint32) + 100
BEGIN = (
    own_element(1, 0, 128)
    + "mad.lo.s32 %r1, %r39, 16, global_smem;\n"
    + "add.s32 %r2, %r1, 512;\n"
    + own_element(2, 1, 64)
)
FIRST = "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, 0x10;\n"
SECOND = "cp.async.ca.shared.global [ %r2 + 0 ], [ %rd1 + 0 ], 0x4, 0x4;\n"
COMMIT = "cp.async.commit_group;\n"
END = (
    "ld.shared.b32 %r3, [ %r1 + 12 ];\nld.shared.b32 %r4, [ %r2 + 0 ];\nst.global.v2.b32 [ %rd2 + 0 ], { %r3, %r4 };\n"
)
FOURTH, ONE = WORDS[3::4].tolist(), WORDS[::4].tolist()
NOTHING = [UNKNOWN] * THREADS


def copied(body: str, words: np.ndarray = WORDS) -> list[list[int]]:
    """The fourth word of each thread's first copy, and the one of its second."""
    out = np.zeros((THREADS, 2), np.uint32)
    carry_out(BEGIN + body + END, [words, out], THREADS, shared_bytes=1024)
    return out.T.tolist()


@pytest.mark.parametrize(
    ("body", "first", "second"),
    [
        (FIRST + COMMIT + SECOND + COMMIT + "cp.async.wait_group 0;\n", FOURTH, ONE),
        (FIRST + SECOND + "cp.async.wait_all;\n", FOURTH, ONE),
        (FIRST + COMMIT + SECOND + COMMIT + "cp.async.wait_group 1;\n", FOURTH, NOTHING),
        (FIRST + COMMIT + SECOND + COMMIT, NOTHING, NOTHING),
        (FIRST + COMMIT + SECOND + "cp.async.wait_group 0;\n", FOURTH, NOTHING),
        (FIRST + SECOND + "cp.async.wait_group 0;\n", NOTHING, NOTHING),
        (FIRST + COMMIT + SECOND + COMMIT + COMMIT + "cp.async.wait_group 1;\n", FOURTH, ONE),
    ],
    ids=["both", "all", "one of two", "no wait", "open group", "no group", "empty group"],
)
def test_a_copy_is_there_when_its_group_was_waited_for(body: str, first: list[int], second: list[int]) -> None:
    assert copied(body) == [first, second]


def test_what_is_not_given_is_zero_and_not_read() -> None:
    body = "setp.lt.u32 %p1, %r39, 16;\nselp.b32 %r5, 16, 0, %p1;\n" + FIRST.replace("0x10, 0x10", "0x10, %r5")
    body += SECOND + COMMIT + "cp.async.wait_group 0;\n"
    assert copied(body)[0] == FOURTH[:16] + [0] * 16
    half = FIRST.replace("0x10, 0x10", "0x10, 8") + SECOND + "cp.async.wait_all;\n"
    assert copied(half)[0] == [0] * THREADS
    beyond = FIRST.replace("%rd1 + 0", "%rd1 + 4096").replace("0x10, 0x10", "0x10, 0") + SECOND
    assert copied(beyond + "cp.async.wait_all;\n") == [[0] * THREADS, ONE]


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        (FIRST.replace("%rd1 + 0", "%rd1 + 16"), MemoryFault, "cp.async.cg.* 4 bytes beyond the end of array 0"),
        (FIRST.replace("%rd1 + 0", "%rd1 + 4"), MemoryFault, "a source is no multiple of the 16 bytes"),
        (FIRST.replace("%r1 + 0", "%r1 + 8"), MemoryFault, "is no multiple of the 16 bytes"),
        (FIRST.replace("0x10, 0x10", "0x10, 18"), UnknownInstruction, "no multiple of 4 bytes up to 16"),
        (FIRST.replace("0x10, 0x10", "0x8, 0x8"), UnknownInstruction, "a copy of 8 bytes"),
    ],
)
def test_wrong_copies_are_refused(body: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        copied(body + SECOND)


def test_another_thread_may_read_a_copy_after_a_barrier_only() -> None:
    read = "xor.b32 %r6, %r39, 1;\nmad.lo.s32 %r6, %r6, 16, global_smem;\nld.shared.b32 %r7, [ %r6 + 0 ];\n"
    done = FIRST + SECOND + "cp.async.wait_all;\n"
    assert copied(done + "bar.sync 0;\n" + read) == [FOURTH, ONE]
    with pytest.raises(BlockRace, match="thread 0 reads byte 16 of shared memory, which thread 1 writes"):
        copied(done + read)


def test_a_copy_may_not_begin_while_another_thread_may_still_read() -> None:
    """A buffer that is filled again too early."""
    read = "xor.b32 %r6, %r39, 1;\nmad.lo.s32 %r6, %r6, 16, global_smem;\nld.shared.b32 %r7, [ %r6 + 0 ];\n"
    once = FIRST + SECOND + "cp.async.wait_all;\nbar.sync 0;\n" + read
    assert copied(once + "bar.sync 0;\n" + FIRST + "cp.async.wait_all;\n") == [FOURTH, ONE]
    with pytest.raises(BlockRace, match="thread 0 writes byte 0 of shared memory, which thread 1 reads"):
        copied(once + FIRST + "cp.async.wait_all;\n")
