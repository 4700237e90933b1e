"""The barriers of the table, of the C code and of the kernels are right, and what is wrong in any of them is found."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from helpers.paths import ROOT
from shardproof.backend.transport.symmetric.barrier import CHUNK_RECEIVER, CHUNK_SENDER, COLLECTIVE
from shardproof.verify.kernels.barrier_mutants import (
    C_MUTANTS,
    KERNEL_MUTANTS,
    TABLE_MUTANTS,
    SourceMutant,
    TableMutant,
    check_c,
    check_ptx,
)
from shardproof.verify.kernels.protocols import check_chunks, check_collective
from shardproof.verify.kernels.source_protocols import (
    RECEIVERS,
    SENDERS,
    UnreadProtocol,
    c_protocol,
    ptx_protocol,
)

C_SOURCE = (ROOT / "backend" / "transport" / "symmetric" / "csrc" / "shared_memory.c").read_text()
KERNELS = ROOT / "backend" / "kernels"


def test_the_protocols_of_the_table_are_right() -> None:
    assert check_collective().ok
    assert check_chunks().ok


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


def compiled(collectives: ModuleType) -> str:
    """The PTX of an all-gather of two ranks."""
    types = {"table": "u64", "pads": "u64", "out": "*fp32", "n": "i64", "rank": "i32"}
    constants = {"WORLD": 2, "BLOCK": 256}
    source = ASTSource(
        fn=collectives.all_gather, signature={**types, **dict.fromkeys(constants, "constexpr")}, constexprs=constants
    )
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def kernels_of(folder: Path, meet: str) -> ModuleType:
    """The collectives over a changed `meet`, as modules of their own."""
    package = ".".join(["shardproof", "backend", folder.name])
    for name in ("peers", "tree", "meet", "collectives"):
        text = meet if name == "meet" else (KERNELS / f"{name}.py").read_text()
        (folder / f"{name}.py").write_text(text)
    for name in ("", "peers", "tree", "meet", "collectives"):
        path = folder / f"{name or '__init__'}.py"
        path.touch()
        spec = importlib.util.spec_from_file_location(f"{package}.{name}".rstrip("."), path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return module


def test_the_compiled_kernel_takes_the_steps_of_the_table(tmp_path: Path) -> None:
    ptx = compiled(kernels_of(tmp_path, (KERNELS / "meet.py").read_text()))
    assert ptx_protocol(ptx) == COLLECTIVE[1:]
    assert check_ptx(ptx).ok


@pytest.mark.parametrize("mutant", KERNEL_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_kernel_is_found(mutant: SourceMutant, tmp_path: Path) -> None:
    ptx = compiled(kernels_of(tmp_path, mutant.applied((KERNELS / "meet.py").read_text())))
    assert check_ptx(ptx).kind == "wrong data"


def test_ptx_of_another_form_is_refused() -> None:
    swap = "atom.global.release.{}.cas.b32 %r1, [ %rd1 + 0 ], {}, {};"
    assert [str(step.act) for step in ptx_protocol(swap.format("sys", 0, 1))] == ["signal"]
    for line in (swap.format("gpu", 0, 1), swap.format("sys", 0, 2), "red.global.add.u32 [%rd1], 1;"):
        with pytest.raises(UnreadProtocol):
            ptx_protocol(line)
