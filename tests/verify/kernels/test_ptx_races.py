"""Writes of what another thread has read, and barriers of a warp."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.ptx import carry_out
from shardproof.verify.kernels.ptx_block import UnknownInstruction
from shardproof.verify.kernels.ptx_races import BlockRace

BEGIN = """
    mov.u32 %r39, %tid.x;
    mad.lo.s32 %r1, %r39, 4, global_smem;
    st.shared.b32 [ %r1 + 0 ], %r39;
    bar.sync 0;
"""
WRITE = "st.shared.b32 [ %r1 + 0 ], %r39;\n"
WARP_BARRIER = "bar.warp.sync -1;\n"


def read(how: str) -> str:
    """Reads the value of another thread."""
    return f"{how}\nmad.lo.s32 %r3, %r2, 4, global_smem;\nld.shared.b32 %r4, [ %r3 + 0 ];\n"


NEIGHBOUR = read("xor.b32 %r2, %r39, 1;")
OTHER_WARP = read("xor.b32 %r2, %r39, 32;")
FIRST_OF_WARP = read("and.b32 %r2, %r39, 32;")
FIRST = read("mov.b32 %r2, 0;")


def races(body: str) -> str:
    """What is said of a body; empty where nothing is."""
    try:
        carry_out(BEGIN + body, [np.zeros(1, np.uint32)], 64, shared_bytes=256)
    except BlockRace as error:
        return str(error)
    return ""


@pytest.mark.parametrize("reads", [NEIGHBOUR, OTHER_WARP, FIRST_OF_WARP, FIRST, NEIGHBOUR + OTHER_WARP])
def test_what_another_has_read_is_not_written_before_a_barrier(reads: str) -> None:
    assert races(reads + "bar.sync 0;\n" + WRITE) == ""
    assert "no barrier of the block lies between" in races(reads + WRITE)


@pytest.mark.parametrize("reads", [NEIGHBOUR, FIRST_OF_WARP, FIRST_OF_WARP + NEIGHBOUR, NEIGHBOUR + FIRST_OF_WARP])
def test_a_barrier_of_the_warp_is_enough_within_it(reads: str) -> None:
    assert races(reads + WARP_BARRIER + WRITE) == ""
    assert races(WRITE + WARP_BARRIER + reads) == ""
    assert races(WRITE + reads) != ""
    assert races(reads + WARP_BARRIER + reads + WRITE) != ""


@pytest.mark.parametrize("reads", [OTHER_WARP, FIRST, NEIGHBOUR + OTHER_WARP, OTHER_WARP + NEIGHBOUR])
def test_a_barrier_of_the_warp_is_not_enough_between_warps(reads: str) -> None:
    assert "no barrier of the block lies between" in races(reads + WARP_BARRIER + WRITE)
    assert "no barrier of the block lies between" in races(WRITE + WARP_BARRIER + reads)


def test_a_thread_may_write_what_it_has_read_itself() -> None:
    assert races(read("mov.b32 %r2, %r39;") + WRITE + read("mov.b32 %r2, %r39;") + WRITE) == ""


def test_a_reader_is_not_forgotten_for_a_later_one() -> None:
    """Thread 32 reads byte 0, then thread 0 does, which writes it."""
    both = "setp.eq.u32 %p1, %r39, 32;\n@%p1 ld.shared.b32 %r4, [ global_smem + 0 ];\n"
    own = "setp.eq.u32 %p2, %r39, 0;\n@%p2 ld.shared.b32 %r4, [ global_smem + 0 ];\n"
    write = "@%p2 st.shared.b32 [ global_smem + 0 ], %r39;\n"
    assert "thread 0 writes byte 0 of shared memory, which thread 32 reads" in races(both + own + write)
    assert races(own + write) == ""


def test_a_barrier_of_a_part_of_a_warp_is_refused() -> None:
    with pytest.raises(UnknownInstruction, match="only a part of a warp comes to it"):
        races("setp.lt.u32 %p1, %r39, 5;\n@%p1 bar.warp.sync -1;\n")
