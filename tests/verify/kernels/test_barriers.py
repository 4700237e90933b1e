"""The barriers of the table, of the C code and of the kernels are right, and what is wrong in any of them is found."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from helpers.paths import ROOT
from shardproof.backend.transport.symmetric.barrier import (
    BOARD_RECEIVER,
    BOARD_SENDER,
    CHUNK_RECEIVER,
    CHUNK_SENDER,
    COLLECTIVES,
    NUM_SLOTS,
    RING,
    SLEEP,
)
from shardproof.verify.kernels.barrier_mutants import (
    C_MUTANTS,
    KERNEL_MUTANTS,
    MULTICAST_MUTANTS,
    TABLE_MUTANTS,
    SourceMutant,
    TableMutant,
    check_c,
    found_in_c,
)
from shardproof.verify.kernels.c_protocols import c_doorbell, c_protocol, looks_at_bell_first
from shardproof.verify.kernels.changed_kernels import UNCHANGED, check_changed_kernels
from shardproof.verify.kernels.doorbell import check_doorbell
from shardproof.verify.kernels.kernel_protocols import check_kernels
from shardproof.verify.kernels.protocols import PROTOCOLS, UnreadProtocol, check

C_SOURCE = (ROOT / "backend" / "transport" / "symmetric" / "csrc" / "shared_memory.c").read_text()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_of_the_table_is_right(protocol: str) -> None:
    found = check(protocol)
    assert found.ok and found.trace == () and found.num_states > 1


def test_an_unknown_protocol_is_answered_with_those_there_are() -> None:
    with pytest.raises(KeyError, match=r"'chunk' is none of the protocols: collective, .*doorbell"):
        check("chunk")


@pytest.mark.parametrize("mutant", TABLE_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_table_is_found(mutant: TableMutant) -> None:
    found = mutant.check()
    assert found.kind == mutant.finds and found.trace


def test_the_c_code_takes_the_steps_of_the_table() -> None:
    read = {name: c_protocol(C_SOURCE, f"{name}_chunk") for name in ("put", "take")}
    assert read == {"put": CHUNK_SENDER, "take": CHUNK_RECEIVER}
    assert (c_protocol(C_SOURCE, "put_rows"), c_protocol(C_SOURCE, "add_block")) == (CHUNK_SENDER, CHUNK_RECEIVER)
    assert (c_protocol(C_SOURCE, "put_board"), c_protocol(C_SOURCE, "take_board")) == (BOARD_SENDER, BOARD_RECEIVER)
    assert (c_protocol(C_SOURCE, "show_block"), c_protocol(C_SOURCE, "take_sums")) == (BOARD_SENDER, BOARD_RECEIVER)
    assert (c_doorbell(C_SOURCE, "ring"), c_doorbell(C_SOURCE, "sleep_on")) == (RING, SLEEP)
    assert looks_at_bell_first(C_SOURCE)
    assert f"#define NUM_SLOTS {NUM_SLOTS}\n" in C_SOURCE
    assert check_c(C_SOURCE).ok


@pytest.mark.parametrize("mutant", C_MUTANTS, ids=lambda mutant: mutant.name)
def test_wrong_c_code_is_found(mutant: SourceMutant) -> None:
    assert found_in_c(mutant.applied(C_SOURCE)) == mutant.finds


def test_c_code_that_looks_for_signals_before_its_bell_is_found() -> None:
    rung = "        uint32_t rung = number_of(doorbell);\n"
    done = "        if ((int32_t)(number_of(signal) - number) >= 0) return (End){DONE, peer};\n"
    assert C_SOURCE.count(rung + done) == 1
    assert found_in_c(C_SOURCE.replace(rung + done, done + rung)) == "deadlock"


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("memory_order_release); }", "order_of(signal)); }", "0 lines of the form .*publish"),
        ("memory_order_acquire); }", "memory_order_consume); }", "the order consume is none"),
        ("static int put_chunk", "static int send_chunk", "no function put_chunk"),
        ("all->sent[peer]);\n    ring", "all->sent[peer]);\n    asm(0);\n    ring", "asm.0.: no statement"),
        ("if (sleep_on(doorbell, rung))", "if (sleep_on(doorbell, 0))", "does not sleep once on what it saw"),
    ],
)
def test_c_code_of_another_form_is_refused(before: str, after: str, words: str) -> None:
    with pytest.raises(UnreadProtocol, match=words):
        check_c(C_SOURCE.replace(before, after))


def test_a_bell_that_comes_round_needs_as_many_rings_as_it_has_values() -> None:
    """Four rings in all: a bell of 4 values comes back to the first one when nobody rings any more."""
    assert [check_doorbell(num_values=values).kind for values in (2, 4, 5)] == ["deadlock", "deadlock", "ok"]


def test_compiled_kernels_take_the_steps_of_the_table_and_are_right() -> None:
    """One of each kind: those that bring, add up in one and in two phases, and by multicast."""
    few = ("all_gather", "all_reduce_one_shot", "all_reduce_two_shot", "all_gather_multicast")
    assert set(few) < set(COLLECTIVES) and check_kernels(few) == dict.fromkeys(few, "")


@pytest.mark.full
def test_every_compiled_kernel_is_right_on_all_architectures() -> None:
    assert check_kernels(architectures=(80, 90, 100)) == dict.fromkeys(COLLECTIVES, "")


def test_each_change_of_a_kernels_source_is_found() -> None:
    changed = check_changed_kernels()
    assert [changed.pop(f"{UNCHANGED} {name}") for name in ("all_gather", "all_gather_multicast")] == ["ok", "ok"]
    assert changed == {mutant.name: mutant.finds for mutant in (*KERNEL_MUTANTS, *MULTICAST_MUTANTS)}


def test_the_table_is_explored_without_triton_and_torch() -> None:
    """For machines that have neither: a page, the doctor."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from shardproof.verify.kernels.protocols import check\n"
        "print(check('collective').ok, *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ok, *modules = done.stdout.split()
    assert ok == "True" and not {"torch", "triton"} & set(modules)


def test_equal_searches_find_the_same_way_in_every_process() -> None:
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from shardproof.verify.kernels.barrier_mutants import TABLE_MUTANTS\n"
        "print([mutant.check() for mutant in TABLE_MUTANTS])"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1] and "wrong data" in said[0]
