"""The barriers of the table, of the C code and of the kernels are right, and what is wrong in any of them is found."""

from __future__ import annotations

import pytest

from helpers.paths import ROOT
from shardproof.backend.transport.symmetric.barrier import CHUNK_RECEIVER, CHUNK_SENDER, TWO_PHASES
from shardproof.verify.kernels.barrier_mutants import (
    C_MUTANTS,
    KERNEL_MUTANTS,
    TABLE_MUTANTS,
    SourceMutant,
    TableMutant,
    check_c,
)
from shardproof.verify.kernels.changed_kernels import UNCHANGED, check_changed_kernels
from shardproof.verify.kernels.protocols import check_chunks, check_collective
from shardproof.verify.kernels.source_protocols import (
    RECEIVERS,
    SENDERS,
    UnreadProtocol,
    c_protocol,
    ptx_protocol,
)

C_SOURCE = (ROOT / "backend" / "transport" / "symmetric" / "csrc" / "shared_memory.c").read_text()


def test_the_protocols_of_the_table_are_right() -> None:
    assert check_collective().ok
    assert check_collective(TWO_PHASES).ok
    assert check_chunks().ok


def test_two_phases_need_their_second_entry() -> None:
    without = (*TWO_PHASES[:5], *TWO_PHASES[7:])
    assert check_collective(without).kind == "wrong data"


@pytest.mark.parametrize("mutant", TABLE_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_table_is_found(mutant: TableMutant) -> None:
    found = mutant.check()
    assert found.kind in ("wrong data", "deadlock") and found.trace


def test_the_c_code_takes_the_steps_of_the_table() -> None:
    assert {c_protocol(C_SOURCE, name) for name in SENDERS} == {CHUNK_SENDER}
    assert {c_protocol(C_SOURCE, name) for name in RECEIVERS} == {CHUNK_RECEIVER}
    assert check_c(C_SOURCE).ok


@pytest.mark.parametrize("mutant", C_MUTANTS, ids=lambda mutant: mutant.name)
def test_wrong_c_code_is_found(mutant: SourceMutant) -> None:
    assert check_c(mutant.applied(C_SOURCE)).kind == "wrong data"


def test_c_code_of_another_form_is_refused() -> None:
    with pytest.raises(UnreadProtocol, match="publish is not one atomic access"):
        check_c(C_SOURCE.replace("memory_order_release); }", "order_of(signal)); }"))
    with pytest.raises(UnreadProtocol, match="no function put_chunk"):
        check_c(C_SOURCE.replace("static int put_chunk", "static int send_chunk"))


@pytest.fixture(scope="module")
def changed() -> dict[str, str]:
    return check_changed_kernels()


def test_the_compiled_kernel_is_right_and_each_change_of_its_source_is_found(changed: dict[str, str]) -> None:
    right, wrong = changed[UNCHANGED], {name: kind for name, kind in changed.items() if name != UNCHANGED}
    assert right == "ok" and wrong == {mutant.name: "wrong data" for mutant in KERNEL_MUTANTS}


def test_ptx_of_another_form_is_refused() -> None:
    swap = "atom.global.release.{}.cas.b32 %r1, [ %rd1 + 0 ], {}, {};"
    assert [str(step.act) for step in ptx_protocol(swap.format("sys", 0, 1))] == ["signal"]
    for line in (swap.format("gpu", 0, 1), swap.format("sys", 0, 2), "red.global.add.u32 [%rd1], 1;"):
        with pytest.raises(UnreadProtocol):
            ptx_protocol(line)
